"""Rounds that another target recomputes: a liar is found and named, an honest one never is, nobody is waited for."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.errors import Overloaded, WrongResult
from specsplit.core.types import Identity, Proposal, SamplingParams, Turn, Verdict
from specsplit.orchestrator.audit_counts import AuditCounts
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.replicas import Auditing, Replicas
from specsplit.orchestrator.request import Result
from specsplit.speculation.options import Speculation
from tests.support.audits import REQUEST, TREES, Liar, Scripted, generate, made, over, quarantined, read, truth
from tests.support.fakes import FakeTarget
from tests.support.language import FakeTokenizer
from tests.support.virtual_time import run_virtual


@pytest.mark.parametrize("mode", TREES)
@pytest.mark.parametrize("position", [0, 1, 9, 23])
def test_a_liar_is_quarantined_and_nobody_reads_its_token(
    mode: Mode, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    targets = [Liar(position), FakeTarget(), FakeTarget()]
    result, audit = asyncio.run(generate(made(*targets, mode=mode)))
    assert result.token_ids == truth()
    assert quarantined(caplog) == ["target-0"]
    assert audit.num_mismatches == 1
    assert audit.num_tokens == 24
    assert not audit.num_missed
    assert [(phase.worker, phase.reason) for phase in result.degraded if phase.worker == "target"] == [
        ("target", "wrong")
    ]
    assert not any(target.slots for target in targets[1:])


@pytest.mark.parametrize("mode", TREES)
def test_a_liar_that_audits_is_found_by_the_third(mode: Mode, caplog: pytest.LogCaptureFixture) -> None:
    targets = [FakeTarget(), Liar(7), FakeTarget()]
    result, audit = asyncio.run(generate(made(*targets, mode=mode)))
    assert result.token_ids == truth()
    assert quarantined(caplog) == ["target-1"]
    assert audit.num_mismatches == 1
    assert not result.degraded


def test_a_third_that_lies_earlier_is_found_too(caplog: pytest.LogCaptureFixture) -> None:
    drawn = Auditing(0.5, rng=Scripted(9))
    targets = [FakeTarget(), Liar(7), Liar(3), FakeTarget()]
    result, audit = asyncio.run(generate(made(*targets, auditing=drawn)))
    assert result.token_ids == truth()
    assert quarantined(caplog) == ["target-2", "target-1"]
    assert audit.num_mismatches == 2


def test_of_two_that_differ_nobody_knows_which_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    orchestrator = made(FakeTarget(), Liar(4))

    async def main() -> int:
        shown: list[int] = []
        with pytest.raises(WrongResult, match=r"target-0 and target-1 compute different tokens.*--auditor\.$"):
            await read(orchestrator, shown)
        return len(shown)

    assert asyncio.run(main()) == 4, "the token in doubt was not shown"
    assert not quarantined(caplog)


@pytest.mark.parametrize("mode", TREES)
def test_a_trusted_auditor_needs_no_third_and_goes_on_alone(mode: Mode, caplog: pytest.LogCaptureFixture) -> None:
    auditor = FakeTarget()
    orchestrator = made(Liar(5), mode=mode, auditing=Auditing(1.0, ("judge", auditor)))

    async def main() -> list[tuple[Result, AuditCounts]]:
        return [await generate(orchestrator) for _ in range(2)]

    (first, audit), (second, _) = asyncio.run(main())
    assert first.token_ids == second.token_ids == truth()
    assert quarantined(caplog) == ["target-0"]
    assert audit.num_mismatches == 1
    assert not auditor.slots


def test_what_was_shown_before_it_was_audited_ends_in_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    orchestrator = made(Liar(6), FakeTarget(), FakeTarget(), auditing=Auditing(0.5, rng=Scripted(3, 10)))

    async def main() -> tuple[int, Result]:
        shown: list[int] = []
        with pytest.raises(WrongResult, match="target-0 was found to compute wrong results, and token 7 of"):
            await read(orchestrator, shown)
        return len(shown), await orchestrator.generate(REQUEST)

    shown, again = asyncio.run(main())
    assert shown == 10
    assert again.token_ids == truth()
    assert quarantined(caplog) == ["target-0"]


def test_sessions_of_a_target_that_another_session_found_wrong_leave_it() -> None:
    liar = Liar(6)
    orchestrator = made(liar, FakeTarget(), auditing=Auditing(0.5, ("judge", FakeTarget()), Scripted(10)))

    async def main() -> None:
        # Two sessions at the liar and one at the other target; the first of them is audited in its 11th round.
        streams = [orchestrator.stream(REQUEST) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(WrongResult):
            async for _ in streams[0]:
                pass
        before = len(liar.turns)
        result = None
        async with aclosing(streams[2]) as rest:
            async for last in rest:
                result = last.result
        assert result is not None
        assert result.token_ids == truth()
        assert result.audit is not None
        assert result.audit.num_rounds == 1, "what it had from the liar was audited at once"
        assert len(liar.turns) == before
        await streams[1].aclose()

    asyncio.run(main())


class Full(FakeTarget):
    """A target without a free slot for a while."""

    num_refusals = 2

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        if turn.opening is not None and self.num_refusals:
            self.num_refusals -= 1
            assert turn.max_wait_s == 0
            raise Overloaded("it is full", 60.0)
        return await super().verify(turn, proposal)


def test_an_audit_that_nobody_has_room_for_is_missed_and_made_up_for() -> None:
    result, audit = asyncio.run(generate(made(FakeTarget(), auditing=Auditing(0.5, ("judge", Full()), Scripted(3)))))
    assert (audit.num_missed, audit.num_rounds, audit.num_mismatches) == (2, 1, 0)
    assert audit.num_tokens == 6, "those of the two rounds that were missed, too"
    assert result.token_ids == truth()


class Silent(FakeTarget):
    """A target that is stopped: it answers nothing any more once a verify has come."""

    is_stopped = False

    async def ping(self) -> Identity:
        if self.is_stopped:
            await asyncio.Event().wait()
        return await super().ping()

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        self.is_stopped = True
        await asyncio.Event().wait()
        raise AssertionError("it is silent")


def test_a_silent_auditor_holds_a_text_up_for_a_few_seconds_once() -> None:
    async def main() -> float:
        silent = Silent()
        together = Replicas({"target": FakeTarget()}, Auditing(1.0, ("judge", silent)))
        orchestrator = Orchestrator(together, None, FakeTokenizer(), Speculation(mode="plain", lookup=False))
        await together.check()
        watching, loop = asyncio.create_task(together.watch()), asyncio.get_running_loop()
        began_s = loop.time()
        result = await orchestrator.generate(REQUEST)
        watching.cancel()
        await asyncio.wait({watching})
        assert result.token_ids == truth()
        assert result.audit is not None
        assert result.audit.num_missed == 24
        return loop.time() - began_s

    assert run_virtual(main) <= 4.0


def test_an_auditor_that_answers_late_is_waited_for_once() -> None:
    async def main() -> tuple[AuditCounts, float]:
        together = Replicas({"target": FakeTarget()}, Auditing(1.0, ("judge", FakeTarget())))
        orchestrator = Orchestrator(together, None, FakeTokenizer(), Speculation(mode="plain", lookup=False))
        await together.check()
        judge, loop = together.members[1], asyncio.get_running_loop()
        judge.set_ready(is_ready=False, why="it is busy")
        loop.call_later(2.0, lambda: judge.set_ready(is_ready=True))
        began_s = loop.time()
        _, audit = await generate(orchestrator)
        first_s, began_s = loop.time() - began_s, loop.time()
        judge.set_ready(is_ready=False, why="it is gone")
        _, missed = await generate(orchestrator)
        assert (audit.num_rounds, missed.num_missed) == (24, 24)
        return audit, max(first_s, loop.time() - began_s)

    audit, longest_s = run_virtual(main)
    assert not audit.num_missed
    assert 2.0 <= longest_s <= 5.5


class Near(Liar):
    """A target of other arithmetic: its pick is another one, by less than the bias that it is asked about."""

    def __init__(self, dtype: str, gap: float, *positions: int) -> None:
        super().__init__(*positions)
        self._dtype, self._gap = dtype, gap

    async def ping(self) -> Identity:
        return replace(await super().ping(), dtype=self._dtype)

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        params = turn.opening
        if params is not None and params.sampling.logit_bias:
            ((token_id, bias),) = params.sampling.logit_bias
            verdict = await super().verify(turn, proposal)
            return verdict if bias < self._gap else replace(verdict, token_ids=(token_id,))
        return await super().verify(turn, proposal)


class Typed(FakeTarget):
    """A target with weights of this number format."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self._dtype = dtype

    async def ping(self) -> Identity:
        return replace(await super().ping(), dtype=self._dtype)


