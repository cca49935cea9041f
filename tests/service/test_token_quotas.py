"""Limits of one caller at a worker, over real sockets, by a clock set by hand: tokens, and sessions that come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from specsplit.core.errors import DeadlineExceeded, Overloaded, SlotBehind, StaleEpoch
from specsplit.core.ports import VerifyStream
from specsplit.core.types import Proposal, SessionParams, StreamLimits, Turn, Verdict
from specsplit.draft.engine import DraftEngine
from specsplit.engine import caller_limits, quotas
from specsplit.engine.caller_limits import CallerLimits
from specsplit.engine.replays import Replays
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request
from specsplit.rpc.clients import RemoteVerifier
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from specsplit.speculation.options import Speculation
from specsplit.target.engine import TargetEngine
from tests.contract.verifier_contract import without_tree
from tests.support.hash_model import LetterTokenizer, hash_model, plain_tokens
from tests.support.rounds import script
from tests.support.rpc_servers import LOOPBACK, verifier_at

GRACE_S, TTL_S = 5.0, 60.0
PARAMS = SessionParams(prompt_length=12, caller="busy")
PROMPT = [*range(1, 13)]
TEXT = [*PROMPT, *plain_tokens(PARAMS, PROMPT, 24)]
ONE = StreamLimits(4, 4, 1)


class SteppedClock:
    """Stands still until it is told how late it is."""

    time_s = 0.0

    def now(self) -> float:
        return self.time_s


@asynccontextmanager
async def served(rate: float, num_slots: int = 1) -> AsyncGenerator[tuple[RemoteVerifier, TargetEngine, SteppedClock]]:
    clock = SteppedClock()
    engine = TargetEngine(hash_model("target", max_sessions=num_slots)[0], ttl_s=TTL_S, grace_s=GRACE_S, clock=clock)
    engine.open_queue()
    engine.quotas.limit(CallerLimits(tokens_per_s=rate))
    async with (
        asyncio.timeout(60),
        serving(LOOPBACK, [TargetService(engine, lambda: engine.num_sessions, engine)]) as server,
        verifier_at(server) as verifier,
    ):
        yield verifier, engine, clock
    engine.check_integrity()
    await engine.aclose()


def turn_of(length: int, base: int, number: int, key: str = "busy", epoch: int = 1, caller: str = "busy") -> Turn:
    """Return a turn over the first `length` tokens of the text."""
    turn = replace(script(PARAMS, TEXT[:length], base, number, key), epoch=epoch)
    return replace(turn, opening=replace(PARAMS, caller=caller)) if turn.opening else turn


async def verified(verifier: RemoteVerifier, turn: Turn) -> Verdict:
    verdict = await verifier.verify(turn, without_tree(turn))
    assert verdict.bonus_token == TEXT[turn.base_length + len(turn.tail)]
    return verdict


async def is_in_debt(verifier: RemoteVerifier) -> bool:
    """Whether a round of the caller that claims nothing new is refused for want of tokens."""
    try:
        await verifier.verify(turn_of(13, 12, 1, key="unknown"), without_tree(turn_of(13, 12, 1)))
    except Overloaded as error:
        return error.limit == "tokens"
    except SlotBehind:
        return False
    raise AssertionError("nobody opened this session")


async def committed(stream: VerifyStream) -> Verdict:
    verdict = await stream.next_commit()
    assert verdict is not None
    return verdict


async def evict(verifier: RemoteVerifier, engine: TargetEngine, clock: SteppedClock) -> None:
    clock.time_s += GRACE_S
    other = turn_of(12, 0, 1, key="other", caller="other")
    await verified(verifier, other)
    await verifier.close("other")


async def expire(verifier: RemoteVerifier, engine: TargetEngine, clock: SteppedClock) -> None:
    clock.time_s += TTL_S
    await engine.sweep()


@pytest.mark.parametrize("lose", [evict, expire])
async def test_a_replay_after_a_lost_slot_costs_no_tokens(lose: Callable[..., Awaitable[None]]) -> None:
    async with served(1.0) as (verifier, engine, clock):
        await verified(verifier, turn_of(12, 0, 1))
        assert await is_in_debt(verifier)
        await lose(verifier, engine, clock)
        with pytest.raises(SlotBehind):
            await verified(verifier, turn_of(13, 12, 2))
        await verified(verifier, turn_of(13, 0, 1, epoch=2))
        await verified(verifier, turn_of(14, 13, 2, epoch=2))
        await verifier.close("busy")
        await verified(verifier, turn_of(14, 0, 1))  # a replay for which the client ended its session itself
        assert await is_in_debt(verifier)


async def test_a_replay_is_no_payment_for_another_prompt() -> None:
    async with served(1.0) as (verifier, engine, clock):
        await verified(verifier, turn_of(12, 0, 1))
        await evict(verifier, engine, clock)
        clock.time_s += 60.0
        own = turn_of(12, 0, 1, epoch=2)
        other = replace(own, tail=(9, *own.tail[1:]))
        await verifier.verify(other, without_tree(other))
        assert await is_in_debt(verifier)


@pytest.mark.parametrize(
    ("tail", "num_free"),
    [
        (range(100), 100),
        (range(120), 100),
        ([*range(98), 7, 7, 7], 98),  # a draft's last tokens were guesses
        (range(60), 36),  # compared are 36 tokens, 68, 84 and so on
        ([7, *range(1, 100)], 0),
        ((), 0),
    ],
    ids=str,
)
def test_a_replay_is_for_the_tokens_that_were_there(tail: Sequence[int], num_free: int) -> None:
    replays = Replays()
    replays.is_wanted = True
    replays.grant("a session", range(100))
    assert replays.take("another one", tail) == 0
    assert replays.take("a session", tail) == num_free
    assert replays.take("a session", tail) == 0, "once only"


async def test_a_replay_after_a_preemption_costs_no_tokens() -> None:
    target = TargetEngine(hash_model("target", max_sessions=4, context=200, row_limit=216)[0], clock=SteppedClock())
    target.quotas.limit(CallerLimits(tokens_per_s=1.2))  # a bucket of 12 tokens

    async def answered(turn: Turn) -> None:
        with target.quotas.using(turn):
            await target.verify(turn, without_tree(turn))

    old = [5] * 190
    await target.verify(first := script(SessionParams(), old[:6], 0, 1, "old"), without_tree(first))
    await answered(turn_of(12, 0, 1))
    await target.verify(more := script(SessionParams(), old, 6, 2, "old"), without_tree(more))
    with pytest.raises(SlotBehind):
        await answered(turn_of(13, 12, 2))
    with pytest.raises(Overloaded):
        await answered(replace(turn_of(13, 0, 1, epoch=2), max_wait_s=0.0))  # others still need the memory
    await target.close("old")
    await answered(turn_of(13, 0, 1, epoch=2))
    await answered(turn_of(14, 13, 2, epoch=2))
    await target.aclose()


async def test_waiting_in_vain_costs_no_tokens() -> None:
    async with served(1.0) as (verifier, _, _):
        other = turn_of(12, 0, 1, key="other", caller="other")
        await verified(verifier, other)
        with pytest.raises(DeadlineExceeded):
            await verified(verifier, replace(turn_of(12, 0, 1), max_wait_s=0.1))
        await verifier.close("other")
        await verified(verifier, turn_of(12, 0, 1))


async def test_what_is_cancelled_costs_tokens_though_its_session_is_gone() -> None:
    async with served(2.0) as (verifier, engine, _):
        with pytest.raises(asyncio.CancelledError), engine.quotas.using(turn_of(24, 0, 1)):
            raise asyncio.CancelledError  # as a client does that ended the session while its prompt was read
        with pytest.raises(Overloaded):
            await verified(verifier, turn_of(12, 0, 1, key="next"))


async def test_sessions_that_come_back_count_as_sessions_again() -> None:
    keys = ("first", "second", "third", "fourth")
    async with served(1e6, num_slots=4) as (verifier, engine, clock):
        engine.quotas.limit(CallerLimits(sessions=2))
        for key in keys:
            await verified(verifier, turn_of(12, 0, 1, key))
            clock.time_s += GRACE_S / 2  # so anybody could evict the first two by now

        def goes_on(key: str, number: int) -> Awaitable[Verdict]:
            return verified(verifier, turn_of(12 + number, 11 + number, 1 + number, key))

        for number in (1, 2):
            for key in ("third", "fourth"):
                await goes_on(key, number)
            for key in ("first", "second"):
                with pytest.raises(Overloaded) as refused:
                    await goes_on(key, 1)
                assert refused.value.limit == "sessions"
        await verifier.close("third")
        await goes_on("first", 1)
        with pytest.raises(Overloaded):
            await goes_on("second", 1)


async def test_the_first_commit_of_a_stream_waits_for_no_tokens() -> None:
    async with served(1.0) as (verifier, _, _):
        stream = verifier.open_stream(turn_of(12, 0, 1), ONE)
        assert (await committed(stream)).bonus_token == TEXT[12]
        await stream.close()


async def test_a_stream_out_of_tokens_leaves_its_slot_and_goes_on_later() -> None:
    async with served(1.0) as (verifier, engine, clock):
        stream = verifier.open_stream(turn_of(12, 0, 1), ONE)
        await committed(stream)
        stream.propose(Proposal(1, 12), is_more_coming=False)
        with pytest.raises(Overloaded) as refused:
            await stream.next_commit()
        assert refused.value.limit == "tokens"
        await evict(verifier, engine, clock)
        clock.time_s += refused.value.retry_after_s
        again = verifier.open_stream(turn_of(13, 0, 1, epoch=2), ONE)
        assert (await committed(again)).bonus_token == TEXT[13]
        assert not await is_in_debt(verifier), "its text was counted when it began"
        await stream.close()
        await again.close()


async def test_a_stream_out_of_tokens_keeps_its_rows_if_nobody_waits() -> None:
    async with served(1.0) as (verifier, _, clock):
        stream = verifier.open_stream(turn_of(12, 0, 1), ONE)
        await committed(stream)
        stream.propose(Proposal(1, 12), is_more_coming=False)
        with pytest.raises(Overloaded):
            await stream.next_commit()
        clock.time_s += 12.0
        again = verifier.open_stream(turn_of(13, 12, 1, epoch=2), ONE)
        assert (await committed(again)).bonus_token == TEXT[13]
        await stream.close()
        await again.close()


async def test_a_stream_that_ends_after_a_commit_gets_nothing_back() -> None:
    async with served(2.0, num_slots=2) as (verifier, _, _):  # a bucket of 20 tokens
        stream = verifier.open_stream(turn_of(12, 0, 1), ONE)
        await committed(stream)
        await verified(verifier, turn_of(13, 12, 1, epoch=2))
        stream.propose(Proposal(1, 12), is_more_coming=False)
        with pytest.raises(StaleEpoch):
            await stream.next_commit()
        await verified(verifier, turn_of(12, 0, 1, key="more"))
        assert await is_in_debt(verifier)
        await stream.close()


async def test_a_text_whose_streams_run_out_of_tokens_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "STREAM_WAIT_S", 0.0)
    monkeypatch.setattr(caller_limits, "BURST_S", 0.0)
    async with served(100.0) as (verifier, engine, clock):
        ticking = asyncio.create_task(tick(clock))
        draft = DraftEngine(hash_model("draft")[0])
        orchestrator = Orchestrator(verifier, draft, LetterTokenizer(), Speculation(mode="stream"))
        request = Request(prompt_ids=tuple(PROMPT), max_new_tokens=24, ignore_eos=True, caller="busy")
        result = await orchestrator.generate(request)
        assert list(result.token_ids) == TEXT[12:36]
        assert engine.quotas.num_refused["tokens"] > 0
        await orchestrator.aclose()
        await draft.aclose()
        ticking.cancel()


async def tick(clock: SteppedClock) -> None:
    while True:
        await asyncio.sleep(0.001)
        clock.time_s += 0.01
