"""A network that loses, doubles, delays and reorders, and hosts that crash and evict; healthy after `quiet_s`.

Stands between a real orchestrator and real engines in virtual time, everything drawn from one seed. It never retries:
that is the orchestrator's business. `watched.py` has the engines; here nothing is known of rows.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

from specsplit.core.errors import DeadlineExceeded, LinkError, NoFreeSlot, SlotBehind, SpecSplitError, WorkerUnreachable
from specsplit.core.types import Budget, Identity, Proposal, Scores, StreamLimits, TokenizerFiles, Turn, Verdict
from specsplit.engine.executor import Steppable
from tests.support.fault_stream import FaultyStream
from tests.support.watched import Ledger, WatchedDraft, WatchedTarget

T = TypeVar("T")
UNIT_S = 0.05
"""A hop takes about one; everything else is counted in it."""
DEADLINE_S = 40 * UNIT_S
"""After it a call that has no answer fails, whatever became of it."""


class Engine(Protocol):
    """A host runs one: a port with sessions to count, to evict and to damage."""

    @property
    def num_sessions(self) -> int: ...

    async def ping(self) -> Identity: ...

    async def sweep(self) -> int: ...

    async def close(self, session: str) -> None: ...

    def plant(self, session: str, rng: random.Random) -> bool: ...


E = TypeVar("E", bound=Engine)
A = TypeVar("A")


class Net:
    """Chance, the time until it is quiet, and everything that is under way."""

    def __init__(self, rng: random.Random, *, rate: float, quiet_s: float = 150 * UNIT_S) -> None:
        self.rng, self.rate, self.quiet_s = rng, rate, quiet_s
        self.loop = asyncio.get_running_loop()
        self.under_way: set[asyncio.Task[Any]] = set()
        self.failures: list[str] = []
        """Errors of code, as against those of the error tree."""
        self.counts: Counter[str] = Counter()
        """The faults so far, and who had them."""
        self.trace: deque[str] = deque(maxlen=400)

    @property
    def is_quiet(self) -> bool:
        return self.loop.time() >= self.quiet_s

    def strikes(self, scale: float = 1.0) -> bool:
        """Draw whether a fault happens."""
        return not self.is_quiet and self.rng.random() < self.rate * scale

    def note(self, what: str) -> None:
        self.trace.append(f"{self.loop.time():8.4f} {what}")

    def count(self, what: str) -> None:
        self.counts[what] += 1
        self.note(what)

    async def hop(self) -> None:
        """Take the time of one way over the wire, sometimes so long that others overtake."""
        units = self.rng.expovariate(1 / 15) if self.strikes(2) else self.rng.uniform(0.5, 2)
        await asyncio.sleep(units * UNIT_S)

    async def lose(self, what: str) -> None:
        """Let a call fail as one whose message was lost: soon, or at its deadline."""
        self.count(f"{what} lost")
        if self.rng.random() < 0.5:
            await asyncio.sleep(self.rng.uniform(1, 10) * UNIT_S)
            raise WorkerUnreachable("The connection was cut.")
        await asyncio.sleep(DEADLINE_S)
        raise DeadlineExceeded("No answer in time.")

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `work` whoever still waits for it; an error outside the error tree is a failure of the run."""
        task = self.loop.create_task(work, name=name)
        self.under_way.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.under_way.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, SpecSplitError):
            self.failures.append(f"{task.get_name()}: {error!r}")

    async def settle(self) -> None:
        """Wait until nothing is under way any more."""
        while self.under_way:
            await asyncio.wait(self.under_way)


