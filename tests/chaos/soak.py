"""`make soak`: a steady mixed load on a whole service, and whether any of its processes grows.

It fails if memory, descriptors, threads, sessions, slots or tasks of a process grow, if something is still held once
the load is over, or if a request fails.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

from tests.chaos.farm import Farm
from tests.chaos.load import Counts, fill, load
from tests.chaos.readings import KV_CACHE, MEMORY, Reading, read
from tests.chaos.slopes import slope_of

PERIOD_S = 10.0
LOOK_S, WINDOW_S, LEAST_SAMPLES = 2.0, 60.0, 3
LIMITS = {MEMORY: 1.0}
"""The growth in ten minutes that a quantity may have; a count may have LIMIT."""
LIMIT = 0.25
TOLD = (KV_CACHE,)
"""Quantities whose growth is told and not judged: they have a budget."""
HELD = ("descriptors", "sessions", "waiting", "slots", "work", "tasks")
"""Quantities that are the same whenever the service is at rest; warm slots are kept, and pools of threads fill up."""
REST_S = 20.0
RETRY_S = 120.0
"""Gateways wait so long for a worker that has no processor, since the machine does other work."""
Samples = list[tuple[float, Mapping[str, Reading]]]
"""Seconds since the start, and the readings of all processes."""


def main(arguments: Sequence[str]) -> int:
    """Run, print a table, write the report; return the exit code."""
    parser = ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=40.0, help="measured, behind the warm-up")
    parser.add_argument("--warm-up", type=float, metavar="MINUTES", help="before them (half as many, at most 20)")
    parser.add_argument("--requests-per-s", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, default=Path("soak.json"))
    chosen = parser.parse_args(arguments)
    # A process holds what forwards of every number of rows need once there was one of each, which takes a while.
    warm_up = min(20.0, chosen.minutes / 2) if chosen.warm_up is None else chosen.warm_up
    lengths_s = (warm_up * 60, chosen.minutes * 60)
    found = asyncio.run(run(lengths_s, chosen.requests_per_s, chosen.seed))
    chosen.report.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(_table(found) + f"\nEvery sample stands in {chosen.report}.\n")
    return 0 if found["is_well"] else 1


async def run(lengths_s: tuple[float, float], requests_per_s: float, seed: int) -> dict[str, Any]:
    """Return the report of a load of so many seconds: warming up, and measured every PERIOD_S."""
    rng, counts, samples = random.Random(seed), Counts(), Samples()
    with tempfile.TemporaryDirectory(prefix="specsplit-soak-") as folder:
        async with Farm(Path(folder), is_fresh=True, retry_s=RETRY_S) as farm:
            began_s = time.monotonic()
            await fill(farm.gateway.url, rng, counts)
            await load(farm.gateway.url, rng, requests_per_s, lengths_s[0], counts)
            before = await _at_rest(farm)
            sampling = asyncio.create_task(_sample(farm, began_s, min(WINDOW_S, lengths_s[1] / 4), samples))
            loading = asyncio.create_task(load(farm.gateway.url, rng, requests_per_s, lengths_s[1], counts))
            await asyncio.wait({loading, sampling}, return_when=asyncio.FIRST_COMPLETED)
            if sampling.done():
                loading.cancel()
                sampling.result()  # it has failed
            sampling.cancel()
            await loading
            left = _still_held(before, await _at_rest(farm))
            seconds = time.monotonic() - began_s
    if len(samples) < LEAST_SAMPLES:
        raise SystemExit(f"{len(samples)} samples say nothing; measure for more --minutes.")
    slopes = _slopes(samples)
    growing = [each for each in slopes if each["verdict"] == "grows" and each["quantity"] not in TOLD]
    return {
        "seconds": round(seconds, 1),
        "warm_up_s": lengths_s[0],
        "num_samples": len(samples),
        "requests_by_kind": dict(counts.ended),
        "num_skipped": counts.num_skipped,
        "failures": dict(counts.failures),
        "still_held": left,
        "slopes": slopes,
        "is_well": not (counts.failures or left or growing),
        "samples": samples,
    }


async def _sample(farm: Farm, began_s: float, window_s: float, samples: Samples) -> None:
    """Read all processes for ever; one sample a period, whose MEMORY is the least of the last `window_s`.

    A growth raises the least as it raises all else, and what a forward takes for a moment is not in it.
    """
    looks: deque[Mapping[str, Reading]] = deque(maxlen=round(window_s / LOOK_S))
    while True:
        for _ in range(round(PERIOD_S / LOOK_S)):
            looks.append(await _read(farm))
            await asyncio.sleep(LOOK_S)
        if len(looks) < (looks.maxlen or 0):
            continue  # the least of fewer is more
        least = {part: min(look[part][MEMORY] for look in looks) for part in looks[-1]}
        sample = {part: {**reading, MEMORY: least[part]} for part, reading in looks[-1].items()}
        samples.append((round(time.monotonic() - began_s, 2), sample))
        sys.stderr.write(f"{samples[-1][0]:.0f} s\n")


async def _read(farm: Farm) -> Mapping[str, Reading]:
    pids, pages = farm.pids, farm.pages
    return {part: await read(pid, pages.get(part)) for part, pid in pids.items()}


async def _at_rest(farm: Farm) -> Mapping[str, Reading]:
    """Return what each process holds in the middle of REST_S seconds without a load.

    A moment may have more, or less: grpc's server lacks one of its own tasks for a moment after a call has come.
    """
    end_s, readings = time.monotonic() + REST_S, [await _read(farm)]
    while time.monotonic() < end_s:
        await asyncio.sleep(1.0)
        readings.append(await _read(farm))
    return {
        part: {name: median_low(each[part].get(name, value) for each in readings) for name, value in reading.items()}
        for part, reading in readings[-1].items()
    }


def _still_held(before: Mapping[str, Reading], after: Mapping[str, Reading]) -> dict[str, float]:
    """Return what a process at rest holds beyond what it held at rest before."""
    return {
        f"{part}: {name}": reading[name] - before[part][name]
        for part, reading in after.items()
        for name in HELD
        if name in reading and reading[name] > before[part][name]
    }


def _slopes(samples: Samples) -> list[dict[str, Any]]:
    """Return the line through each quantity of each process."""
    at_s = [at for at, _ in samples]
    found: list[dict[str, Any]] = []
    for part, first in samples[0][1].items():
        for name in first:
            values = [readings[part][name] for _, readings in samples]
            slope = slope_of(at_s, values)
            own = {"process": part, "quantity": name, "first": values[0], "last": values[-1], "most": max(values)}
            growth = {"per_10_minutes": slope.per_period, "half_width": slope.half_width}
            found.append({**own, **growth, "verdict": slope.verdict(LIMITS.get(name, LIMIT))})
    return found


def _table(found: Mapping[str, Any]) -> str:
    lines = [f"{'process':10}{'quantity':13}{'first':>9}{'last':>9}{'most':>9}  in 10 minutes"]
    for each in found["slopes"]:
        numbers = "".join(f"{each[name]:9.1f}" for name in ("first", "last", "most"))
        growth = f"{each['per_10_minutes']:+8.3f} +- {each['half_width']:.3f}"
        lines.append(f"{each['process']:10}{each['quantity']:13}{numbers}  {growth}  {each['verdict']}")
    sums = {
        name: found[name]
        for name in ("seconds", "requests_by_kind", "num_skipped", "failures", "still_held", "is_well")
    }
    return "\n".join(lines) + "\n" + json.dumps(sums, indent=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
