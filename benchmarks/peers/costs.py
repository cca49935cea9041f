"""t_v(n), t_d and r of the workers that a system uses, asked for through their ports.

The forwards are timed where they run, around the runner, so a worker elsewhere tells the same as one in this process.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable

from benchmarks.limits import ROWS, Costs
from benchmarks.statistics import median
from specsplit.assembly.workers import Workers
from specsplit.core.ports import Drafter, Verifier
from specsplit.core.types import ROOT, Budget, Proposal, SessionParams, Turn, prefix_hash

_REPEATS = 5
_NUM_PINGS = 7


async def measure(workers: Workers, context_tokens: int, *, travels: bool) -> Costs:
    """Measure every cost behind `context_tokens` committed tokens; medians of a few, after one that does not count."""
    verifier, drafter = workers.verifier, workers.drafter
    identity = await verifier.ping()
    vocab_size = min(identity.vocab_size, (await drafter.ping()).vocab_size if drafter else identity.vocab_size)
    context_tokens = max(1, min(context_tokens, identity.context - max(ROWS) - 1))
    committed = tuple((7 * index + 3) % vocab_size for index in range(context_tokens))
    rows = [count for count in ROWS if count - 1 <= identity.max_nodes]
    verify_s = await _verifies(verifier, committed, rows, vocab_size)
    level_s = await _level(drafter, committed, vocab_size) if drafter is not None else None
    pings = [verifier.ping, *([drafter.ping] if drafter is not None else [])]
    round_trip_s = sum([await round_trip(ping) for ping in pings]) if travels else 0.0
    return Costs(verify_s, level_s, round_trip_s, context_tokens)


def _turn(session: str, number: int, committed: tuple[int, ...], token: int) -> Turn:
    """Return the turn of round `number`: `committed` lies in the slot from round 1 on, and one token follows it."""
    if number == 0:
        return Turn(session, 1, 0, 0, 0, (*committed, token), SessionParams(prompt_length=len(committed)))
    return Turn(session, 1, number, len(committed), prefix_hash(committed), (token,), None)


async def _verifies(
    verifier: Verifier, committed: tuple[int, ...], rows: list[int], vocab_size: int
) -> dict[int, float]:
    """Return t_v by rows: the last token and rows - 1 siblings below it."""
    session, number, first_node = secrets.token_hex(8), 0, 1
    times: dict[int, list[float]] = {count: [] for count in rows}
    try:
        await verifier.verify(_turn(session, 0, committed, 1), Proposal(1, len(committed)))
        for repeat in range(_REPEATS + 1):
            for count in rows:
                number += 1
                tokens = tuple((index + number) % vocab_size for index in range(count - 1))
                tree = Proposal(first_node, len(committed), tokens, (ROOT,) * len(tokens), (0.0,) * len(tokens))
                # Another token than last time, or the slot would hold it already.
                timings = (await verifier.verify(_turn(session, number, committed, number % 2), tree)).timings
                first_node += len(tokens)
                assert timings.num_tokens == count, f"{timings.num_tokens} rows were forwarded, not {count}"
                if repeat:
                    times[count].append(timings.device_ms / 1e3)
    finally:
        await verifier.close(session)
    return {count: median(values) for count, values in times.items()}


async def _level(drafter: Drafter, committed: tuple[int, ...], vocab_size: int) -> float:
    """Return t_d: the forward that one more token needs."""
    session, times = secrets.token_hex(8), []
    try:
        for number in range(_REPEATS + 2):
            turn = _turn(session, number, committed, number % 2)
            timings = (await drafter.propose(turn, number, Budget(1, 1, 1))).timings
            if number > 1:
                assert timings.num_forwards == 1, f"one level took {timings.num_forwards} forwards"
                times.append(timings.device_ms / 1e3)
    finally:
        await drafter.close(session)
    return median(times)


async def round_trip(ping: Callable[[], Awaitable[object]]) -> float:
    """Return the median time of a ping."""
    times: list[float] = []
    for _ in range(_NUM_PINGS):
        start_s = time.perf_counter()
        await ping()
        times.append(time.perf_counter() - start_s)
    return median(times)