class TimedDevice:
    """A device on the event loop whose steps take virtual time, so that calls come in while a session's step runs.

    Now and then callers step their work themselves, after a turn of the loop in which calls come in as well.
    """

    can_wait = False

    def __init__(self, net: Net) -> None:
        self._net = net
        self._workers: dict[Steppable, None] = {}
        self._is_scheduled = False

    @property
    def is_alive(self) -> bool:
        return True

    def submit(self, worker: Steppable, accept: Callable[[], None]) -> None:
        accept()
        self._workers[worker] = None
        self._schedule()

    def deliver(self, loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
        settle()

    def try_run_inline(self, session: str) -> Self | None:
        return self if not self._workers and self._net.rng.random() < 0.5 else None

    def is_over(self, within_s: float = 0.0) -> bool:
        return self._net.rng.random() < 0.8

    async def yield_to_loop(self) -> None:
        await asyncio.sleep(self._net.rng.uniform(0.2, 1.5) * UNIT_S)

    async def close(self) -> None:
        raise AssertionError("shared by engines, so never theirs to close")

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._net.loop.call_later(self._net.rng.uniform(0.2, 1.5) * UNIT_S, self._step)

    def _step(self) -> None:
        self._is_scheduled = False
        for worker in list(self._workers):
            worker.step()
            if not worker.has_work:
                del self._workers[worker]
        if self._workers:
            self._schedule()


class Host(Generic[E]):
    """One worker process: an engine, which a crash replaces by a new one without any session.

    The old engine lives on unseen until its work ends, and must keep its own books even then.
    """

    def __init__(self, net: Net, name: str, make: Callable[[], E]) -> None:
        self.net, self.name, self._make = net, name, make
        self.engines = [make()]
        self.is_up = True
        self.crash = net.loop.create_future()

    @property
    def engine(self) -> E:
        return self.engines[-1]

    async def execute(self, call: Callable[[E], Coroutine[Any, Any, A]]) -> A:
        """Do a call as it arrives here; when its caller leaves, the engine hears of it.

        Raises:
            WorkerUnreachable: the host is down, or goes down meanwhile.
        """
        if not self.is_up:
            raise WorkerUnreachable(f"The {self.name} refuses connections.")
        crash, work = self.crash, self.net.spawn(call(self.engine), f"call of the {self.name}")
        try:
            await asyncio.wait((crash, work), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            work.cancel()
            raise
        if crash.done():
            raise WorkerUnreachable(f"The {self.name} has gone away.")
        return work.result()

    async def trouble(self, sessions: Callable[[], Sequence[str]]) -> None:
        """Crash, restart, evict and mistake one slot for another until it is quiet, and let sessions expire."""
        net = self.net
        while not net.is_quiet:
            await asyncio.sleep(net.rng.uniform(5, 40) * UNIT_S)
            if net.strikes(3):
                await self._restart()
            elif net.strikes(6) and sessions():
                await self._disturb(net.rng.choice(sessions()))
            await self.engine.sweep()

    async def _disturb(self, session: str) -> None:
        net = self.net
        if net.rng.random() < 0.5:
            net.count(f"{self.name} evicts")
            await self.engine.close(session)
        elif self.engine.plant(session, net.rng):
            net.count(f"{self.name} has other rows planted")

    async def _restart(self) -> None:
        net = self.net
        net.count(f"{self.name} crashes")
        self.is_up = False
        self.crash.set_result(None)
        await asyncio.sleep(net.rng.uniform(1, 40) * UNIT_S)
        self.crash = net.loop.create_future()
        self.engines.append(self._make())
        self.is_up = True
        net.note(f"{self.name} is back")


class _FaultyLink(Generic[E]):
    """One orchestrator's way to a host; the calls named in `mute` are never answered."""

    def __init__(self, net: Net, host: Host[E], ledger: Ledger, *, mute: tuple[str, ...] = ()) -> None:
        self._net, self._host, self._ledger, self._mute = net, host, ledger, mute
        self.calls_under_way = 0

    async def ping(self) -> Identity:
        return await self._call("ping", lambda engine: engine.ping())

    async def close(self, session: str) -> None:
        await self._call("close", lambda engine: engine.close(session))

    async def _turn(
        self, name: str, turn: Turn, call: Callable[[E], Coroutine[Any, Any, A]], num_nodes: int | None = None
    ) -> A:
        self._ledger.enter(self._host.name, turn, num_nodes)
        what = f"{name} {turn.session[:4]} e{turn.epoch} r{turn.round} {turn.base_length}+{len(turn.tail)}"
        try:
            answer = await self._call(what, call)
        except SlotBehind as behind:
            self._ledger.behind(self._host.name, turn, behind)
            raise
        return answer

    async def _call(self, what: str, call: Callable[[E], Coroutine[Any, Any, A]]) -> A:
        """Send a call and wait for its answer; a caller who leaves may leave the call on its way."""
        net = self._net
        self.calls_under_way += 1
        try:
            if what.startswith(self._mute):
                await asyncio.Event().wait()
            journey = net.spawn(self._journey(what, call), what)
            try:
                return await asyncio.shield(journey)
            except asyncio.CancelledError:
                net.note(f"{what}: the caller left")
                if net.is_quiet or net.rng.random() < 0.5:
                    journey.cancel()
                raise
            except SpecSplitError as error:
                net.counts[f"{self._host.name} {type(error).__name__}"] += 1
                net.note(f"{what}: {type(error).__name__} {error}")
                raise
        finally:
            self.calls_under_way -= 1

    async def _journey(self, what: str, call: Callable[[E], Coroutine[Any, Any, A]]) -> A:
        net = self._net
        net.note(f"{what} ->")
        if net.strikes():
            net.count("doubled")
            net.spawn(self._again(what, call), f"{what} again")
        await net.hop()
        if net.strikes():
            await net.lose("request")
        answer = await self._host.execute(call)
        if net.strikes():
            await net.lose("answer")
        await net.hop()
        net.note(f"{what}: answered")
        return answer

    async def _again(self, what: str, call: Callable[[E], Coroutine[Any, Any, A]]) -> None:
        """Deliver the same call once more, soon or late; nobody waits for the answer."""
        await asyncio.sleep(self._net.rng.expovariate(1 / 30) * UNIT_S)
        self._net.note(f"{what} -> again")
        await self._host.execute(call)


class FaultyDrafter(_FaultyLink[WatchedDraft]):
    """The Drafter port over a faulty network."""

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        return await self._turn("propose", turn, lambda engine: engine.propose(turn, known_nodes, budget))


class FaultyVerifier(_FaultyLink[WatchedTarget]):
    """The Verifier port over a faulty network."""

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        try:
            verdict = await self._turn("verify", turn, lambda engine: engine.verify(turn, proposal), len(proposal))
        except (LinkError, NoFreeSlot):
            self._ledger.failed(turn)
            raise
        self._ledger.answered(turn, verdict)
        return verdict

    def open_stream(self, turn: Turn, limits: StreamLimits) -> FaultyStream:
        return FaultyStream(self._net, self._host, self._ledger, turn, limits)

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Sequence[tuple[int, float]] = (),
        top_logprobs: int = 0,
        keep_for: str | None = None,
    ) -> Scores:
        asked = (prompt, scored, logit_bias, top_logprobs, keep_for)
        return await self._call("score", lambda engine: engine.score(*asked))

    async def tokenizer_files(self, known_hash: str = "") -> TokenizerFiles:
        return await self._call("tokenizer", lambda engine: engine.tokenizer_files(known_hash))
