"""One request being served: its clients, its rounds, its result; closes both workers' sessions whatever happens.

Made by the orchestrator, which owns what outlives a request. Knows ports and records only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from specsplit.core.defaults import DEFAULT_DEPTH, Mode
from specsplit.core.errors import LinkError, Overloaded, ResourceError
from specsplit.core.ports import Tokenizer, Verifier
from specsplit.core.types import FinishReason, Identity, SessionParams
from specsplit.engine.cancellation import to_its_end
from specsplit.orchestrator.audit import audited_params, open_audit
from specsplit.orchestrator.audited_target import AuditedTarget
from specsplit.orchestrator.closings import CLOSE_S, Closings, log_failure
from specsplit.orchestrator.draft_client import DraftClient
from specsplit.orchestrator.events import RequestEvents
from specsplit.orchestrator.peer import DraftPeer, TargetPeer
from specsplit.orchestrator.request import Request, RequestTimings, Result
from specsplit.orchestrator.retry import Retrier
from specsplit.orchestrator.round import Rounds, SessionWorkers, Tally
from specsplit.orchestrator.session_contract import DraftContract, SessionContract, TokenHistory, session_key
from specsplit.orchestrator.sources.base import Source
from specsplit.orchestrator.sources.lookup import LookupSource
from specsplit.orchestrator.sources.overlap import OverlapSource
from specsplit.orchestrator.sources.pingpong import PingPongSource
from specsplit.orchestrator.sources.plain import PlainSource
from specsplit.orchestrator.sources.speculator import Speculator
from specsplit.orchestrator.sources.stream import StreamSource
from specsplit.orchestrator.target_client import TargetClient
from specsplit.orchestrator.text import Answer
from specsplit.orchestrator.wire import Traffic, Wire
from specsplit.speculation.cost_model import RoundMode
from specsplit.speculation.lookup import TextLookup
from specsplit.speculation.options import Speculation
from specsplit.speculation.round_plan import RoundPlanner, stream_limits


@dataclass(frozen=True, slots=True)
class SessionContext:
    """The workers that serve a request, and how they are used."""

    target: TargetPeer
    verifier: Verifier
    """The target's, or one of its replicas."""
    identity: Identity
    """The target's."""
    draft: DraftPeer | None
    tokenizer: Tokenizer
    speculation: Speculation
    modes: Sequence[RoundMode]
    """The modes that `auto` may choose beside plain decoding."""
    closings: Closings
    """Those of the orchestrator, so that a close that has begun ends with it at the latest."""


def resolved_mode(speculation: Speculation, modes: Sequence[RoundMode]) -> Mode:
    """Return the mode, `auto` being plain if there is nothing to choose."""
    is_plain = speculation.mode == "auto" and not modes and not speculation.lookup
    return "plain" if is_plain else speculation.mode


def decides(speculation: Speculation) -> bool:
    """Return whether measured times decide how rounds are run; otherwise nobody needs to count them."""
    return speculation.mode in ("auto", "stream")


