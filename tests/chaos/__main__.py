"""`make chaos`: faults at random moments on every part of a service under load, and what its readers noticed of each.

It fails if a text was wrong, if a reader was left without a word for SILENT_S, if a failure had no type, or if the
staged target was without its chain for CHAIN_S while nothing happened to it. A failure has a type if it is an answer
with a code, or if the fault that took the gateway away is why its connection was refused or broke.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.farm import PAIRS, STAGED, STAGES, Farm, Fault
from tests.chaos.readers import Notes, expected_texts, read_on

SILENT_S = 5.0
CHAIN_S = 10.0
_MOST_AT_ONCE = 2
_LOOK_S = 0.25


def main(arguments: Sequence[str]) -> int:
    """Run, print a summary, write the report; return the exit code."""
    parser = ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=3.0, metavar="S", help="mean seconds from one fault to the next")
    parser.add_argument("--often", default="", metavar="KIND", help="the first word of what half of the faults are")
    parser.add_argument("--readers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, default=Path("chaos.json"))
    chosen = parser.parse_args(arguments)
    found = asyncio.run(run(chosen.minutes * 60, chosen.every, chosen.readers, chosen.seed, chosen.often))
    chosen.report.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    shown = {name: value for name, value in found.items() if name != "faults"}
    sys.stdout.write(json.dumps(shown, indent=1) + f"\nEvery fault stands in {chosen.report}.\n")
    return 0 if found["is_well"] else 1


async def run(length_s: float, every_s: float, num_readers: int, seed: int, often: str = "") -> dict[str, Any]:
    """Return the report of so many seconds of faults and readers."""
    expected, notes, happened = await asyncio.to_thread(expected_texts), Notes(), list[dict[str, Any]]()
    stalls, without_chain = [0.0], [0.0]
    with tempfile.TemporaryDirectory(prefix="specsplit-chaos-") as folder:
        async with Farm(Path(folder), often=often) as farm:
            has_ended, began_s = asyncio.Event(), time.monotonic()
            urls, seeds = [farm.gateway.url], range(seed * 1000, seed * 1000 + num_readers)
            async with asyncio.TaskGroup() as watching:
                watches = [
                    watching.create_task(each) for each in (_measure_stalls(stalls), _watch_chain(farm, without_chain))
                ]
                async with asyncio.TaskGroup() as reading:
                    for own in seeds:
                        reading.create_task(read_on(urls, expected, notes, has_ended, own, outage=lambda: farm.outage))
                    await _disturb(farm, random.Random(seed), began_s + length_s, every_s, notes, happened)
                    has_ended.set()
                for watch in watches:
                    watch.cancel()
    longest_s = max((length for _, length in notes.silences), default=0.0)
    pairs = Counter(f"{each['kind']} {each['part']}" for each in happened)
    is_typed = not (notes.untyped or notes.num_unexplained)
    is_prompt = longest_s <= SILENT_S and max(without_chain) <= CHAIN_S
    return {
        "seconds": round(time.monotonic() - began_s, 1),
        "num_faults": len(happened),
        "faults_by_kind": dict(Counter(each["kind"] for each in happened)),
        "faults_by_part": dict(Counter(each["part"] for each in happened)),
        "never_happened": [f"{kind} {part}" for kind, part in PAIRS if f"{kind} {part}" not in pairs],
        "num_right": notes.num_right,
        "num_wrong": len(notes.wrong),
        "wrong": notes.wrong[:5],
        "failures_by_code": dict(notes.failures),
        "failures": notes.messages,
        "untyped": notes.untyped[:5],
        "num_refused_without_reason": notes.num_unexplained,
        "longest_silence_s": round(longest_s, 2),
        "longest_own_stall_s": round(max(stalls), 2),
        "num_silences": sum(length > SILENT_S for _, length in notes.silences),
        "longest_without_chain_s": round(max(without_chain), 2),
        "is_well": is_typed and is_prompt and not notes.wrong and notes.num_right > 0,
        "faults": happened,
    }


async def _measure_stalls(stalls: list[float]) -> None:
    """Note for how long this process, readers and network, did nothing: a silence as long as that tells nothing."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + _LOOK_S
        await asyncio.sleep(_LOOK_S)
        stalls.append(loop.time() - due_s)


async def _watch_chain(farm: Farm, lengths: list[float]) -> None:
    """Note for how long the staged target has had no chain since the last fault that took it away was over."""
    loop = asyncio.get_running_loop()
    since_s = loop.time()

    def is_hit() -> bool:
        return not farm.hit.isdisjoint((STAGED, *STAGES))

    while True:
        await asyncio.sleep(_LOOK_S)
        if is_hit() or await farm.has_chain() or is_hit():
            since_s = loop.time()
        lengths.append(loop.time() - since_s)


async def _disturb(
    farm: Farm, rng: random.Random, end_s: float, every_s: float, notes: Notes, happened: list[dict[str, Any]]
) -> None:
    """Let faults happen until the end, at most two at once and never two to one part."""
    async with asyncio.TaskGroup() as running:
        while time.monotonic() < end_s:
            await asyncio.sleep(min(rng.expovariate(1 / every_s), max(0.0, end_s - time.monotonic())))
            if len(farm.hit) < _MOST_AT_ONCE and (fault := farm.draw(rng)) is not None:
                running.create_task(_happen(farm, fault, notes, happened))
                await asyncio.sleep(0)  # it has begun


async def _happen(farm: Farm, fault: Fault, notes: Notes, happened: list[dict[str, Any]]) -> None:
    began_s, failures, num_right = time.monotonic(), notes.failures.copy(), notes.num_right
    await farm.happen(fault)
    lengths = [length for at_s, length in notes.silences if at_s >= began_s]
    happened.append(
        {
            "kind": fault.kind,
            "part": fault.part,
            "lasted_s": round(time.monotonic() - began_s, 2),
            "texts_meanwhile": notes.num_right - num_right,
            "failures_meanwhile": dict(notes.failures - failures),
            "longest_silence_s": round(max(lengths, default=0.0), 2),
        }
    )
    sys.stderr.write(f"{len(happened)} faults, {notes.num_right} texts: {fault}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
