"""The draft dies, returns, dawdles, answers garbage: no error, plain decoding meanwhile, and speculation comes back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from specsplit.core.errors import DeadlineExceeded, VocabularyMismatch
from specsplit.core.types import Identity, Proposal, SamplingParams
from specsplit.orchestrator.request import Chunk, DegradedPhase, Replay, Request, Result
from tests.support.fakes import VOCAB_SIZE, FakeDraft, FakeTarget, perfect_guess
from tests.support.flaky import PROMPT, VERIFY_S, Fault, Flaky, collect, orchestrator, request, workers
from tests.support.virtual_time import run_virtual


def serve(target: Flaky, draft: Flaky, wanted: Request | None = None) -> tuple[list[Chunk], Result]:
    """Serve one request in virtual time and check what holds whatever the draft does."""

    async def main() -> tuple[list[Chunk], Result]:
        answer = await collect(orchestrator(target, draft), wanted or request())
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return answer

    chunks, result = run_virtual(main)
    assert not target.inner.slots
    assert not draft.inner.slots
    assert target.inner.num_forwards == len(chunks)
    assert not [resync for resync in result.resyncs if resync.worker == "target"]
    for number, chunk in enumerate(chunks):
        phases = [phase for phase in result.degraded if phase.first_round <= number <= phase.last_round]
        assert chunk.degraded == (f"draft {phases[0].reason}" if phases else None)
        assert not phases or not any(chunk.accepted)
    return chunks, result


# ---------------------------------------------------------------- away


def test_a_draft_dead_from_the_start_means_plain_decoding_at_once() -> None:
    target, draft = workers(away=((0, math.inf),))
    chunks, result = serve(target, draft)
    assert result.degraded == (DegradedPhase("draft", "unreachable", 1, 58),)  # the last round has no room for a tree
    assert (len(chunks), draft.num_calls, result.mode) == (60, 0, "pingpong")
    assert result.timings.decode_s == pytest.approx(59 * VERIFY_S)
    assert result.timings.ttft_s == pytest.approx(VERIFY_S)


def test_a_draft_that_comes_up_after_the_start_is_used_from_then_on() -> None:
    target, draft = workers(away=((0, 0.3),))
    chunks, result = serve(target, draft)
    (phase,) = result.degraded
    assert (phase.reason, phase.first_round) == ("unreachable", 1)
    assert all(len(chunk.token_ids) == 5 for chunk in chunks[phase.last_round + 1 : -1])
    assert result.speculative_decoding.num_accepted_draft_tokens > 10
    assert result.resyncs == ()
    assert len(draft.inner.turns[0].tail) == len(PROMPT) + phase.last_round + 1


def test_a_draft_that_returns_is_replayed_and_speculates_again() -> None:
    target, draft = workers(away=((0.1, 0.5),))
    _, result = serve(target, draft, request(100))
    (phase,) = result.degraded
    assert (phase.reason, phase.first_round) == ("unreachable", 5)  # at 0.1 s five rounds are over
    held = len(PROMPT) + 1 + 5 * 3  # what the fourth propose brought it to
    assert result.resyncs == (
        Replay("draft", phase.last_round + 1, "epoch_raised", 0),
        Replay("draft", phase.last_round + 1, "slot_lost", held),
    )
    *_, behind, replay = [turn for turn in draft.inner.turns if turn.epoch == 2][:2]
    assert (behind.base_length, replay.base_length, replay.opening is not None) == (held, 0, True)
    assert result.speculative_decoding.num_accepted_draft_tokens > 4 * 3 + 10


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.REFUSED, "unreachable"),
        (Fault.LOST, "unreachable"),
        (Fault.CRASHED, "unreachable"),
        (Fault.FAILED, "failed"),
        (Fault.BROKEN, "failed"),
        (Fault.FULL, "full"),
    ],
)
@pytest.mark.parametrize("call", range(6))
def test_one_failure_costs_a_round_or_two_and_begins_a_new_epoch(call: int, fault: Fault, reason: str) -> None:
    target, draft = workers({call: fault})
    _, result = serve(target, draft)
    (phase,) = result.degraded
    assert (phase.reason, phase.first_round) == (reason, call + 1)
    assert phase.last_round <= call + 4  # a ping follows within 50 ms
    held = draft.inner.turns[call - 1].base_length + len(draft.inner.turns[call - 1].tail) if call else 0
    lost = [Replay("draft", phase.last_round + 1, "slot_lost", held)] if fault is Fault.CRASHED and call else []
    assert list(result.resyncs) == [Replay("draft", phase.last_round + 1, "epoch_raised", 0), *lost]
    assert result.speculative_decoding.num_accepted_draft_tokens > 20


def test_an_evicted_draft_is_pinged_and_replayed_in_the_same_round() -> None:
    target, draft = workers({2: Fault.RESTARTED})
    _, result = serve(target, draft)
    assert result.resyncs == (Replay("draft", 3, "slot_lost", len(PROMPT) + 1 + 5),)
    assert (result.degraded, draft.num_pings) == ((), 2)
    forgetful = workers({2: Fault.FORGOTTEN})
    assert serve(*forgetful)[1].resyncs == (Replay("draft", 3, "slot_behind", len(PROMPT) + 1 + 5 - 3),)
    assert forgetful[1].num_pings == 1


def test_a_draft_ahead_of_us_begins_a_new_epoch_in_the_same_round() -> None:
    target, draft = workers({2: Fault.OVERTAKEN})
    _, result = serve(target, draft)
    assert result.resyncs == (Replay("draft", 3, "epoch_raised", 0),) * 2
    assert result.degraded == ()


# ---------------------------------------------------------------- slow


def test_a_late_proposal_is_not_waited_for_and_not_asked_for_twice() -> None:
    target, draft = workers({2: Fault.LATE})
    draft.late_s = 1.0
    _, result = serve(target, draft, request(100))
    (phase,) = result.degraded
    assert (phase.reason, phase.first_round) == ("slow", 3)
    rounds_meanwhile = round((draft.late_s - 0.25) / VERIFY_S)  # it is waited for a quarter of a second
    assert phase.last_round - phase.first_round == pytest.approx(rounds_meanwhile, abs=1)
    late, after = draft.inner.turns[2:4]
    assert after.base_length == late.base_length + len(late.tail)  # what the late answer told
    assert (after.epoch, after.round, after.opening) == (late.epoch, late.round + 1, None)
    assert draft.inner.known_nodes[3] == draft.inner.known_nodes[2]  # its nodes were never offered
    assert result.resyncs == ()
    assert result.timings.decode_s < 2 * draft.late_s


def test_a_proposal_is_waited_for_as_long_as_the_verifies_it_may_save() -> None:
    target, draft = workers({3: Fault.LATE})
    target.late_s, draft.late_s = 0.5, 1.9
    _, result = serve(target, draft, request(30))
    assert result.degraded == ()
    target, draft = workers({3: Fault.LATE})
    target.late_s, draft.late_s = 0.5, 2.1  # four levels save two seconds
    assert [phase.reason for phase in serve(target, draft, request(30))[1].degraded] == ["slow"]


def test_a_draft_that_is_always_late_is_asked_less_and_less_often() -> None:
    target, draft = workers()
    draft.after, draft.late_s = Fault.LATE, 0.4
    _, result = serve(target, draft, request(480))
    gaps = [later - earlier for earlier, later in pairwise(draft.called_s)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 0.5
    assert 3 < gaps[-1] <= 5.5
    assert draft.num_calls <= 9
    assert {phase.reason for phase in result.degraded} == {"slow"}


@pytest.mark.parametrize("fault", [Fault.HUNG, Fault.LATE])
def test_a_proposal_that_never_comes_ends_with_the_request(fault: Fault) -> None:
    target, draft = workers({1: fault})
    draft.late_s = 1e6
    _, result = serve(target, draft)
    assert result.degraded == (DegradedPhase("draft", "slow", 2, result.num_rounds - 1),)
    assert draft.num_calls == 2


def test_a_draft_that_hangs_on_close_costs_a_second() -> None:
    target, draft = workers()
    draft.hangs_on_close = True

    async def main() -> float:
        owner = orchestrator(target, draft)
        _, result = await collect(owner, request())
        waited_s = asyncio.get_running_loop().time() - result.timings.ttft_s - result.timings.decode_s
        assert len(asyncio.all_tasks()) == 2
        await owner.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return waited_s

    assert run_virtual(main) == pytest.approx(1.0)


def test_workers_that_hang_on_close_do_not_hold_back_the_result() -> None:
    target, draft = workers()
    target.hangs_on_close = draft.hangs_on_close = True

    async def main() -> tuple[float, Result]:
        owner, loop, result_s = orchestrator(target, draft), asyncio.get_running_loop(), math.inf
        async for chunk in owner.stream(request()):
            if (result := chunk.result) is not None:
                result_s = loop.time()
                break
        assert result is not None
        await owner.aclose()
        return result_s, result

    result_s, result = run_virtual(main)
    assert result_s == pytest.approx(result.timings.ttft_s + result.timings.decode_s)


# ---------------------------------------------------------------- garbage

GARBLES: dict[str, Callable[[Proposal], Proposal]] = {
    "parents too few": lambda p: replace(p, parents=p.parents[1:]),
    "estimates too many": lambda p: replace(p, log_probs=(*p.log_probs, -1.0)),
    "own parent": lambda p: replace(p, parents=(p.first_node, *p.parents[1:])),
    "later parent": lambda p: replace(p, parents=(10**9, *p.parents[1:])),
    "negative parent": lambda p: replace(p, parents=(-1, *p.parents[1:])),
    "not a number": lambda p: replace(p, log_probs=(math.nan, *p.log_probs[1:])),
    "positive estimate": lambda p: replace(p, log_probs=(0.5, *p.log_probs[1:])),
    "infinite estimate": lambda p: replace(p, log_probs=(-math.inf, *p.log_probs[1:])),
    "first node known already": lambda p: replace(p, first_node=0),
    "negative first node": lambda p: replace(p, first_node=-5),
    "another root": lambda p: replace(p, root_position=p.root_position + 1),
    "negative token": lambda p: replace(p, token_ids=(-1, *p.token_ids[1:])),
    "token outside": lambda p: replace(p, token_ids=(VOCAB_SIZE, *p.token_ids[1:])),
    "no token": lambda p: replace(p, token_ids=(None, *p.token_ids[1:])),  # type: ignore[arg-type]
    "nothing": lambda p: None,  # type: ignore[return-value, arg-type]
}


@pytest.mark.parametrize("garble", GARBLES)
@pytest.mark.parametrize("call", [0, 2])
def test_a_proposal_that_makes_no_sense_is_not_offered(garble: str, call: int) -> None:
    target, draft = workers({call: Fault.GARBLED})
    draft.garble = GARBLES[garble]
    _, result = serve(target, draft)
    (phase,) = result.degraded
    assert phase.reason == ("failed" if garble in ("no token", "nothing") else "invalid")  # not even of the right types
    assert phase.first_round == call + 1
    assert result.resyncs == (Replay("draft", phase.last_round + 1, "epoch_raised", 0),)
    assert result.speculative_decoding.num_accepted_draft_tokens > 20


def test_a_draft_that_answers_only_garbage_is_asked_less_and_less_often() -> None:
    target, draft = workers()
    draft.after, draft.garble = Fault.GARBLED, GARBLES["negative token"]
    chunks, result = serve(target, draft, request(480))
    assert draft.num_calls <= 11  # in ten seconds
    assert result.degraded == (DegradedPhase("draft", "invalid", 1, 478),)
    assert len(chunks) == 480
    assert result.timings.decode_s == pytest.approx(479 * VERIFY_S)


# ---------------------------------------------------------------- another draft after the return


@pytest.mark.parametrize("returns_s", [0.5, 1.2])
def test_a_draft_that_returns_with_another_vocabulary_is_not_used(returns_s: float) -> None:
    target, draft = workers(away=((0.1, returns_s),))

    async def main() -> tuple[int, Result, Result]:
        owner = orchestrator(target, draft)
        asyncio.get_running_loop().call_later(0.2, setattr, draft, "vocab_hash", "other")
        _, first = await collect(owner, request(120))
        calls = draft.num_calls
        _, second = await collect(owner, request())
        return calls, first, second

    calls, first, second = run_virtual(main)
    assert [phase.reason for phase in first.degraded] == ["unreachable", "mismatch"]
    assert first.degraded[1].last_round == first.num_rounds - 1
    assert second.degraded == (DegradedPhase("draft", "mismatch", 1, 58),)
    assert draft.num_calls == calls


def test_a_draft_replaced_between_rounds_shows_by_its_empty_slot(caplog: pytest.LogCaptureFixture) -> None:
    target, draft = workers({3: Fault.RESTARTED})
    asked = draft.inner.ping

    async def other_from_the_second_ping() -> object:
        draft.vocab_hash = "other" if draft.num_pings > 1 else None
        return await asked()

    draft.inner.ping = other_from_the_second_ping  # type: ignore[method-assign, assignment]
    _, result = serve(target, draft)
    assert [(phase.reason, phase.first_round) for phase in result.degraded] == [("mismatch", 4)]
    assert "not used: The draft fake-FakeDraft and the target" in caplog.text


def test_a_draft_replaced_between_requests_is_asked_who_it_is(caplog: pytest.LogCaptureFixture) -> None:
    target, draft = workers()

    async def main() -> Result:
        owner = orchestrator(target, draft)
        assert not (await owner.generate(request())).degraded
        await asyncio.sleep(2.0)
        draft.vocab_hash = "other"
        draft.inner.slots.clear()
        return await owner.generate(request())

    (degraded,) = run_virtual(main).degraded
    assert degraded.reason == "mismatch"
    assert degraded.first_round <= 3
    assert "not used: The draft fake-FakeDraft and the target" in caplog.text


def test_a_draft_of_another_vocabulary_from_the_start_is_refused() -> None:
    target, draft = workers()
    draft.vocab_hash = "other"

    async def main() -> None:
        owner = orchestrator(target, draft)
        for _ in range(2):
            with pytest.raises(VocabularyMismatch, match="different vocabularies"):
                await owner.generate(request())

    run_virtual(main)
    assert target.num_calls == draft.num_calls == 0


def test_a_smaller_draft_after_the_return_gets_parameters_that_fit_it() -> None:
    target, draft = workers(away=((0.1, 0.3),))
    sampling = SamplingParams(logit_bias=((VOCAB_SIZE - 1, 1.0),))

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.2, setattr, draft, "vocab_size", VOCAB_SIZE - 1)
        asyncio.get_running_loop().call_later(0.2, setattr, draft.inner, "context", len(PROMPT) + 50)
        await collect(
            orchestrator(target, draft), request(seed=21, sampling=sampling)
        )  # without the token that the smaller one lacks

    run_virtual(main)
    openings = [turn.opening.sampling.logit_bias for turn in draft.inner.turns if turn.opening]
    assert openings[0] == sampling.logit_bias
    assert openings[-1] == ()
    assert max(turn.base_length + len(turn.tail) for turn in draft.inner.turns) <= len(PROMPT) + 50


# ---------------------------------------------------------------- targets that are others only by name


class Timed(FakeTarget):
    """A target of a model that others serve as well: only the times that it measured are its own."""

    step_s, revision = 0.01, 0

    async def ping(self) -> Identity:
        return replace(await super().ping(), step_times=((1, self.step_s),), revision=self.revision)


class Distant(Flaky):
    """A worker whose pings travel."""

    ping_s = 0.05

    async def ping(self) -> Identity:
        await asyncio.sleep(self.ping_s)
        return await super().ping()


@pytest.mark.parametrize("revises", [False, True])
def test_a_silent_draft_is_waited_for_once_whatever_targets_come(revises: bool) -> None:
    inner, draft = Timed(), Distant(FakeDraft(perfect_guess))
    draft.ping_s = math.inf
    target = Flaky(inner)

    async def main() -> list[float]:
        owner, loop, waits = orchestrator(target, draft), asyncio.get_running_loop(), list[float]()
        for number in range(40):
            inner.step_s = (1 + number % 20) / 100
            inner.revision = number % 20 if revises else 0
            began_s = loop.time()
            await collect(owner, request(3))
            waits.append(loop.time() - began_s)
        return waits

    waits = run_virtual(main)
    assert waits[0] == pytest.approx(2.0)
    assert max(waits[1:]) < 0.1


def test_one_requests_haste_says_nothing_of_the_draft_to_others() -> None:
    inner, draft = Timed(), Distant(FakeDraft(perfect_guess))
    target = Flaky(inner, late_s=VERIFY_S)
    target.after = Fault.LATE

    async def main() -> Result:
        owner = orchestrator(target, draft)
        running = asyncio.create_task(collect(owner, request(200)))
        await asyncio.sleep(0.2)
        inner.revision = 1  # a stage of it was replaced
        with pytest.raises(DeadlineExceeded):
            await collect(owner, request(5, timeout_s=0.03))
        return (await running)[1]

    assert run_virtual(main).degraded == ()