class Session:
    """One generation; use it as a context manager around its rounds."""

    def __init__(self, context: SessionContext, request: Request, retrier: Retrier, events: RequestEvents) -> None:
        self._context, self._request, self._retrier = context, request, retrier
        key, history = session_key(), TokenHistory(request.prompt_ids)
        params = _session_params(context, request)
        events.key, events.request_id = key, request.request_id
        identity = context.identity
        speculation = context.speculation.for_target(identity)
        mode = resolved_mode(speculation, context.modes)
        retrier.waits_for_streams = mode != "auto"
        target = context.target.member(context.verifier)
        stats = target.stats(context.draft, is_greedy=request.sampling.is_greedy, is_planning=decides(speculation))
        stats.times.adopt(identity, context.draft.identity if context.draft is not None else None)

        contract = SessionContract("target", key, history, audited_params(params, context.verifier), events)
        limits = stream_limits(speculation, identity)
        shows_log_probs = params.top_logprobs is not None
        self._audit = open_audit(context.verifier, contract, retrier, shows_log_probs=shows_log_probs)
        self._target = (
            TargetClient(context.verifier, identity, contract, retrier, limits)
            if self._audit is None
            else AuditedTarget(context.verifier, identity, contract, retrier, limits, self._audit)
        )
        self._draft: DraftClient | None = None
        self._target_close: asyncio.Task[None] | None = None
        """The end of the target's session, once it has begun."""
        self._draft_close: asyncio.Task[None] | None = None
        """That of the draft's, unless the draft is slow or away: nobody waits for such a one."""
        self._speculator: Speculator | None = None
        # All sources share one speculator, hence one tree: `auto` may change the source between any two rounds.
        plain = PlainSource(history)
        sources: Mapping[RoundMode, Source] = {"plain": plain}
        if mode != "plain":
            if mode != "lookup" and context.draft is not None:
                draft_contract = DraftContract(key, history, params, events)
                self._draft = DraftClient(context.draft, draft_contract, retrier, stats)
            reader = context.target.lookup_reader
            lookup = TextLookup(reader, history.ids, params.eos_ids) if speculation.lookup else None
            self._speculator = Speculator(history, identity.vocab_size, stats, self._draft, lookup)
            sources = _sources(self._speculator, self._target, plain)

        end, max_nodes = params.prompt_length + params.max_tokens, identity.max_nodes
        planner = RoundPlanner(speculation, mode, context.modes, stats, end=end, max_nodes=max_nodes)
        answer = Answer(
            context.tokenizer,
            request.prompt_ids,
            eos_ids=params.eos_ids,
            stop=request.stop,
            max_tokens=params.max_tokens,
        )
        tally = Tally(
            (speculation.depth or DEFAULT_DEPTH) if speculation.has_trees(has_draft=self._draft is not None) else 0
        )
        workers = SessionWorkers(self._target, self._draft, stats)
        self.rounds = Rounds(mode, workers, planner, sources, answer, tally)

    def result(self, finish_reason: FinishReason, ttft_s: float, decode_s: float) -> Result:
        """Return the finished generation, of which the tokens after the first took `decode_s`."""
        rounds, contract = self.rounds, self._target.contract
        tally, token_ids, targets = rounds.tally, rounds.answer.token_ids, self._target.targets
        if self._speculator is not None:
            tally.add_drafted(self._speculator.drafted)
        return Result(
            token_ids=tuple(token_ids),
            text=rounds.answer.text,
            prompt_token_ids=self._request.prompt_ids,
            finish_reason=finish_reason,
            seed=contract.params.seed,
            mode=rounds.mode,
            timings=RequestTimings(
                ttft_s=ttft_s,
                queue_s=self._retrier.queue_s,
                decode_s=decode_s,
                tokens_per_s=(len(token_ids) - 1) / decode_s if decode_s > 0 else 0.0,
                draft_device_s=tally.draft_device_ms / 1e3,
                draft_waited_s=tally.draft_waited_ms / 1e3,
                target_device_s=tally.target_device_ms / 1e3,
            ),
            speculative_decoding=tally.summary(),
            num_rounds=tally.num_rounds,
            rounds_by_mode=tally.rounds_by_mode,
            target_forwards=tally.target_forwards,
            num_reused_tokens=tally.num_reused,
            draft_forwards=tally.draft_forwards,
            degraded=tuple(contract.events.phases),
            resyncs=tuple(contract.events.replays),
            wire=self._wire(),
            exactness=targets.exactness,
            numerics=targets.numerics,
            dtype=self._context.identity.dtype,
            exactness_reason=targets.exactness_reason,
            logprobs=tuple(rounds.logprobs),
            audit=self._audit.counts if self._audit is not None else None,
        )

    def _wire(self) -> Wire | None:
        draft = self._draft.contract.traffic if self._draft is not None else Traffic()
        wire = Wire(self.rounds.number, draft=draft, target=self._target.contract.traffic)
        return wire if wire.sent_bytes or wire.received_bytes else None

    async def __aenter__(self) -> Session:
        if self._draft is not None:
            self._draft.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        has_answered = self._target_close is not None
        try:
            self._begin_closes(is_refused=isinstance(error, Overloaded))
            # Whoever was refused, or left with the whole answer, waits for nothing.
            if not isinstance(error, Overloaded) and not (has_answered and isinstance(error, GeneratorExit)):
                await to_its_end(self._wait_closed(is_failing=error is not None))
        finally:
            if self._speculator is not None:
                self._speculator.stop_reading()
            self.rounds.end_span(self._context.identity.model, len(self._request.prompt_ids))

    async def begin_closing(self) -> None:
        """Begin to close both sessions, before their whole answer is given to somebody who may not wait for the end."""
        self._begin_closes(is_refused=False)
        # One turn of the loop, in which both begin: what comes next to a worker's queue is behind them.
        await asyncio.sleep(0)

    def _begin_closes(self, *, is_refused: bool) -> None:
        if self._target_close is not None:
            return
        context = self._context
        self._target_close = self._begin_close(self._target.close())
        if not is_refused:  # else it has no slot there
            context.target.closings.add(self._target_close)
        if self._speculator is not None and self._draft is not None and context.draft is not None:
            is_well, close = self._draft.is_well, self._begin_close(self._speculator.close())
            context.draft.closings.add(close)
            self._draft_close = close if is_well else None

    def _begin_close(self, closing: Coroutine[None, None, None]) -> asyncio.Task[None]:
        close = asyncio.create_task(closing, name="specsplit-close")
        close.add_done_callback(log_failure)
        self._context.closings.add(close)
        return close

    async def _wait_closed(self, *, is_failing: bool) -> None:
        """Wait for both closes, but not for ever; a bug in the target's closing is an error of the request.

        If the request has failed already, its error is the one to report.
        """
        # A worker that hangs frees the slot by its time to live.
        await asyncio.wait({close for close in (self._target_close, self._draft_close) if close}, timeout=CLOSE_S)
        close = self._target_close
        if close is None or not close.done() or close.cancelled() or is_failing:
            return
        failure = close.exception()
        if failure is not None and not isinstance(failure, LinkError | ResourceError):
            raise failure


def _session_params(context: SessionContext, request: Request) -> SessionParams:
    eos_ids = () if request.ignore_eos else request.eos_ids
    if eos_ids is None:
        eos_ids = context.tokenizer.eos_ids
    return SessionParams(
        sampling=request.sampling,
        seed=request.seed if request.seed is not None else secrets.randbits(64),
        choice=request.choice,
        prompt_length=len(request.prompt_ids),
        eos_ids=(*eos_ids, *request.stop_token_ids),
        max_tokens=min(request.max_new_tokens, context.identity.context - len(request.prompt_ids)),
        top_logprobs=request.logprobs,
        priority=request.priority,
        caller=request.caller,
        request_id=request.request_id,
    )


def _sources(speculator: Speculator, target: TargetClient, plain: PlainSource) -> Mapping[RoundMode, Source]:
    """Return the source of every mode that a session with trees may come to."""
    lookup = LookupSource(speculator, plain)
    sources: dict[RoundMode, Source] = {
        "plain": lookup,
        "lookup": lookup,
        "stream": StreamSource(speculator, target),
    }
    if speculator.draft is not None and speculator.background is not None:
        events = target.contract.events
        sources["pingpong"] = PingPongSource(speculator, speculator.draft, events)
        sources["overlap"] = OverlapSource(speculator, speculator.draft, speculator.background, events)
    return sources
