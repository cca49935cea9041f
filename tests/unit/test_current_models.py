"""A gateway follows its targets: one that has become another model is connected to anew, under its own name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from specsplit.assembly.current_models import current_models
from specsplit.core.errors import InvalidSettings, PeerMismatch
from specsplit.core.ports import Verifier
from specsplit.gateway.models import ModelTable, ServedModel
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.replicas import Replicas
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTokenizer
from tests.support.replicas import Killable
from tests.support.virtual_time import run_virtual

OTHER = {"model": "other", "weights_hash": "22"}


class Unwarmed(ServedModel):
    """It uses no thread, for which virtual time does not wait."""

    async def warm(self) -> None:
        pass


class Link:
    """Connects to a target, as the gateway does, and counts."""

    def __init__(self, verifier: Callable[[], Verifier]) -> None:
        self._verifier = verifier
        self.num_opened = self.num_closed = 0

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[ServedModel]:
        verifier, tokenizer = self._verifier(), FakeTokenizer()
        tokenizer.vocab_hash = (await verifier.ping()).vocab_hash
        orchestrator = Orchestrator(verifier, None, tokenizer, Speculation(mode="plain"))
        identity = await orchestrator.connect()
        self.num_opened += 1
        try:
            yield Unwarmed(identity.model, identity, tokenizer, verifier, lambda _: orchestrator)
        finally:
            self.num_closed += 1


def single(target: Killable) -> Link:
    return Link(lambda: target)


def two(*targets: Killable) -> Link:
    return Link(lambda: Replicas({str(number): target for number, target in enumerate(targets)}))


def names(table: ModelTable) -> list[str]:
    return [model.name for model in table.ready]


@pytest.mark.parametrize("changed", ["vocab_hash", "weights_hash", "tokenizer_hash"])
def test_a_target_that_became_another_model_is_connected_anew(changed: str, caplog: pytest.LogCaptureFixture) -> None:
    target, names_then = Killable(), dict[int, list[str]]()
    link = single(target)
    changes = {"model": "other", changed: "22"}

    async def main() -> None:
        async with current_models([link.connect]) as table:
            await asyncio.sleep(2.5)
            target.changes = changes
            for second in (2, 10):
                await asyncio.sleep(second)
                names_then[second] = names(table)

    run_virtual(main)
    assert names_then == {2: [], 10: ["other"]}
    assert (link.num_opened, link.num_closed) == (2, 2)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "is now other (" in said
    assert "22" in said


def test_a_model_is_kept_open_for_the_requests_that_began_with_it() -> None:
    target, closed = Killable(), list[int]()
    link = single(target)

    async def main() -> None:
        async with current_models([link.connect]) as table:
            model = table.find(None)
            target.changes = OTHER
            await asyncio.sleep(60)
            assert table.find(None) is not model
            closed.append(link.num_closed)
            assert model.name == "fake-Killable"
            del model
            await asyncio.sleep(5)
            closed.append(link.num_closed)

    run_virtual(main)
    assert closed == [0, 1]


def test_a_rollout_that_shows_both_models_in_turn_does_not_flap() -> None:
    target = Killable()
    link = single(target)

    async def main() -> list[str]:
        async with current_models([link.connect]) as table:
            for number in range(60):
                target.changes = {} if number % 3 == 0 else OTHER
                await asyncio.sleep(1)
            assert link.num_opened == 1
            target.changes = {}
            await asyncio.sleep(2)
            return names(table)

    assert run_virtual(main) == ["fake-Killable"]


def test_replicas_stay_until_the_last_one_serves_another_model() -> None:
    targets = Killable(), Killable()
    link = two(*targets)

    async def main() -> list[list[str]]:
        seen = list[list[str]]()
        async with current_models([link.connect]) as table:
            for target in targets:
                target.changes = OTHER
                await asyncio.sleep(20)
                seen.append(names(table))
        return seen

    assert run_virtual(main) == [["fake-Killable"], ["other"]]
    assert link.num_opened == 2


def test_a_target_that_does_not_answer_is_still_the_same_model() -> None:
    target = Killable()
    link = single(target)

    async def main() -> list[str]:
        async with current_models([link.connect]) as table:
            target.lose()
            await asyncio.sleep(60)
            assert names(table) == []
            target.is_lost = False
            await asyncio.sleep(2)
            return names(table)

    assert run_virtual(main) == ["fake-Killable"]
    assert link.num_opened == 1


def failing(link: Link, errors: list[str]) -> Callable[[], Any]:
    """Return what connects once, and then fails with each of the errors before it connects again."""

    @asynccontextmanager
    async def connect() -> AsyncGenerator[ServedModel]:
        if link.num_opened and errors:
            raise PeerMismatch(errors.pop(0))
        async with link.connect() as model:
            yield model

    return connect


def test_one_that_cannot_be_connected_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    target = Killable()
    link = single(target)

    async def main() -> list[str]:
        async with current_models([failing(link, ["a draft of another family"] * 3)]) as table:
            target.changes = OTHER
            await asyncio.sleep(60)
            return names(table)

    assert run_virtual(main) == ["other"]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 1, "the same reason is said once"
    assert said[0].endswith("a draft of another family")


def test_a_name_that_another_model_has_is_not_taken() -> None:
    targets = Killable(), Killable()
    targets[1].changes = OTHER
    links = [single(target) for target in targets]

    async def main() -> tuple[list[str], list[str]]:
        async with current_models([link.connect for link in links]) as table:
            targets[0].changes = OTHER
            await asyncio.sleep(20)
            meanwhile = names(table)
            targets[0].changes = {"model": "third", "weights_hash": "33"}
            await asyncio.sleep(20)
            return meanwhile, names(table)

    assert run_virtual(main) == (["other"], ["third", "other"])


def test_names_that_stand_twice_are_refused_at_the_start() -> None:
    links = [single(Killable()) for _ in range(2)]

    async def main() -> None:
        async with current_models([link.connect for link in links]):
            raise AssertionError

    with pytest.raises(InvalidSettings):
        run_virtual(main)
    assert [link.num_closed for link in links] == [1, 1]
