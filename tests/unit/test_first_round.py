"""The first round of a request: beside it the target says who it is, and nothing is shown that another one computed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specsplit.core.errors import ContextExceeded, DeadlineExceeded, WorkerUnreachable
from specsplit.core.types import Identity, Proposal, Turn, Verdict
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.replicas import Replicas
from specsplit.orchestrator.request import RetryPolicy
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTarget, FakeTokenizer
from tests.support.flaky import PROMPT, collect, request
from tests.support.virtual_time import LoopClock, run_virtual

TRIP_S = 0.1


class Distant(FakeTarget):
    """A target every call to which takes a round trip, and which may be replaced."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.changes = changes
        self.ping_s = TRIP_S
        self.failures: list[Exception] = []
        """Errors of the next pings."""

    async def ping(self) -> Identity:
        await asyncio.sleep(self.ping_s)
        if self.failures:
            raise self.failures.pop()
        return replace(await super().ping(), **self.changes)

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        await asyncio.sleep(TRIP_S)
        return await super().verify(turn, proposal)

    def become(self, **changes: Any) -> None:
        self.changes, self.context = changes, changes.get("context", self.context)
        self.slots.clear()


def orchestrator(target: FakeTarget | Replicas, **policy: Any) -> Orchestrator:
    speculation = Speculation(mode="plain", lookup=False)
    return Orchestrator(target, None, FakeTokenizer(), speculation, LoopClock(), retry_policy=RetryPolicy(**policy))


@pytest.mark.parametrize("are_replicas", [False, True])
def test_a_request_of_one_token_takes_one_round_trip(are_replicas: bool) -> None:
    target = Distant()

    async def main() -> list[float]:
        owner, times = orchestrator(Replicas({"a": target}) if are_replicas else target), list[float]()
        for _ in range(3):
            times.append((await collect(owner, request(1)))[1].timings.ttft_s)
        return times

    assert run_virtual(main) == pytest.approx([2 * TRIP_S, TRIP_S, TRIP_S])


@pytest.mark.parametrize(
    "changes",
    [
        {"weights_hash": "other"},
        {"dtype": "bf16"},
        {"exactness": "bits", "numerics": "other"},
        {"context": len(PROMPT) + 3},
        {"step_times": ((1, 0.5),)},
    ],
)
def test_a_text_is_that_of_the_target_which_is_there_now(changes: dict[str, Any]) -> None:
    target = Distant()

    async def main() -> None:
        owner = orchestrator(target)
        await collect(owner, request(2))
        target.become(**changes)
        num_turns = len(target.turns)
        chunks, result = await collect(owner, request(3))
        identity = await target.ping()
        assert (result.dtype, result.exactness, result.numerics) == (
            identity.dtype,
            identity.exactness,
            identity.numerics,
        )
        assert (len(chunks), result.degraded, result.exactness_reason) == (3, (), "")
        assert len(target.turns) == num_turns + 4, "the first round was run once more"
        again = (await collect(owner, request(3)))[1]
        assert again.timings.ttft_s == pytest.approx(TRIP_S)

    run_virtual(main)
    assert not target.slots


def test_room_is_that_of_the_target_which_is_there_now() -> None:
    target = Distant()

    async def main() -> None:
        owner = orchestrator(target)
        target.become(context=len(PROMPT) + 1)
        await collect(owner, request(1))
        for context in (len(PROMPT), len(PROMPT) + 1):
            target.become(context=context)
            if context == len(PROMPT):
                with pytest.raises(ContextExceeded):
                    await owner.generate(request(1))
            else:
                await collect(owner, request(1))

    run_virtual(main)


@pytest.mark.parametrize("failure", [WorkerUnreachable, DeadlineExceeded])
def test_a_ping_that_fails_beside_the_first_round_fails_no_request(failure: Callable[[str], Exception]) -> None:
    target = Distant()

    async def main() -> None:
        owner = orchestrator(target)
        await collect(owner, request(2))
        target.failures.append(failure("no answer"))
        _, result = await collect(owner, request(2))
        assert [(phase.worker, phase.last_round) for phase in result.degraded] == [("target", 0)]

    run_virtual(main)
    assert not target.slots


def test_a_target_that_verifies_and_answers_no_ping_keeps_to_the_deadline() -> None:
    target = Distant()

    async def main() -> float:
        owner, loop = orchestrator(target), asyncio.get_running_loop()
        await collect(owner, request(2))
        target.ping_s, began_s = math.inf, loop.time()
        with pytest.raises(DeadlineExceeded):
            await owner.generate(request(2, timeout_s=3.0))
        return loop.time() - began_s

    assert run_virtual(main) == pytest.approx(3.0)
    assert not target.slots


def test_a_replica_that_became_another_model_shows_nothing() -> None:
    good, other = Distant(), Distant()

    async def main() -> None:
        owner = orchestrator(Replicas({"other": other, "good": good}))
        await collect(owner, request(2))
        assert other.turns
        other.become(weights_hash="other")
        num_turns = len(good.turns)
        await collect(owner, request(2))
        assert len(good.turns) == num_turns + 2

    run_virtual(main)
