"""One request being served: its links, its rounds, its counts; closes both workers' sessions whatever happens.

Made by the pipeline, which owns what outlives a request. Knows ports and records only.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from specsplit.core.cancellation import to_its_end
from specsplit.core.defaults import Mode
from specsplit.core.errors import LinkError, ResourceError
from specsplit.core.ports import Clock, Tokenizer, Verifier
from specsplit.core.types import FinishReason, Identity, SessionParams
from specsplit.orchestrator.draft_link import DraftLink
from specsplit.orchestrator.drafting import Drafting
from specsplit.orchestrator.events import RequestEvents
from specsplit.orchestrator.growing import Growing
from specsplit.orchestrator.health import DraftPeer
from specsplit.orchestrator.link import TargetLink, TokenHistory
from specsplit.orchestrator.request import Chunk, Request, RequestTimings, Result, RetryPolicy, RoundFacts
from specsplit.orchestrator.retry import Retrier
from specsplit.orchestrator.round import RoundResult, Rounds, Source
from specsplit.orchestrator.stop import Stop
from specsplit.orchestrator.tally import Tally
from specsplit.orchestrator.wire import Traffic, Wire
from specsplit.speculation.cost_model import RoundMode
from specsplit.speculation.lookup import LookupIndex
from specsplit.speculation.options import Speculation
from specsplit.speculation.round_plan import RoundPlanner, stream_limits
from specsplit.speculation.statistics import SpeculationStats
from specsplit.telemetry import spans

_log = logging.getLogger(__name__)
_CLOSE_S = 1.0
"""How long the end of a request waits for workers to free their slots."""
KeepClosing = Callable[[asyncio.Task[None]], None]
"""Takes a close that has not ended in time, so that it ends with the orchestrator at the latest."""


@dataclass(frozen=True, slots=True)
class SessionContext:
    """Whom a request is served by, and how they are used."""

    verifier: Verifier
    target: Identity
    draft: DraftPeer | None
    tokenizer: Tokenizer
    clock: Clock
    speculation: Speculation
    modes: Sequence[RoundMode]
    """What `auto` may choose beside plain decoding."""
    stats_by_greedy: Mapping[bool, SpeculationStats]
    """By whether tokens are picked greedily."""
    patience: RetryPolicy
    keep_closing: KeepClosing


def resolved_mode(speculation: Speculation, modes: Sequence[RoundMode]) -> Mode:
    """Return the mode, `auto` being plain where there is nothing to choose."""
    is_plain = speculation.mode == "auto" and not modes and not speculation.lookup
    return "plain" if is_plain else speculation.mode


class Session:
    """One generation; use it as a context manager."""

    def __init__(
        self,
        serving: SessionContext,
        request: Request,
        persistence: Retrier,
        incidents: RequestEvents,
        started_s: float,
    ) -> None:
        self._serving, self._request, self._incidents, self._started_s = serving, request, incidents, started_s
        seed = request.seed if request.seed is not None else secrets.randbits(64)
        eos_ids = serving.tokenizer.eos_ids if request.eos_ids is None else request.eos_ids
        target, num_prompt = serving.target, len(request.prompt_ids)
        max_tokens = min(request.max_new_tokens, target.context - num_prompt)
        self._opening = opening = SessionParams(
            sampling=request.sampling,
            seed=seed,
            choice=request.choice,
            prompt_length=num_prompt,
            eos_ids=() if request.ignore_eos else eos_ids,
            max_tokens=max_tokens,
        )
        key = secrets.token_hex(16)
        self._committed = TokenHistory(request.prompt_ids)
        self._target = TargetLink(serving.verifier, target, key, self._committed, opening, persistence, incidents)
        self._mode: Mode = resolved_mode(serving.speculation, serving.modes)
        self._stats = serving.stats_by_greedy[request.sampling.is_greedy]
        self._stats.times.adopt(target, serving.draft.identity if serving.draft is not None else None)
        self._drafting: Drafting | None = None
        self._draft: DraftLink | None = None
        self._source: Source | None = None
        if self._mode != "plain":
            self._source = self._growing(persistence, incidents)
        limits = stream_limits(serving.speculation, target.max_nodes)
        self._rounds = Rounds(self._committed, self._target, self._source, incidents, limits)
        self._planner = RoundPlanner(
            serving.speculation,
            self._mode,
            serving.modes,
            self._stats,
            end=num_prompt + max_tokens,
            max_nodes=target.max_nodes,
        )
        self._stop = Stop(serving.tokenizer, eos_ids=opening.eos_ids, stop=request.stop, max_tokens=max_tokens)
        has_trees = serving.speculation.has_trees(has_draft=self._draft is not None)
        self._tally = Tally(serving.speculation.depth if has_trees else 0)
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._first_token_s = 0.0
        self._span = spans.OpenSpan("request", session=key)

    def _growing(self, persistence: Retrier, incidents: RequestEvents) -> Growing:
        serving, opening, committed, stats = self._serving, self._opening, self._committed, self._stats
        if self._mode != "lookup" and serving.draft is not None:
            draft_s = serving.patience.draft_s
            self._draft = DraftLink(serving.draft, self._target.session, committed, opening, incidents)
            self._drafting = Drafting(serving.draft, self._draft, committed, draft_s, persistence, stats)
        lookup = LookupIndex(committed.ids, eos_ids=opening.eos_ids) if serving.speculation.lookup else None
        return Growing(self._drafting, lookup, stats, committed, serving.target.vocab_size, incidents)

    async def next_chunk(self) -> Chunk:
        """Run one round, the prompt's first, and return what it adds."""
        is_prompt, draft = not self._token_ids, self._serving.draft
        draft_context = draft.context if draft is not None else sys.maxsize
        trouble = self._drafting.trouble if self._drafting is not None else None
        has_draft = self._drafting is not None and trouble is None
        move = self._planner.plan_round(len(self._committed.ids), draft_context, has_draft=has_draft)
        began_s = asyncio.get_running_loop().time() if move.decision is not None else 0.0
        running = self._rounds.run(move)
        if spans.is_on:
            number, parent = self._rounds.number, self._span.context
            running = spans.around(running, "round", _told_of_round, parent, round=number)
        outcome = await running
        if move.decision is not None and not is_prompt:
            round_s = asyncio.get_running_loop().time() - began_s
            self._stats.observe_round(move.decision, outcome.mode, len(outcome.verdict.token_ids), round_s)
        if trouble is not None and self._mode in ("auto", "stream") and not is_prompt:
            self._incidents.degrade("draft", trouble)  # it was not even a choice
        now_s = self._serving.clock.now()
        if is_prompt:
            self._first_token_s = now_s
        self._tally.add(outcome)
        num_accepted = outcome.num_accepted
        cut = self._stop.take(outcome.verdict.token_ids, num_accepted)
        num_tokens = len(cut.token_ids)
        self._token_ids.extend(cut.token_ids)
        for text, _ in cut.pieces:
            self._text.append(text)
        return Chunk(
            token_ids=cut.token_ids,
            accepted=(True,) * min(num_accepted, num_tokens) + (False,) * (num_tokens - num_accepted),
            pieces=cut.pieces,
            finish_reason=cut.finish_reason,
            result=self._result(cut.finish_reason, now_s) if cut.finish_reason else None,
            degraded=self._incidents.now,
            facts=RoundFacts(
                number=self._rounds.number - 1,
                mode=outcome.mode,
                num_nodes=len(outcome.verdict.verified),
                num_accepted=num_accepted,
                verify_s=outcome.verify_s,
                choice=move.decision,
            ),
        )

    def _result(self, finish_reason: FinishReason, last_token_s: float) -> Result:
        tally, decode_s = self._tally, last_token_s - self._first_token_s
        if self._source is not None:
            tally.add_drafted(self._source.drafted)
        return Result(
            token_ids=tuple(self._token_ids),
            text="".join(self._text),
            prompt_token_ids=self._request.prompt_ids,
            finish_reason=finish_reason,
            seed=self._opening.seed,
            mode=self._mode,
            timings=RequestTimings(
                ttft_s=self._first_token_s - self._started_s,
                decode_s=decode_s,
                tokens_per_s=(len(self._token_ids) - 1) / decode_s if decode_s > 0 else 0.0,
                draft_device_s=tally.draft_device_ms / 1e3,
                draft_waited_s=tally.draft_waited_ms / 1e3,
                target_device_s=tally.target_device_ms / 1e3,
            ),
            speculative_decoding=tally.summary(),
            num_rounds=tally.num_rounds,
            rounds_by_mode=tally.rounds_by_mode,
            target_forwards=tally.target_forwards,
            draft_forwards=tally.draft_forwards,
            degraded=self._incidents.degraded,
            resyncs=self._incidents.resyncs,
            wire=self._wire(),
        )

    def _wire(self) -> Wire | None:
        draft = self._draft.traffic if self._draft is not None else Traffic()
        wire = Wire(self._rounds.number, draft=draft, target=self._target.traffic)
        return wire if wire.sent_bytes or wire.received_bytes else None

    async def __aenter__(self) -> Session:
        if self._draft is not None:
            self._draft.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await to_its_end(self._close(is_failing=error is not None))
        finally:
            self._span.end()

    async def _close_target(self) -> None:
        await self._rounds.close()
        await self._target.close()

    async def _close(self, *, is_failing: bool) -> None:
        """Close both sessions, without waiting for ever; a bug in the target's closing is an error of the request.

        Where the request has failed already, its error is the one to report.
        """
        closing = asyncio.create_task(self._close_target())
        tasks = {closing}
        if self._source is not None and self._draft is not None:
            draft_closing = asyncio.create_task(self._source.close())
            if self._draft.is_well:
                tasks.add(draft_closing)
            else:
                self._serving.keep_closing(draft_closing)  # nobody waits for a draft that is slow or away
        ended, late = await asyncio.wait(tasks, timeout=_CLOSE_S)
        for task in late:
            self._serving.keep_closing(task)
        for task in ended:
            failure = None if task.cancelled() else task.exception()
            if failure is None:
                continue
            if task is closing and not is_failing and not isinstance(failure, LinkError | ResourceError):
                raise failure
            _log.debug("a session could not be closed; its slot is freed when its time is over", exc_info=failure)


def _told_of_round(outcome: RoundResult) -> dict[str, spans.Attribute]:
    return {"nodes": len(outcome.offer.proposal.token_ids), "accepted": outcome.num_accepted}
