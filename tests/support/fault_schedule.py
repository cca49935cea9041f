"""One seeded run of a few requests over one draft, one target and a faulty network, and what must hold of it.

The real orchestrator and engines over models of hashes, in virtual time. One seed is one run:
`python -m tests.support.fault_schedule SEED` replays it and prints what happened.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.errors import SpecSplitError
from specsplit.core.types import SamplingParams, SessionParams
from specsplit.draft import engine as draft_engine
from specsplit.engine import batch as engine_batch
from specsplit.engine import slots as engine_slots
from specsplit.model.loader import LoadedModel, Role
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result, RetryPolicy
from specsplit.speculation.options import Speculation
from specsplit.target import engine as target_engine
from tests.support.fault_net import UNIT_S, FaultyDrafter, FaultyVerifier, Host, Net, TimedDevice
from tests.support.hash_model import (
    VOCAB_SIZE,
    HashRunner,
    LetterTokenizer,
    Violation,
    hash_model,
    picks_along,
    target_logits,
    tied_logits,
)
from tests.support.virtual_time import LoopClock, VirtualTimeError, run_virtual
from tests.support.watched import Account, Ledger, WatchedDraft, WatchedTarget

_Resync = tuple[str, int, str, int]
"""Worker, round, reason, tokens."""
RATES = (0.0, 0.03, 0.08, 0.2)
MUTES = (("propose",), ("propose", "close"), ("ping", "propose", "close"))
MODES: tuple[Mode, ...] = (
    "pingpong",
    "overlap",
    "auto",
    "stream",
    "pingpong",
    "overlap",
    "stream",
    "lookup",
    "auto",
    "stream",
)
LIVE_S = 60.0
"""After the network is quiet, all of up to six requests have ended by then; twelve have twice as long."""
LONG_S = 7000 * UNIT_S
"""Longer than any time to live."""
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.0, frequency_penalty=0.5, repetition_penalty=1.1),
)
NODE_LIMIT = 16


def _loop_s() -> float:
    """Return the time of the loop that is running, 0 where none is."""
    try:
        return LoopClock().now()
    except RuntimeError:
        return 0.0


def _row_limits(seed: int, sizes: Sequence[float | None]) -> dict[Role, float | None]:
    """Draw, apart from all else, how many full slots the KV memory of each worker holds together, None for all."""
    rng = random.Random(f"rows {seed}")
    return {"draft": rng.choice(sizes), "target": rng.choice(sizes)}


def _step_limits(seed: int) -> tuple[int | None, int | None]:
    """Draw, apart from all else, how many rows a step has at most, and how many of one prompt."""
    return random.Random(f"steps {seed}").choice(((None, None), (6, None), (None, 2), (9, 4)))


class _Errors(logging.Handler):
    """Collects errors that our code logs: mistakes in the background, which no request shows."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.getMessage()} {record.exc_info and record.exc_info[1]!r}")

    def __enter__(self) -> None:
        logging.getLogger("specsplit").addHandler(self)

    def __exit__(self, *raised: object) -> None:
        logging.getLogger("specsplit").removeHandler(self)


