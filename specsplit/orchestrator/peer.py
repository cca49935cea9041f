"""Workers as all sessions of a process see them: who they are, what was learned about them, whether to ask them.

A draft that fails is left alone until it answers a ping; one that answers and yet is of no use is asked less and less
often. Knows neither rounds nor trees. A failing draft never becomes an error of a request, unless it cannot be a draft
for this target from the start.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakValueDictionary

from specsplit.core.errors import DeadlineExceeded, PeerMismatch, VocabularyMismatch
from specsplit.core.ports import Drafter, Verifier
from specsplit.core.types import Identity
from specsplit.orchestrator.closings import Closings
from specsplit.orchestrator.degraded import Reason
from specsplit.orchestrator.events import reason_of
from specsplit.orchestrator.replica import Replica
from specsplit.orchestrator.replicas import Replicas, ReplicaSession, Target
from specsplit.orchestrator.request import Request
from specsplit.orchestrator.retry import Retrier
from specsplit.speculation.lookup import TextReader
from specsplit.speculation.statistics import SpeculationStats
from specsplit.speculation.worker_times import DecodingSessions

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _MOST_PING_PAUSE_S, MOST_COOLDOWN_S = 0.05, 2.0, 5.0
_PING_S = 3.0
_KNOWN_S = 1.0
"""Time for which a draft that said who it is need not be asked again."""
_MEETING_S = 2.0
"""Limit of the first ping, which has a connection to make."""


class Cooldown:
    """When to ask again after failures: at once after the first, then later and later, until a success."""

    def __init__(self) -> None:
        self.until_s = -math.inf
        """Nobody asks before this time."""
        self.num_failures = 0
        """Failures since the last success."""
        self.reason: Reason = "failed"
        self._counted_s = -math.inf

    def fail(self, reason: Reason, asked_s: float, now_s: float, least_s: float = 0.0) -> None:
        """Count a failure of a call that began at `asked_s`; calls under way together fail once.

        Nobody asks again for `least_s` at least.
        """
        self.reason = reason
        if asked_s >= self._counted_s:
            # The first failure costs no pause: one lost message says little about a worker.
            pause_s = _FIRST_PAUSE_S * 2 ** min(self.num_failures - 1, 32) if self.num_failures else 0.0
            self._counted_s, self.until_s = now_s, now_s + max(least_s, min(pause_s, MOST_COOLDOWN_S))
            self.num_failures += 1


class TargetPeer:
    """One target, and what was learned about it and about the drafts in front of it."""

    def __init__(self, verifier: Target) -> None:
        self.verifier = verifier
        self.decoding, self.closings = DecodingSessions(), Closings()
        self.lookup_reader = TextReader()
        self._identity: Identity | None = None
        """Who it said to be last; replicas keep their own."""
        self._ping_s = math.inf
        """The quickest ping so far."""
        self._stats: WeakKeyDictionary[object, dict[tuple[bool, bool], SpeculationStats]] = WeakKeyDictionary()
        """Keyed by the draft, or by this peer itself without one; an entry is forgotten with its draft."""
        self._members: dict[Replica, TargetPeer] = {}

    def member(self, verifier: Verifier) -> TargetPeer:
        """Return the peer of the replica at which a session is, for its times and its load; this one without replicas.

        What a session learns stays with the replica at which it began, even if it has to go on at another one.
        """
        if not isinstance(verifier, ReplicaSession):
            return self
        replica = verifier.replica
        if replica not in self._members:
            self._members[replica] = TargetPeer(replica.verifier)
        return self._members[replica]

    def session_verifier(self, request: Request | None = None) -> AbstractContextManager[Verifier]:
        """Give the verifier of one session, perhaps of a request: one of the replicas, if there are several."""
        if not isinstance(self.verifier, Replicas):
            return nullcontext(self.verifier)
        return self.verifier.session((request.caller, *request.prompt_ids) if request is not None else ())

    def known(self, verifier: Verifier) -> Identity | None:
        """Return who the target of a session said to be last; None if it was never asked."""
        return verifier.identity if isinstance(verifier, ReplicaSession) else self._identity

    @contextmanager
    def beginning(self) -> Generator[None]:
        """Count a session that is not behind its prompt yet."""
        self.decoding.num_beginning += 1
        try:
            yield
        finally:
            self.decoding.num_beginning -= 1

    @contextmanager
    def counted(self) -> Generator[None]:
        """Count a session that is behind its prompt."""
        self.decoding.count += 1
        try:
            yield
        finally:
            self.decoding.count -= 1

    def stats(self, draft: DraftPeer | None, *, is_greedy: bool, is_planning: bool) -> SpeculationStats:
        """Return what is known of decoding with `draft`, for sessions that pick tokens alike.

        Only stats that serve decisions (`is_planning`) count what `auto` and streams go by.
        """
        of_pair = self._stats.setdefault(draft if draft is not None else self, {})
        stats = of_pair.get((is_greedy, is_planning))
        if stats is None:
            stats = of_pair[is_greedy, is_planning] = SpeculationStats(is_planning=is_planning, here=self.decoding)
            if self._ping_s < math.inf:
                stats.times.observe_ping(self._ping_s)
        return stats

    def use_stats(
        self, stats: SpeculationStats, draft: DraftPeer | None, *, is_greedy: bool, is_planning: bool
    ) -> None:
        """Learn into `stats` from now on, for a study that watches what is learned."""
        self._stats.setdefault(draft if draft is not None else self, {})[is_greedy, is_planning] = stats

    async def ask(self, verifier: Verifier, retrier: Retrier) -> Identity:
        """Ask the target of a session who it is; the time of a ping tells the round trip while nothing else does."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._identity = identity = await retrier.ask(verifier.ping)
        self.member(verifier).observe_ping(loop.time() - began_s)
        return identity

    def observe_ping(self, ping_s: float) -> None:
        """Count a ping of the target."""
        self._ping_s = min(self._ping_s, ping_s)
        for of_pair in self._stats.values():
            for stats in of_pair.values():
                stats.times.observe_ping(self._ping_s)

    async def ask_other(self, known: Identity, verifier: Verifier, retrier: Retrier) -> Identity | None:
        """Ask the target of a session who it is; return that if it is not `known`."""
        target = await self.ask(verifier, retrier)
        # After a failure another replica may have answered than the one at which the session began.
        may_be_other = retrier.num_failures > 0 and isinstance(verifier, ReplicaSession)
        return target if may_be_other or target != known else None


