"""Serves requests with a target and, if there is one, a draft: connects, opens a session each, hands on its chunks.

Knows ports and records only, no model and no wire; everything on the route of a token between prompt and text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from functools import partial

from specsplit.core.defaults import DRAFTLESS, Mode
from specsplit.core.errors import InvalidRequest, InvalidSettings, PeerMismatch
from specsplit.core.ports import Clock, Drafter, Tokenizer, Verifier
from specsplit.core.types import Identity, Scores
from specsplit.orchestrator.closings import Closings
from specsplit.orchestrator.events import RequestEvents
from specsplit.orchestrator.first_round import first_chunk
from specsplit.orchestrator.peer import draft_peer, target_peer
from specsplit.orchestrator.replicas import Target
from specsplit.orchestrator.request import Chunk, Request, Result, RetryPolicy
from specsplit.orchestrator.retry import Retrier
from specsplit.orchestrator.session import Session, SessionContext, decides, resolved_mode
from specsplit.speculation.options import Speculation
from specsplit.speculation.round_plan import draftless
from specsplit.speculation.statistics import SpeculationStats

_MAX_MET = 16


class MonotonicClock:
    """The process's own clock."""

    now = staticmethod(time.perf_counter)


class Orchestrator:
    """Generates text for any number of requests at once: the target's tokens, at the draft's pace if there is a draft.

    A draft that is away, slow or wrong costs speed, never a request; a target that is away is asked again until
    `retry_policy` ends. Both show in the result, which `clock` times. Orchestrators of a process share what they learn.

    Raises:
        InvalidSettings: a mode that speculates, without a drafter.
    """

    def __init__(
        self,
        verifier: Target,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        speculation: Speculation = Speculation(),  # noqa: B008  (frozen)
        clock: Clock | None = None,
        *,
        retry_policy: RetryPolicy | None = None,
    ) -> None:
        if speculation.mode in ("pingpong", "overlap", "stream") and drafter is None:
            raise InvalidSettings(
                f"Mode {speculation.mode} needs a draft model; name one with --draft-model or use --mode plain."
            )
        self.tokenizer, self.speculation = tokenizer, speculation
        self.clock = clock if clock is not None else MonotonicClock()
        # Made here by default: one made with the module would give every forked process the same jitter.
        self.retry_policy = retry_policy or RetryPolicy()
        self._target, self._draft, self._closings = target_peer(verifier), None, Closings()
        if drafter is not None and speculation.mode not in DRAFTLESS:
            self._draft = draft_peer(drafter, self._target, self.retry_policy.rng)
        self._modes = speculation.auto_modes if self._draft is not None else draftless(speculation.auto_modes)
        self._met: deque[Identity] = deque(maxlen=_MAX_MET)
        """The targets that these settings were checked against: replicas, or one after the other."""

    def with_retry_policy(self, retry_policy: RetryPolicy) -> Orchestrator:
        """Return an orchestrator of the same workers with other times; the two share all they know and close."""
        other = copy(self)
        other.retry_policy = retry_policy
        return other

    @property
    def mode(self) -> Mode:
        """How rounds are run; `auto` is plain if there is nothing to choose."""
        return resolved_mode(self.speculation, self._modes)

    async def connect(self) -> Identity:
        """Ask the workers who they are and return the target's identity; `stream` does so by itself.

        A draft that does not answer is asked again later.

        Raises:
            VocabularyMismatch: draft and target do not share a vocabulary.
            PeerMismatch: a worker has another role or protocol version, or the target another vocabulary.
            InvalidRequest: the trees to be verified are larger than the target takes.
            DeadlineExceeded, LinkError: the target does not answer.
        """
        with self._target.session_verifier() as verifier:
            retrier = self._retrier(None, RequestEvents())
            target = await self._target.ask(verifier, retrier)
            await self._check(target, retrier)
            return target

    async def _check(self, target: Identity, retrier: Retrier) -> None:
        """Check a target against the settings, the tokenizer and the draft."""
        # Settings are checked once per target; a restarted worker with another model is another target. Replicas and
        # restarts are told apart by measured times as well, which decide nothing here.
        model = _without_times(target)
        if model not in self._met:
            if target.vocab_hash != self.tokenizer.vocab_hash:
                raise PeerMismatch(
                    f"The target {target.model} has another vocabulary than the tokenizer here; connect again."
                )
            if self._draft is not None:
                await self._draft.meet(target, retrier.remaining_s)
            has_trees = self.speculation.has_trees(has_draft=self._draft is not None)
            num_nodes = self.speculation.bounds.max_new_nodes
            if has_trees and self.speculation.mode != "auto" and num_nodes > target.max_nodes:
                raise InvalidRequest(
                    f"The target takes trees of at most {target.max_nodes} nodes, not {num_nodes}.", param="nodes"
                )
            self._met.append(model)

    def _known(self, verifier: Verifier, request: Request) -> Identity | None:
        """Return who the session's target was when it was asked last, if the request may begin on that."""
        target = self._target.known(verifier)
        if target is None or _without_times(target) not in self._met:
            return None
        try:
            request.check_fits(target)
        except InvalidRequest:
            return None  # it may have more room by now
        return target

    def _retrier(self, timeout_s: float | None, events: RequestEvents, began_s: float | None = None) -> Retrier:
        timeout_s = timeout_s if timeout_s is not None else self.retry_policy.timeout_s
        return Retrier(timeout_s, self.retry_policy, events, began_s, self._target.closings)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield one chunk per round; the last one carries the result.

        Both sessions are being closed when the last chunk comes, and are closed when the iteration ends. Whoever closes
        the generator at the last chunk does not wait for that: a request that finds no slot meanwhile does.
        Iterate inside `contextlib.aclosing`: an iteration left early closes its sessions when the generator is closed.

        Raises:
            InvalidRequest, ContextExceeded: the request does not fit the target.
            DeadlineExceeded, LinkError, NoFreeSlot: the target was of no use for as long as `retry_policy` allows.
            PeerMismatch: a worker has another role or protocol version, or the target became another model.
        """
        clock, started_s = self.clock, self.clock.now()
        events = RequestEvents()
        retrier = self._retrier(request.timeout_s, events, request.began_s)
        with self._target.session_verifier(request) as verifier:
            known = self._known(verifier, request)
            target = known or await self._target.ask(verifier, retrier)
            while True:
                await self._check(target, retrier)
                request.check_fits(target)
                ask_other = None
                if known is not None:
                    # It may be another one since. It says so beside the first round, before anything of that is shown.
                    asker = self._retrier(request.timeout_s, events, request.began_s)
                    ask_other, known = partial(self._target.ask_other, known, verifier, asker), None
                async with Session(self._context(verifier, target), request, retrier, events) as session:
                    with self._target.member(verifier).beginning():
                        chunk = await first_chunk(session.rounds, ask_other)
                    if isinstance(chunk, Identity):
                        target = chunk
                        continue
                    now_s = first_token_s = clock.now()
                    retrier.waits_when_full = True
                    with self._target.member(verifier).counted():
                        while chunk.finish_reason is None:
                            yield chunk
                            chunk = await session.rounds.next_chunk()
                            now_s = clock.now()
                    ttft_s, decode_s = first_token_s - started_s, now_s - first_token_s
                    chunk = replace(chunk, result=session.result(chunk.finish_reason, ttft_s, decode_s))
                    await session.begin_closing()
                    yield chunk
                    return

    def _context(self, verifier: Verifier, target: Identity) -> SessionContext:
        return SessionContext(
            target=self._target,
            verifier=verifier,
            identity=target,
            draft=self._draft,
            tokenizer=self.tokenizer,
            speculation=self.speculation,
            modes=self._modes,
            closings=self._closings,
        )

    async def generate(self, request: Request) -> Result:
        """Return the finished generation.

        Raises:
            InvalidRequest, ContextExceeded: the request does not fit the target.
            DeadlineExceeded, LinkError, NoFreeSlot: the target was of no use for as long as `retry_policy` allows.
        """
        result = None
        async with aclosing(self.stream(request)) as chunks:
            async for chunk in chunks:
                result = chunk.result
        assert result is not None, "the last chunk carries the result"
        return result

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Sequence[tuple[int, float]] = (),
        top_logprobs: int = 0,
        *,
        timeout_s: float | None = None,
        caller: str = "",
    ) -> Scores:
        """Return what the target's `score` answers for `caller`; it is asked again, and fails, as in `stream`."""
        return await self._score(timeout_s, None, prompt, scored, logit_bias, top_logprobs, caller)

    async def score_prompt(self, request: Request, *, keeps_rows: bool) -> Scores:
        """Score a request's prompt behind its first token; if it `keeps_rows`, the request itself begins with them."""
        ids, bias = request.prompt_ids, request.sampling.logit_bias
        asked = ids[:1], ids[1:], bias, request.logprobs or 0, request.caller if keeps_rows else None
        return await self._score(request.timeout_s, request.began_s, *asked)

    async def _score(self, timeout_s: float | None, began_s: float | None, *asked: object) -> Scores:
        # One session for all attempts, which knows the replicas that have refused or failed already.
        with self._target.session_verifier() as verifier:
            return await self._retrier(timeout_s, RequestEvents(), began_s).ask(verifier.score, *asked)

    def use_stats(self, stats: SpeculationStats, *, is_greedy: bool) -> None:
        """Learn into `stats` from now on, for a study that watches what is learned."""
        self._target.use_stats(stats, self._draft, is_greedy=is_greedy, is_planning=decides(self.speculation))

    async def aclose(self) -> None:
        """End what finished requests left: workers get CLOSE_S to say that their slots are free. They stay open."""
        await self._closings.end()


def _without_times(identity: Identity) -> Identity:
    """Return what two workers of one model have in common, however quick they are."""
    return replace(identity, step_times=(), fork_s=0.0, text_token_s=0.0)
