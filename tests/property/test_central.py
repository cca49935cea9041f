"""The central property: whatever the draft, the tree and the faults, the output is plain decoding's."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from specsplit.core.types import FinishReason, SessionParams, StreamLimits, TokenLogProb, prefix_hashes
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.replicas import Auditing, Replicas
from specsplit.orchestrator.request import Chunk, Request, Result, RetryPolicy
from specsplit.speculation.options import Speculation
from tests.support.fakes import (
    EOS,
    FakeDraft,
    FakeTarget,
    FakeTokenizer,
    Faults,
    adversarial_guess,
    empty_guess,
    good_guess,
    perfect_guess,
    plain_tokens,
    random_guess,
)
from tests.support.flaky import Fault, Flaky
from tests.support.language import WindowedTokenizer, log_probs, token_log_prob
from tests.support.virtual_time import LoopClock, run_virtual

TOKENIZER = FakeTokenizer()


@dataclass(frozen=True)
class Expected:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


def decode_plainly(request: Request, context: int) -> Expected:
    """Return the answer by its definition: one token at a time, the whole text decoded each time."""
    assert request.seed is not None
    room = min(request.max_new_tokens, context - len(request.prompt_ids))
    params = SessionParams(seed=request.seed, choice=request.choice)
    token_ids = plain_tokens(params, request.prompt_ids, room)
    for count, token_id in enumerate(token_ids, 1):
        so_far = tuple(token_ids[:count])
        is_eos = token_id == EOS and not request.ignore_eos
        is_last = is_eos or count == room
        text = TOKENIZER.decode(so_far)
        if not is_last:
            text = text.rstrip("\ufffd")  # the last character may be unfinished
        starts = [start for stop in request.stop if (start := text.find(stop)) >= 0]
        if starts:
            return Expected(so_far, text[: min(starts)], "stop")
        if is_last:
            return Expected(so_far, text, "stop" if is_eos else "length")
    raise AssertionError("there is room for at least one token")


faults = st.builds(Faults, evict=st.sampled_from([0.0, 0.0, 0.3]), seed=st.integers(0, 1000), pauses=st.integers(0, 2))
targets = st.builds(
    FakeTarget, faults, trim=st.sampled_from([None, None, 0, 1, 3]), context=st.integers(24, 80), max_nodes=st.just(12)
)
drafts = st.builds(
    FakeDraft,
    st.sampled_from([good_guess, perfect_guess, random_guess, adversarial_guess, empty_guess]),
    faults,
    oversize=st.sampled_from([1, 1, 3]),
    context=st.integers(12, 80),
)
speculations = st.builds(
    Speculation,
    mode=st.sampled_from(["pingpong", "overlap", "stream"]),
    nodes=st.integers(1, 12),
    depth=st.integers(1, 6),
    branching=st.integers(1, 3),
    lookup=st.booleans(),
)
requests = st.builds(
    Request,
    prompt_ids=st.lists(st.integers(0, 255), min_size=1, max_size=20).map(tuple),
    max_new_tokens=st.integers(1, 48),
    seed=st.integers(0, (1 << 64) - 1),
    choice=st.integers(0, 3),
    stop=st.lists(st.sampled_from(["END", "ab", "a b", "€", "é😀", "b E", "\ufffda", "\ufffd"]), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 2]),
)


GARBLES = [
    lambda proposal: replace(proposal, parents=proposal.parents[::-1]),
    lambda proposal: replace(proposal, log_probs=(math.nan, *proposal.log_probs)),
    lambda proposal: replace(proposal, first_node=proposal.first_node - 3),
    lambda proposal: replace(proposal, root_position=0),
    lambda proposal: replace(proposal, token_ids=tuple(-token_id for token_id in proposal.token_ids)),
    lambda proposal: None,
]
TARGET_FAULTS = [fault for fault in Fault if fault not in (Fault.HUNG, Fault.BROKEN, Fault.GARBLED)]
"""Those that a request survives when the target has them; it survives all that a draft has."""


def plans(faults: list[Fault]) -> st.SearchStrategy[dict[int, Fault]]:
    return st.dictionaries(st.integers(0, 40), st.sampled_from(faults), max_size=12)


aways = st.lists(st.tuples(st.floats(0, 4), st.floats(0, 2)), max_size=3).map(
    lambda times: [(start, start + length) for start, length in times]
)
late = st.sampled_from([0.001, 0.1, 1.0])
flaky_targets = st.builds(Flaky, targets, plans(TARGET_FAULTS), away=aways, late_s=late)
flaky_drafts = st.builds(
    Flaky,
    drafts,
    plans(list(Fault)),
    away=aways,
    late_s=late,
    garble=st.sampled_from(GARBLES),
    hangs_on_close=st.sampled_from([False, False, True]),
)


AHEAD = StreamLimits(1, 1).max_unacknowledged


async def collect(orchestrator: Orchestrator, request: Request) -> tuple[list[Chunk], Result]:
    chunks = [chunk async for chunk in orchestrator.stream(request)]
    assert asyncio.all_tasks() == {asyncio.current_task()}
    result = chunks[-1].result
    assert result is not None
    return chunks, result


def check_chunks(chunks: list[Chunk], result: Result, request: Request) -> None:
    """Check that what was streamed is the result, piece by piece, with the log-probabilities that were asked for."""
    assert tuple(token for chunk in chunks for token in chunk.logprobs) == result.logprobs
    assert result.logprobs == (() if request.logprobs is None else expected_logprobs(result, request.logprobs))
    assert all(len(chunk.logprobs) in (0, len(chunk.token_ids)) for chunk in chunks)
    assert tuple(token_id for chunk in chunks for token_id in chunk.token_ids) == result.token_ids
    assert "".join(text for chunk in chunks for text, _ in chunk.pieces) == result.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [result.finish_reason]
    assert all(len(chunk.accepted) == len(chunk.token_ids) > 0 for chunk in chunks)
    assert all(chunk.accepted == tuple(sorted(chunk.accepted, reverse=True)) for chunk in chunks)


def expected_logprobs(result: Result, top: int) -> tuple[TokenLogProb, ...]:
    ids, start = [*result.prompt_token_ids, *result.token_ids], len(result.prompt_token_ids)
    hashes = prefix_hashes(ids)
    return tuple(token_log_prob(log_probs(hashes[at - 1], ids[:at], ()), ids[at], top) for at in range(start, len(ids)))


@settings(max_examples=4 * settings().max_examples)
@given(targets, drafts, speculations, requests, st.sampled_from([TOKENIZER, WindowedTokenizer()]))
def test_the_output_is_plain_decodings(
    target: FakeTarget, draft: FakeDraft, speculation: Speculation, request: Request, tokenizer: FakeTokenizer
) -> None:
    chunks, result = asyncio.run(collect(Orchestrator(target, draft, tokenizer, speculation), request))
    expected = decode_plainly(request, target.context)
    assert Expected(result.token_ids, result.text, result.finish_reason) == expected
    check_chunks(chunks, result, request)
    assert not target.slots
    assert not draft.slots
    assert len(chunks) == result.num_rounds + 1
    ahead = target.num_forwards - len(chunks)  # commits of a stream that nobody asked for any more
    assert 0 <= ahead <= (AHEAD if speculation.mode == "stream" else 0)


@settings(max_examples=4 * settings().max_examples)
@given(flaky_targets, flaky_drafts, speculations, requests, st.sampled_from([0.0, 0.02]))
def test_the_output_is_plain_decodings_whatever_fails(
    target: Flaky, draft: Flaky, speculation: Speculation, request: Request, verify_s: float
) -> None:
    if verify_s:
        target.after, target.late_s = Fault.LATE, verify_s

    async def main() -> tuple[list[Chunk], Result]:
        owner = Orchestrator(
            target,
            draft,
            TOKENIZER,
            speculation,
            LoopClock(),
            retry_policy=RetryPolicy(rng=random.Random(request.seed)),
        )
        chunks = [chunk async for chunk in owner.stream(request)]
        await owner.aclose()
        result = chunks[-1].result
        assert result is not None
        return chunks, result

    chunks, result = run_virtual(main)
    expected = decode_plainly(request, target.inner.context)
    assert Expected(result.token_ids, result.text, result.finish_reason) == expected
    check_chunks(chunks, result, request)
    assert not target.inner.slots or target.away  # a close may have come while it was away
    for number, chunk in enumerate(chunks):
        is_degraded = [phase for phase in result.degraded if phase.first_round <= number <= phase.last_round]
        assert (chunk.degraded is not None) == bool(is_degraded)
    check_recomputed(target, result)


def check_recomputed(target: Flaky, result: Result) -> None:
    """Check that the target computed what every round needs once, and a second time what the resyncs say."""
    assert isinstance(target.inner, FakeTarget)
    if Fault.LOST in target.plan.values() or result.mode == "stream":
        return  # executed for an answer that nobody got
    again = sum(resync.num_tokens for resync in result.resyncs if resync.worker == "target")
    nodes = sum(len(proposal.token_ids[: target.inner.trim]) for proposal in target.inner.proposals)
    assert target.inner.num_tokens == len(result.prompt_token_ids) + result.num_rounds + nodes + again


@given(st.lists(targets, min_size=2, max_size=3), drafts, speculations, requests, st.sampled_from([0.3, 1.0]))
def test_honest_targets_that_audit_each_other_never_differ(
    several: list[FakeTarget], draft: FakeDraft, speculation: Speculation, request: Request, rate: float
) -> None:
    for target in several:
        target.context = several[0].context
    together = Replicas(dict(zip("abc", several, strict=False)), Auditing(rate, rng=random.Random(request.seed)))
    chunks, result = asyncio.run(collect(Orchestrator(together, draft, TOKENIZER, speculation), request))
    expected = decode_plainly(request, several[0].context)
    assert Expected(result.token_ids, result.text, result.finish_reason) == expected
    check_chunks(chunks, result, request)
    assert result.audit is not None
    assert together.num_ready == len(several)
    assert result.audit.num_mismatches == result.audit.num_ties == 0
    assert rate < 1 or result.audit.num_rounds + result.audit.num_missed == len(chunks)
    assert not any(target.slots for target in several)


@given(targets, requests)
def test_plain_mode_is_the_same_round_without_a_tree(target: FakeTarget, request: Request) -> None:
    chunks, result = asyncio.run(collect(Orchestrator(target, None, TOKENIZER, Speculation(mode="plain")), request))
    assert Expected(result.token_ids, result.text, result.finish_reason) == decode_plainly(request, target.context)
    check_chunks(chunks, result, request)
    assert not target.slots
    assert result.target_forwards == len(result.token_ids)
    assert not any(any(chunk.accepted) for chunk in chunks)


modes = st.sampled_from(["auto", "plain", "lookup", "pingpong", "overlap", "stream"])
counts = st.sampled_from([1, 2, 7, 16])


@given(targets, drafts, counts.flatmap(lambda count: st.lists(requests, min_size=count, max_size=count)), st.data())
def test_requests_at_once_do_not_mix(
    target: FakeTarget, draft: FakeDraft, several: list[Request], data: st.DataObject
) -> None:
    speculation = data.draw(speculations)
    chosen = [replace(speculation, mode=data.draw(modes), lookup=True) for _ in several]

    async def run() -> list[Result]:
        orchestrators = {each: Orchestrator(target, draft, TOKENIZER, each) for each in chosen}
        pairs = zip(chosen, several, strict=True)
        return await asyncio.gather(*(orchestrators[each].generate(request) for each, request in pairs))

    for request, result in zip(several, asyncio.run(run()), strict=True):
        got = Expected(result.token_ids, result.text, result.finish_reason)
        assert got == decode_plainly(request, target.context)
    assert not target.slots
    assert not draft.slots
