"""Texts that several targets computed: each one's tokens are recomputed by another, never by itself."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.errors import WorkerFailed, WrongResult
from specsplit.orchestrator.replicas import Auditing, Replicas
from tests.support.audits import REQUEST, TREES, Liar, Scripted, generate, made, over, quarantined, read, truth
from tests.support.fakes import FakeTarget, Faults


def failing_once(target: FakeTarget) -> FakeTarget:
    """Return a target whose fifth call fails, so that its text goes on at another one."""
    target.faults = Faults(fail_at=4, error=WorkerFailed("it failed"))
    return target


def half_audited() -> Auditing:
    """Audit the sixth round alone, which the second target computes."""
    return Auditing(0.5, rng=Scripted(5))


@pytest.mark.parametrize("liar", [0, 1])
def test_of_two_owners_neither_checks_its_own_tokens(liar: int, caplog: pytest.LogCaptureFixture) -> None:
    targets = [failing_once(Liar(2)), FakeTarget()] if liar == 0 else [failing_once(FakeTarget()), Liar(5)]
    orchestrator, shown = made(*targets, auditing=half_audited()), list[int]()
    with pytest.raises(WrongResult, match="compute different tokens, and no third one tells"):
        asyncio.run(read(orchestrator, shown))
    assert len(shown) == 5, "the round that was drawn was not shown"
    assert not quarantined(caplog)


@pytest.mark.parametrize("mode", TREES)
def test_honest_owners_find_each_others_tokens_right(mode: Mode) -> None:
    targets = [failing_once(FakeTarget()), FakeTarget()]
    result, audit = asyncio.run(generate(made(*targets, mode=mode, auditing=half_audited())))
    assert result.token_ids == truth()
    assert (audit.num_rounds, audit.num_mismatches, audit.num_missed) == (1, 0, 0)
    assert audit.num_tokens >= 6, "those of both"


def test_a_third_tells_which_of_two_owners_lied(caplog: pytest.LogCaptureFixture) -> None:
    orchestrator = made(failing_once(Liar(2)), FakeTarget(), FakeTarget(), auditing=half_audited())
    with pytest.raises(WrongResult, match="target-0 was found to compute wrong results, and token 3 of"):
        asyncio.run(orchestrator.generate(REQUEST))
    assert quarantined(caplog) == ["target-0"]


def test_a_judge_that_takes_over_checks_what_it_did_not_compute() -> None:
    """It is trusted, but the tokens before its own are those of a target that another session found wrong."""
    together = Replicas({"target-0": Liar(2)}, Auditing(0.5, ("judge", FakeTarget()), Scripted()))

    async def main() -> None:
        async with aclosing(over(together).stream(REQUEST)) as chunks:
            for _ in range(5):
                await anext(chunks)
            together.members[0].quarantine("it lied to another session.")
            await anext(chunks)

    with pytest.raises(WrongResult, match="target-0 was found to compute wrong results, and token 3 of"):
        asyncio.run(main())
