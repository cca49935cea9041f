"""Made-up samples, lines and files of `run`, for the tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.limits import Costs
from benchmarks.results_file import ResultsFile, Writer
from benchmarks.systems import RunSample, Sample, from_record, to_record
from specsplit.orchestrator.request import RequestTimings, Result, SpeculativeDecoding
from specsplit.orchestrator.wire import Traffic, Wire

SPECULATIVE = SpeculativeDecoding(4, 16, 8, 5, (1, 1, 2), (4, 3), (3, 2))
"""Four rounds with trees, five accepted; with one round without a tree they gave ten tokens."""


def made_result(**changes: Any) -> Result:
    fields: dict[str, Any] = {
        "token_ids": tuple(range(11)),
        "text": "",
        "prompt_token_ids": (7,) * 10,
        "finish_reason": "length",
        "seed": 0,
        "mode": "pingpong",
        "timings": RequestTimings(0.1, 0.5, 20.0, draft_device_s=0.1, target_device_s=0.3),
        "speculative_decoding": SPECULATIVE,
        "num_rounds": 5,
        "target_forwards": 6,
        "draft_forwards": 10,
        "wire": Wire(6, Traffic(100, 50), Traffic(400, 550)),
    }
    return Result(**{**fields, **changes})


ARRIVALS = ((0.1, 1), (0.3, 2), (0.35, 1), (0.45, 3), (0.5, 1), (0.6, 3))


def made_sample(**changes: Any) -> Sample:
    result = made_result(**changes)
    return Sample(0.65, result.token_ids, result.timings.decode_s, result, ARRIVALS)


def stored_sample(
    number: int = 0, system: str = "pingpong", task: str = "a", sample: Sample | None = None
) -> RunSample:
    record = to_record(number, system, task, sample or made_sample(), 11)
    return from_record(json.loads(json.dumps(record)))


def made_header(num_rounds: int = 2, **systems: str | None) -> dict[str, Any]:
    tasks = [{"id": "a", "category": "code"}, {"id": "b", "category": "prose"}]
    return {
        "kind": "run",
        "schema": 1,
        "id": "made up",
        "settings": {"num_rounds": num_rounds, "temperature": 0},
        "systems": {n: {"where": "", "mode": mode, "has_costs": mode is not None} for n, mode in systems.items()},
        "prompts": {"sha256": "p", "tasks": tasks},
        "skipped": {},
    }


COSTS = Costs({1: 0.05, 2: 0.06, 4: 0.08, 8: 0.12}, 0.01, 0.02, 15)


def round_records(number: int, header: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of a whole round."""
    found: list[dict[str, Any]] = []
    for name, system in header["systems"].items():
        sample = made_sample() if system["mode"] else Sample(1.3, tuple(range(11)))
        found += [to_record(number, name, task["id"], sample, 11) for task in header["prompts"]["tasks"]]
        if system["has_costs"]:
            found.append({"kind": "costs", "round": number, "system": name, **asdict(COSTS)})
    return found


def made_file(header: dict[str, Any], records: list[dict[str, Any]]) -> ResultsFile:
    """Return whole rounds as a file would hold them."""
    found = ResultsFile(Path(), header)
    size = found.block_size(0)
    found.blocks = [records[first : first + size] for first in range(0, len(records), size)]
    return found


def clean_provenance() -> dict[str, Any]:
    """Return this checkout's provenance as if its changes were in a commit: only then does a measurement go on."""
    return {**environment.provenance(), "commit": "c0ffee", "has_uncommitted_changes": False}


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    with Writer(path) as writer:
        writer.cut(0)
        for record in records:
            writer.add(record)
    return path