@dataclass(slots=True)
class _Pings:
    """The pings of one draft: what jitters them, the task that sends them, and when one was answered last."""

    rng: random.Random
    task: asyncio.Task[None] | None = None
    answered_s: float = -math.inf


class DraftPeer:
    """One draft in front of one target: who it is, and whether it is to be asked.

    It is pinged in the background only while a session could use it (`enter`, `leave`): until it answers, and once
    when a session begins, since it may be another one by now.
    """

    def __init__(self, drafter: Drafter, target: TargetPeer, rng: random.Random) -> None:
        self.drafter = drafter
        self.target = target
        self.identity: Identity | None = None
        self.trouble: Reason | None = "unreachable"
        """Why nobody asks before a ping is answered, None if it is well."""
        self.cooldown, self.closings = Cooldown(), Closings()
        self._pings = _Pings(rng)
        self._met: Identity | None = None
        """The target whose vocabulary it has to share."""
        self._was_met = False
        """Whether requests were served before, with it or without."""
        self._up_since_s = -math.inf
        self._num_sessions = 0

    async def meet(self, target: Identity, remaining_s: float) -> None:
        """Ask the draft who it is, in front of a new `target`; one that is silent is asked again in the background.

        It is waited for as long as a connection takes, and no longer than `remaining_s`; of one that was silent before
        only an answer that needs no wait counts. One that requests could do without before is no reason to refuse them
        once the target is another one, or restarts.

        Raises:
            VocabularyMismatch, PeerMismatch: it answers, and is no draft for the first target that is met.
        """
        is_silent = self._was_met and self.trouble is not None
        wait_s = 0.0 if is_silent else min(_MEETING_S, remaining_s)
        self._met, limit = target, asyncio.timeout(wait_s)
        try:
            async with limit:
                await self.check()
        except (VocabularyMismatch, PeerMismatch) as error:
            if not self._was_met:
                raise
            self._refuse(error)
        except Exception as error:  # noqa: BLE001 - no draft, no error
            if limit.expired() and wait_s < _MEETING_S:
                return  # a short wait says nothing about the draft, which all requests share
            self.trouble = _reason_of_silence(error)
            # Sessions of other orchestrators may be running, and none of them would begin to ping.
            self._start_pinging()
            _log.warning(
                "the draft cannot be used, decoding plainly until it can: %s", str(error) or "no answer to a ping"
            )
        else:
            self._rise()
        self._was_met = True

    async def check(self) -> None:
        """Ask the draft who it is now: after a restart it may be another one.

        Raises:
            VocabularyMismatch: it does not share the target's vocabulary.
        """
        identity, target = await self.drafter.ping(), self._met
        assert target is not None, "met before it is used"
        if identity.vocab_hash != target.vocab_hash:
            raise VocabularyMismatch(
                f"The draft {identity.model} and the target {target.model} have different vocabularies; "
                "choose a draft of the target's own family or use --mode plain."
            )
        self.identity, self._pings.answered_s = identity, asyncio.get_running_loop().time()

    def delay(self, asked_s: float, now_s: float) -> None:
        """Count a call begun at `asked_s` whose answer is not waited for any longer."""
        self.cooldown.fail("slow", asked_s, now_s)

    def fail(self, error: Exception, reason: Reason, asked_s: float, now_s: float) -> None:
        """Count a call begun at `asked_s` that failed: nobody asks again before a ping is answered."""
        if self.trouble == "mismatch":
            return
        self.cooldown.fail(reason, asked_s, now_s)
        if reason == "mismatch":
            self._refuse(error)
        elif self.trouble is None and asked_s >= self._up_since_s:
            # A call that began before the last recovery says nothing about the draft of today.
            _log.info("the draft failed, decoding plainly until it answers: %r", error)
            self.trouble = reason
            self._start_pinging()

    def enter(self) -> None:
        """Count a session that could use the draft."""
        self._num_sessions += 1
        if self.trouble is not None or asyncio.get_running_loop().time() - self._pings.answered_s >= _KNOWN_S:
            self._start_pinging()

    async def leave(self) -> None:
        """Count the end of a session; without any, nobody pings."""
        self._num_sessions -= 1
        if self._num_sessions == 0 and (task := self._pings.task) is not None:
            self._pings.task = None
            task.cancel()
            await asyncio.wait({task})

    def _start_pinging(self) -> None:
        pings = self._pings
        if self._num_sessions > 0 and (pings.task is None or pings.task.done()):
            pings.task = asyncio.get_running_loop().create_task(self._ping(), name="specsplit-draft-ping")

    async def _ping(self) -> None:
        """Ask a draft that is well who it is by now, then do what is needed until it is well."""
        if self.trouble is None:
            try:
                async with asyncio.timeout(_PING_S):
                    await self.check()
            except (VocabularyMismatch, PeerMismatch) as error:
                self._refuse(error)
            except Exception as error:  # noqa: BLE001 - whether it is lost its calls tell
                _log.debug("the draft did not answer a ping", exc_info=error)
        if self.trouble is not None:
            await self._recover()

    async def _recover(self) -> None:
        """Ping until a draft for this target answers; one for another target is pinged again now and then."""
        pause_s = _FIRST_PAUSE_S
        while True:
            # Full jitter, so that the orchestrators of a restarted draft do not all ping at once.
            await asyncio.sleep(self._pings.rng.uniform(0, pause_s))
            pause_s = min(2 * pause_s, _MOST_PING_PAUSE_S)
            try:
                async with asyncio.timeout(_PING_S):
                    await self.check()
            except (VocabularyMismatch, PeerMismatch) as error:
                self._refuse(error)
                pause_s = MOST_COOLDOWN_S
            except Exception as error:  # noqa: BLE001 - whatever it is, it is no answer
                self.trouble = _reason_of_silence(error)
            else:
                self._rise()
                _log.info("the draft answers again")
                return

    def _rise(self) -> None:
        self.trouble, self._up_since_s = None, asyncio.get_running_loop().time()

    def _refuse(self, error: Exception) -> None:
        if self.trouble != "mismatch":
            _log.warning("the draft is not used: %s", error)
        self.trouble = "mismatch"
        self._start_pinging()


