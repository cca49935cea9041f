"""One request through a target and, where there is one, a draft: opens the session, runs rounds until stop says so.

Knows ports and records only, no model and no wire; everything on the route of a token between prompt and text.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType

from specsplit.core.cancellation import to_its_end
from specsplit.core.errors import InvalidRequest, InvalidSettings, VocabularyMismatch
from specsplit.core.ports import Clock, Drafter, Tokenizer, Verifier
from specsplit.core.types import FinishReason, Identity, SessionParams
from specsplit.orchestrator.controller import Controller
from specsplit.orchestrator.link import Committed, DraftLink, TargetLink
from specsplit.orchestrator.records import Chunk, Mode, Request, RequestTimings, Result, Speculation
from specsplit.orchestrator.round import PingPong, Rounds, Source
from specsplit.orchestrator.statistics import Tally
from specsplit.orchestrator.stop import Stop
from specsplit.telemetry import spans


class MonotonicClock:
    """The process's own clock."""

    def now(self) -> float:
        return time.perf_counter()


class Orchestrator:
    """Generates text, for any number of requests at once: the target's words, at the draft's pace where there is one.

    Raises:
        InvalidSettings: a mode that speculates, without a drafter.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        speculation: Speculation = Speculation(),  # noqa: B008  (frozen)
        clock: Clock | None = None,
    ) -> None:
        if speculation.mode == "pingpong" and drafter is None:
            raise InvalidSettings("Mode pingpong needs a draft model; name one with --draft-model or use --mode plain.")
        self.verifier = verifier
        self.drafter = drafter if speculation.mode != "plain" else None
        self.tokenizer = tokenizer
        self.speculation = speculation
        self.clock = clock if clock is not None else MonotonicClock()
        self._target: Identity | None = None
        self._context = self._draft_vocab_size = 0

    @property
    def mode(self) -> Mode:
        """What `auto` came to."""
        return "plain" if self.drafter is None else "pingpong"

    async def connect(self) -> Identity:
        """Ask the workers who they are, once, and return the target's identity; `stream` does so by itself.

        Raises:
            VocabularyMismatch: draft and target do not share a vocabulary.
            InvalidRequest: the trees to be verified are larger than the target takes.
        """
        if self._target is None:
            target = await self.verifier.ping()
            self._context = target.context
            if self.drafter is not None:
                draft = await self.drafter.ping()
                if draft.vocab_hash != target.vocab_hash:
                    raise VocabularyMismatch(
                        f"The draft {draft.model} and the target {target.model} have different vocabularies; "
                        "choose a draft of the target's own family or use --mode plain."
                    )
                self._context = min(target.context, draft.context)
                self._draft_vocab_size = draft.vocab_size
            if self.drafter is not None and self.speculation.nodes > target.max_nodes:
                raise InvalidRequest(
                    f"The target takes trees of at most {target.max_nodes} nodes, not {self.speculation.nodes}.",
                    param="nodes",
                )
            self._target = target
        return self._target

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield one chunk per round; the last one carries the result and comes after both sessions are closed.

        Iterate inside `contextlib.aclosing`: an iteration left early closes its sessions when the generator is closed.

        Raises:
            InvalidRequest, ContextExceeded: the request does not fit the target.
        """
        started_s = self.clock.now()
        target = await self.connect()
        request.check_fits(target.context, target.vocab_size)
        async with _Session(self, request, target, self._context, self._draft_vocab_size, started_s) as session:
            chunk = await session.next_chunk()
            while chunk.finish_reason is None:
                yield chunk
                chunk = await session.next_chunk()
        yield chunk

    async def generate(self, request: Request) -> Result:
        """Return the finished generation.

        Raises:
            InvalidRequest, ContextExceeded: the request does not fit the target.
        """
        result = None
        async with aclosing(self.stream(request)) as chunks:
            async for chunk in chunks:
                result = chunk.result
        assert result is not None, "the last chunk carries the result"
        return result