@pytest.mark.parametrize(
    ("dtype", "gap", "ties"), [("fp32", 0.0009, 2), ("fp32", 0.002, 0), ("bf16", 0.4, 2), ("int4", 0.6, 0)]
)
def test_near_ties_are_no_lies(dtype: str, gap: float, ties: int, caplog: pytest.LogCaptureFixture) -> None:
    targets = Typed(dtype), Near(dtype, gap, 5, 8), Typed(dtype)
    result, audit = asyncio.run(generate(made(*targets)))
    assert result.token_ids == truth()
    assert (audit.num_ties, audit.num_mismatches) == (ties, 0 if ties else 1)
    assert quarantined(caplog) == ([] if ties else ["target-1"])


class Exact(FakeTarget):
    """A target that promises bits."""

    async def ping(self) -> Identity:
        return replace(await super().ping(), exactness="bits", numerics="abc")


class ExactNear(Near):
    """The same, with an arithmetic that is another one after all."""

    async def ping(self) -> Identity:
        return replace(await super().ping(), exactness="bits", numerics="abc")


def test_between_targets_that_promise_bits_there_are_no_ties(caplog: pytest.LogCaptureFixture) -> None:
    _, audit = asyncio.run(generate(made(Exact(), ExactNear("fp32", 0.0001, 5), Exact())))
    assert (audit.num_ties, audit.num_mismatches) == (0, 1)
    assert quarantined(caplog) == ["target-1"]


