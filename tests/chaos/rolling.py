"""`make rolling`: every process of a service is restarted in turn under load, and no request fails.

A reader opens a connection for each request and goes to the other gateway only if nobody listens at the first; nothing
is tried again. First each role has two processes, then one, whose restarts requests wait for. `--previous` begins with
the code of another commit, so that workers and gateways of both serve together until the last restart.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.fleet import Fleet
from tests.chaos.readers import Kind, Notes, expected_texts, read_on
from tests.support.processes import ROOT

FLEETS = ("two", "one")
"""How many processes a role has; a fleet of one is restarted like one of two, and requests wait."""
NEW_CONNECTIONS = {"connection": "close"}


@dataclass(frozen=True)
class Wanted:
    """How much is to be done: requests at least, by so many readers, and restarts of each process."""

    num_requests: int
    num_readers: int = 4
    rounds: int = 1
    seed: int = 0


@dataclass
class Restarts:
    """What was restarted, and the exit codes that were not 0."""

    by_part: Counter[str] = field(default_factory=Counter[str])
    exit_codes: dict[str, int] = field(default_factory=dict[str, int])


def main(arguments: Sequence[str]) -> int:
    """Run, print the report and write it; return the exit code."""
    parser = ArgumentParser(prog="python -m tests.chaos.rolling", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="at least so many each with two of a role and one")
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--previous", metavar="COMMIT", help="first start everything from this commit's code")
    parser.add_argument("--only", choices=FLEETS, help="two processes of each role, or one; by default both in turn")
    parser.add_argument("--report", type=Path, default=Path("rolling.json"))
    chosen = parser.parse_args(arguments)
    wanted = Wanted(chosen.requests, chosen.readers, chosen.rounds, chosen.seed)
    found = asyncio.run(run(wanted, chosen.previous, [chosen.only] if chosen.only else FLEETS))
    chosen.report.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0 if all(each["is_well"] for each in found.values()) else 1


async def run(wanted: Wanted, previous: str | None = None, fleets: Sequence[str] = FLEETS) -> dict[str, dict[str, Any]]:
    """Return the reports of two processes a role, and of one."""
    expected = await asyncio.to_thread(expected_texts)
    with tempfile.TemporaryDirectory(prefix="specsplit-rolling-") as folder:
        tree = None if previous is None else code_of(previous, Path(folder) / "previous")
        found: dict[str, dict[str, Any]] = {}
        for name in fleets:
            (own := Path(folder) / name).mkdir()
            async with Fleet(own, has_replicas=name == "two", first_tree=tree) as fleet:
                found[f"{name} of a role"] = await _roll(fleet, expected, wanted)
    return found


def code_of(commit: str, folder: Path) -> Path:
    """Unpack the code of a commit, and return its folder."""
    folder.mkdir()
    archive = subprocess.run(["git", "-C", ROOT, "archive", commit], check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", folder], check=True, input=archive.stdout)
    return folder


async def _roll(fleet: Fleet, expected: Mapping[Kind, str], wanted: Wanted) -> dict[str, Any]:
    """Restart everything in turn under load, until enough requests were made, and return what readers noticed."""
    notes, restarts, has_ended, began_s = Notes(), Restarts(), asyncio.Event(), time.monotonic()
    readers = [
        asyncio.create_task(
            read_on(fleet.urls, expected, notes, has_ended, wanted.seed * 1000 + number, NEW_CONNECTIONS)
        )
        for number in range(wanted.num_readers)
    ]
    while min(restarts.by_part.values(), default=0) < wanted.rounds or notes.num_requests < wanted.num_requests:
        for part in fleet.parts:
            code = await fleet.restart(part)
            restarts.by_part[part] += 1
            if code:
                restarts.exit_codes[f"{part}, restart {restarts.by_part[part]}"] = code
            sys.stderr.write(
                f"{time.strftime('%H:%M:%S')} {part} restarted: {notes.num_right} texts, {dict(notes.failures)}\n"
            )
    has_ended.set()
    await asyncio.gather(*readers)
    num_failed = notes.num_requests - notes.num_right
    return {
        "seconds": round(time.monotonic() - began_s, 1),
        "restarts": dict(restarts.by_part),
        "exit_codes": restarts.exit_codes,
        "num_requests": notes.num_requests,
        "num_failed": num_failed,
        "num_went_to_the_other_gateway": notes.num_refused,
        "wrong": notes.wrong[:5],
        "failures_by_code": dict(notes.failures),
        "failures": notes.messages,
        "untyped": notes.untyped[:5],
        "longest_silence_s": round(max((length for _, length in notes.silences), default=0.0), 2),
        "is_well": num_failed == 0 and not restarts.exit_codes and not notes.wrong,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