class Schedule:
    """Everything that one seed draws, run once."""

    def __init__(
        self,
        seed: int,
        *,
        rate: float | None = None,
        mute: tuple[str, ...] | None = None,
        mode: Mode | None = None,
        lookup: bool | None = None,
        is_crowded: bool = False,
        num_sessions: int | None = None,
    ) -> None:
        """Draw all else; in a crowded run several sessions share the KV memory of little more than one."""
        rng = random.Random(seed)
        self._mode: Mode = mode or MODES[seed % len(MODES)]
        self._has_lookup = (self._mode == "lookup" or seed % 16 < 8) if lookup is None else lookup
        self._seed, self._rng = seed, rng
        self._rate = rng.choice(RATES) if rate is None else rate
        self._mute = (rng.choice(MUTES) if rng.random() < 0.2 else ()) if mute is None else mute
        self._tie = 0.1 if seed % 3 == 0 else 0.0
        drawn = rng.randint(3, 6) if is_crowded else rng.randint(1, 3)
        self._num_sessions = drawn if num_sessions is None else num_sessions
        self._live_s = LIVE_S * max(1.0, self._num_sessions / 6)
        self._draft_slots, self._target_slots = (rng.randint(1, self._num_sessions) for _ in range(2))
        self._contexts: dict[Role, int] = {"draft": rng.choice((96, 40)), "target": rng.choice((96, 40))}
        self._is_crowded = is_crowded
        self._row_limits = _row_limits(seed, (1.0, 1.0, 1.2) if is_crowded else (None, None, None, 1.0, 1.6))
        self._draft_s = rng.choice((5, 15, 60)) * UNIT_S
        self._ledger, self._runners = Ledger(), list[HashRunner]()
        self.counts: Counter[str] = Counter()
        """The incidents that the results report, and how much was speculated."""
        self.ended_s = 0.0
        """When the last request had ended, in virtual time."""
        self.net: Net

    @property
    def _is_calm(self) -> bool:
        """Whether nothing can go wrong: then nothing may be reported either."""
        is_wide = self._draft_slots == self._target_slots == self._num_sessions
        has_memory = not any(self._row_limits.values())
        return self._rate == 0 and not self._mute and is_wide and has_memory and self._draft_s > 50 * UNIT_S

    def run(self) -> None:
        """Run it.

        Raises:
            Violation: a property does not hold; its first word says which.
        """
        errors = _Errors()
        with errors, pytest.MonkeyPatch.context() as patch:
            # What engines measure decides what they wait for, so a real clock would make a run another one.
            patch.setattr(time, "perf_counter", _loop_s)
            most_rows = self._rng.choice((3, 64))
            for module in (engine_batch, draft_engine, target_engine):  # with 3, prompts are cut
                patch.setattr(module, "MOST_ROUND_ROWS", most_rows)
            patch.setattr(engine_slots, "HEADROOM_ROWS", 4)  # as short as the slots, so that sessions meet
            try:
                run_virtual(self._main)
            except Violation:
                raise
            except VirtualTimeError as error:
                raise Violation(f"live: {error}") from error
            except SpecSplitError as error:
                raise Violation(f"live: a request failed with {type(error).__name__}: {error}") from error
            except Exception as error:
                raise Violation(f"error: {error!r}") from error
        _require(not errors.messages, f"error: logged: {errors.messages}")

    async def _main(self) -> None:
        self.net = net = Net(self._rng, rate=self._rate)
        owner = self._build()
        for host in (self._draft, self._target):
            net.spawn(host.trouble(lambda: list(self._ledger.accounts)), f"trouble of the {host.name}")
        served = [net.spawn(self._serve(owner, request), "request") for request in self._requests()]
        try:
            async with asyncio.timeout(net.quiet_s + self._live_s):
                results = await asyncio.gather(*served)
        except TimeoutError:
            raise Violation("live: a request did not end on a healthy network") from None
        self.ended_s = net.loop.time()
        await owner.aclose()
        await net.settle()
        self._check_books(results)
        await self._check_bounds()

    def _build(self) -> Orchestrator:
        net, rng, ledger = self.net, self._rng, self._ledger
        device = TimedDevice(net)
        ttl_s, grace_s = rng.choice((40, 6000)) * UNIT_S, rng.choice((0, 20)) * UNIT_S

        def draft() -> WatchedDraft:
            model = self._model("draft", self._draft_slots)
            engine = WatchedDraft(ledger, model, device, ttl_s=ttl_s, grace_s=grace_s, clock=LoopClock())
            engine.limit_steps(*_step_limits(self._seed))
            return engine

        def target() -> WatchedTarget:
            model = self._model("target", self._target_slots)
            engine = WatchedTarget(ledger, model, device, ttl_s=ttl_s, grace_s=grace_s, clock=LoopClock())
            engine.limit_steps(*_step_limits(self._seed))
            return engine

        self._draft, self._target = Host(net, "draft", draft), Host(net, "target", target)
        self._drafter = FaultyDrafter(net, self._draft, ledger, mute=self._mute)
        self._verifier = FaultyVerifier(net, self._target, ledger)
        return Orchestrator(
            self._verifier,
            self._drafter,
            LetterTokenizer(),
            Speculation(
                mode=self._mode,
                nodes=rng.randint(2, 10),
                depth=rng.randint(1, 6),
                branching=rng.choice((1, 2, 3)),
                lookup=self._has_lookup,
            ),
            LoopClock(),
            retry_policy=RetryPolicy(retry_s=self._live_s, draft_s=self._draft_s, rng=rng),
        )

    def _model(self, role: Role, slots: int) -> LoadedModel:
        tie = self._tie if role == "target" else 0.0
        context, limit = self._contexts[role], self._row_limits[role]
        row_limit = None
        if limit is not None:  # with slots for all, so that rows are what is short
            slots, row_limit = self._num_sessions, int(limit * (context + NODE_LIMIT))
        model, runner = hash_model(
            role,
            max_sessions=slots,
            context=context,
            node_limit=NODE_LIMIT,
            tie=tie,
            seed=self._seed,
            row_limit=row_limit,
        )
        self._runners.append(runner)
        return model

    def _requests(self) -> list[Request]:
        """Return requests whose prompts begin alike."""
        rng = self._rng
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 9))]
        requests: list[Request] = []
        for number in range(self._num_sessions):
            own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 3, 20)))]
            requests.append(
                Request(
                    prompt_ids=(*prompt[: rng.randint(1, len(prompt))], *own),
                    max_new_tokens=rng.randint(20 if self._is_crowded else 1, 30),
                    sampling=rng.choice(SAMPLINGS),
                    seed=rng.randrange(1 << 64),
                    choice=number,
                    eos_ids=(rng.randrange(VOCAB_SIZE),) if rng.random() < 0.5 and not self._is_crowded else (),
                )
            )
        return requests

    async def _serve(self, owner: Orchestrator, request: Request) -> Result | None:
        """Have one request served, and its text checked; None where the client leaves before the end."""
        rng = self._rng
        await asyncio.sleep(rng.uniform(0, 4 if self._is_crowded else 40) * UNIT_S)
        try:
            async with asyncio.timeout(rng.uniform(1, 100) * UNIT_S if rng.random() < 0.1 else None) as patience:
                result = await owner.generate(request)
        except TimeoutError:
            _require(patience.expired(), "live: a timeout that nobody asked for")
            self.net.count("client left")
            return None
        self.net.note(f"request {request.choice} ended: {result.finish_reason}, {len(result.token_ids)} tokens")
        self._check_text(request, result)
        return result

    def _check_text(self, request: Request, result: Result) -> None:
        """Check that it is plain decoding's text; with near ties, that every token is one of the two tied picks."""
        text, eos_ids = result.token_ids, request.eos_ids or ()
        params = SessionParams(request.sampling, result.seed, request.choice, len(request.prompt_ids), eos_ids)
        _require((result.exactness == "bits") == (not self._tie), f"exactness: {result.exactness}")
        models = (target_logits,) if result.exactness == "bits" else (target_logits, tied_logits)
        truths = [picks_along(params, request.prompt_ids, text, logits) for logits in models]
        _require(
            all(any(truth[index] == token for truth in truths) for index, token in enumerate(text)),
            f"output: not plain decoding's text: {text} and not {truths[0]}",
        )
        ends = [index for index, token in enumerate(text, 1) if token in eos_ids]
        _require(ends in ([], [len(text)]), "output: it goes on behind its end")
        room = min(request.max_new_tokens, self._contexts["target"] - len(request.prompt_ids))
        is_whole = result.finish_reason == "stop" if ends else len(text) == room
        _require(is_whole, "output: it ends too early")

    def _check_books(self, results: Sequence[Result | None]) -> None:
        violations = self._ledger.violations + [v for runner in self._runners for v in runner.violations]
        _require(not violations, "; ".join(map(str, violations)))
        _require(not self.net.failures, f"error: outside the error tree: {self.net.failures}")
        for account in self._ledger.accounts.values():
            result = results[account.openings["target"].choice]
            if result is not None:
                self._check_report(account, result)

    def _check_report(self, account: Account, result: Result) -> None:
        """Check that the result says went wrong what was seen to go wrong on its links, to the token."""
        self.counts.update(f"{resync.worker} {resync.reason}" for resync in result.resyncs)
        self.counts.update(f"{phase.worker} {phase.reason}" for phase in result.degraded)
        self.counts["accepted"] += result.speculative_decoding.num_accepted_draft_tokens
        self.counts["tokens"] += len(result.token_ids)
        reported = [(resync.worker, resync.round, resync.reason, resync.num_tokens) for resync in result.resyncs]
        seen = account.resyncs[: account.num_reported]
        is_streamed = account.is_streamed or self._mode == "stream"
        if is_streamed:  # an epoch may begin as a matter of course
            is_true = True
        elif self._mode in ("pingpong", "lookup"):  # a propose that nobody waits for any more may end a round later
            is_true = len(reported) == len(seen) and _agree(reported, seen, len(seen))
        else:
            is_true = _agree(reported, account.resyncs, account.num_reported)
        _require(is_true, f"report: resyncs {reported}, and {seen} were seen")
        without_draft, without_target = _rounds(result, "draft"), _rounds(result, "target")
        _require(account.failed_rounds <= without_target, "report: a round without the target is not said")
        # Pings belong to no session: round 0 may have waited for the first one, a round that lost its slot for another.
        asked_again = {0} | account.failed_rounds | {number for role, number, *_ in seen if role == "target"}
        _require(without_target <= asked_again, "report: the target answered, and is said not to have")
        _require(
            self._has_lookup or is_streamed or all(account.num_nodes[number] == 0 for number in without_draft),
            "report: a round had a tree, and is said to have had no draft",
        )
        if self._is_calm:
            _require(not reported and not result.degraded, f"report: {result.degraded} and {reported} of a calm run")

    async def _check_bounds(self) -> None:
        """Check that after the time to live nothing is left, also of sessions that lost their client."""
        await asyncio.sleep(LONG_S)
        for host in (self._draft, self._target):
            for engine in host.engines:
                await engine.sweep()
                held = engine.statistics()
                left = held.sessions.num_sessions, held.sessions.num_slots_used, held.work.num_sessions
                _require(left == (0, 0, 0), f"bounded: the {host.name} keeps {left} sessions, slots, lines")
                memory = held.memory
                self.counts[f"{host.name} preempts"] += memory.num_preempted
                _require(memory.num_free == memory.num_rows, f"bounded: the {host.name} keeps rows: {memory}")
                engine.check_integrity()
        calls = self._drafter.calls_under_way + self._verifier.calls_under_way
        _require(calls == 0, f"bounded: {calls} calls are still under way")