class _Session:
    """One request being served; leaving its scope closes both workers' sessions, whatever happened inside."""

    def __init__(
        self,
        owner: Orchestrator,
        request: Request,
        target: Identity,
        draft_context: int,
        draft_vocab_size: int,
        started_s: float,
    ) -> None:
        self._request, self._clock, self._started_s = request, owner.clock, started_s
        self._mode: Mode = owner.mode
        seed = request.seed if request.seed is not None else secrets.randbits(64)
        eos_ids = owner.tokenizer.eos_ids if request.eos_ids is None else request.eos_ids
        max_tokens = min(request.max_new_tokens, target.context - len(request.prompt_ids))
        self._opening = SessionParams(
            sampling=request.sampling,
            seed=seed,
            choice=request.choice,
            prompt_length=len(request.prompt_ids),
            eos_ids=() if request.ignore_eos else eos_ids,
            max_tokens=max_tokens,
        )
        key = secrets.token_hex(16)
        self._committed = Committed(request.prompt_ids)
        self._target = TargetLink(owner.verifier, key, self._committed, self._opening)
        self._source: Source | None = None
        if owner.drafter is not None:
            sampling = request.sampling.within(draft_vocab_size)
            link = DraftLink(owner.drafter, key, self._committed, replace(self._opening, sampling=sampling))
            self._source = PingPong(link, self._committed, draft_vocab_size, target.vocab_size)
        self._rounds = Rounds(self._committed, self._target, self._source)
        self._controller = Controller(owner.speculation, min(draft_context, len(request.prompt_ids) + max_tokens))
        self._stop = Stop(
            owner.tokenizer.decode, eos_ids=self._opening.eos_ids, stop=request.stop, max_tokens=max_tokens
        )
        self._tally = Tally(owner.speculation.depth if self._source is not None else 0)
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._first_token_s = 0.0
        self._span = spans.OpenSpan("request", session=key)

    async def next_chunk(self) -> Chunk:
        """Run one round, the prompt's first, and return what it adds."""
        is_prompt = not self._token_ids
        budget = None if is_prompt or self._source is None else self._controller.next_budget(len(self._committed))
        with spans.span("round", parent=self._span.context, round=self._rounds.number):
            outcome = await self._rounds.run(budget)
            spans.annotate(nodes=len(outcome.offer.proposal), accepted=outcome.num_accepted)
        now_s = self._clock.now()
        if is_prompt:
            self._first_token_s = now_s
        self._tally.add(outcome)
        cut = self._stop.take(outcome.verdict.token_ids, outcome.num_accepted)
        self._token_ids.extend(cut.token_ids)
        self._text.extend(text for text, _ in cut.pieces)
        return Chunk(
            token_ids=cut.token_ids,
            accepted=tuple(index < outcome.num_accepted for index in range(len(cut.token_ids))),
            pieces=cut.pieces,
            finish_reason=cut.finish_reason,
            result=self._result(cut.finish_reason, now_s) if cut.finish_reason else None,
        )

    def _result(self, finish_reason: FinishReason, last_token_s: float) -> Result:
        tally, decode_s = self._tally, last_token_s - self._first_token_s
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
                target_device_s=tally.target_device_ms / 1e3,
            ),
            speculative_decoding=tally.summary(),
            num_rounds=tally.num_rounds,
            target_forwards=tally.target_forwards,
            draft_forwards=tally.draft_forwards,
        )

    async def __aenter__(self) -> _Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await to_its_end(self._close(is_failing=error is not None))
        finally:
            self._span.end()

    async def _close(self, *, is_failing: bool) -> None:
        """Close both sessions; where the request has failed already, its error is the one to report."""
        closing = [self._target.close()]
        if self._source is not None:
            closing.append(self._source.close())
        for failure in await asyncio.gather(*closing, return_exceptions=True):
            if failure is not None and not is_failing:
                raise failure