class OtherArithmetic(FakeTarget):
    """An honest target that promises bits, with other numerics than those of Exact."""

    async def ping(self) -> Identity:
        return replace(await super().ping(), exactness="bits", numerics="xyz")

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        true = await super().verify(turn, proposal)
        log_probs = tuple(replace(each, log_prob=each.log_prob - 1e-6) for each in true.log_probs)
        return replace(true, log_probs=log_probs)


@pytest.mark.parametrize("mode", TREES)
def test_who_takes_a_liars_place_may_have_other_numerics(mode: Mode, caplog: pytest.LogCaptureFixture) -> None:
    class ExactLiar(Liar, Exact):
        pass

    targets, auditing = (ExactLiar(5), OtherArithmetic()), Auditing(1.0, ("judge", Exact()))
    result, audit = asyncio.run(generate(made(*targets, mode=mode, auditing=auditing)))
    assert quarantined(caplog) == ["target-0"]
    assert (result.token_ids, audit.num_tokens) == (truth(), 24)
    assert (result.exactness, result.numerics) == ("near ties", "")
    assert "replaced by one with other numerics" in result.exactness_reason


@pytest.mark.parametrize("mode", TREES)
def test_who_takes_its_place_before_the_first_round_is_asked_who_it_is(
    mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    class FoundOut(Exact):
        """A target that another session finds wrong while it answers a ping."""

        async def ping(self) -> Identity:
            together.members[0].quarantine("it lied to another session.")
            return await super().ping()

    together = Replicas(
        {"target-0": FoundOut(), "target-1": OtherArithmetic()}, Auditing(1.0, ("judge", OtherArithmetic()))
    )
    result, audit = asyncio.run(generate(over(together, mode)))
    assert quarantined(caplog) == ["target-0"]
    assert (result.token_ids, audit.num_tokens) == (truth(), 24)
    assert (result.exactness, result.numerics) == ("near ties", "")


def test_all_that_were_found_wrong_end_in_a_sentence() -> None:
    together = Replicas({"a": FakeTarget(), "b": FakeTarget()})
    for member in together.members:
        member.quarantine("it lied")
    with pytest.raises(WrongResult, match=r"^Every target of the model was found to compute wrong results \(a, b\)"):
        together.least_loaded()
    assert together.num_ready == 0


@pytest.mark.parametrize(("rate", "share"), [(1.0, 1.0), (0.1, 0.1)])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9)])
def test_the_cost_of_audits_in_calls(rate: float, share: float, sampling: SamplingParams) -> None:
    auditor, target = FakeTarget(), FakeTarget()
    orchestrator = made(target, auditing=Auditing(rate, ("judge", auditor), random.Random(5)))
    request = replace(REQUEST, max_new_tokens=400, sampling=sampling)
    result, audit = asyncio.run(generate(orchestrator, request))
    assert audit.num_rounds == len(auditor.turns), "one verify for each audit"
    assert abs(audit.num_rounds - share * 400) <= 12
    assert not audit.num_mismatches
    assert result.audit == audit
    # Every token up to the last audit was checked, and computed once more.
    assert 400 - audit.num_tokens <= 40


def test_without_a_rate_nothing_is_counted() -> None:
    result = asyncio.run(made(FakeTarget(), FakeTarget(), auditing=Auditing()).generate(REQUEST))
    assert result.audit is None
    assert "audit" not in result.to_dict()