def _agree(reported: Sequence[_Resync], seen: Sequence[_Resync], num_reported: int) -> bool:
    """Compare resyncs where the draft works while rounds end: it may be counted to the round before or after.

    A replay that was due when the last verdict came may never have been sent, or not have been reported.
    """
    if not num_reported <= len(reported) <= len(seen) + 1:
        return False
    pairs = list(zip(reported, seen, strict=False))
    return all(abs(a[1] - b[1]) <= (a[0] == "draft") and (a[0], *a[2:]) == (b[0], *b[2:]) for a, b in pairs)


def _rounds(result: Result, worker: str) -> set[int]:
    """Return the rounds in which a worker is said not to have done its part."""
    phases = [phase for phase in result.degraded if phase.worker == worker]
    return {number for phase in phases for number in range(phase.first_round, phase.last_round + 1)}


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def failure_of(seed: int) -> str | None:
    """Return which property the schedule breaks, None if they all hold."""
    try:
        Schedule(seed).run()
    except Violation as violation:
        return str(violation)
    return None


def main(seed: int) -> None:
    """Replay one schedule and print what happened."""
    schedule = Schedule(seed)
    try:
        schedule.run()
    finally:
        sys.stdout.write("\n".join([*schedule.net.trace, str(dict(schedule.net.counts)), ""]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