def _reason_of_silence(error: Exception) -> Reason:
    """Return the word for a ping without an answer: nothing answers faster than a ping."""
    return "unreachable" if isinstance(error, TimeoutError | DeadlineExceeded) else reason_of(error)


# All orchestrators of a process share the peers of their workers. A peer holds its worker, so the worker's id stays its
# own as long as there is an entry; the entry goes with the last orchestrator or session that uses the peer.
_targets: WeakValueDictionary[int, TargetPeer] = WeakValueDictionary()
_drafts: WeakValueDictionary[tuple[int, int], DraftPeer] = WeakValueDictionary()


def target_peer(verifier: Target) -> TargetPeer:
    """Return the peer of this target, which all orchestrators of the process share."""
    peer = _targets.get(id(verifier))
    if peer is None:
        peer = _targets[id(verifier)] = TargetPeer(verifier)
    return peer


def draft_peer(drafter: Drafter, target: TargetPeer, rng: random.Random) -> DraftPeer:
    """Return the peer of this draft in front of `target`, which all orchestrators of the process share.

    `rng` jitters the pings of a new peer.
    """
    peer = _drafts.get((id(drafter), id(target)))
    if peer is None:
        peer = _drafts[id(drafter), id(target)] = DraftPeer(drafter, target, rng)
    return peer
