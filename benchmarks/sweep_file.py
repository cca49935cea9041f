"""The results file of `sweep`: the lines of a `run`, each with the `point` of the grid that it belongs to.

A block, one round at one point, counts once all its lines are there. Knows lines; what they mean is others' business.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.results_file import SCHEMA, RunFile
from specsplit.core.defaults import DRAFTLESS
from specsplit.core.errors import InvalidRequest

Record = dict[str, Any]
KIND = "sweep"


@dataclass(slots=True)
class SweepFile:
    """What a file holds, or what has been measured; blocks that are not whole are left out."""

    path: Path
    header: Record
    blocks: list[list[Record]] = field(default_factory=list[list[Record]])
    """In the order in which they were measured: rounds, and in each all points."""
    summary: Record | None = None
    num_dropped: int = 0
    num_kept_bytes: int = 0

    @property
    def points(self) -> list[Record]:
        return self.header["points"]

    @property
    def _modes(self) -> list[str]:
        return list(self.header["systems"])

    @property
    def num_wanted(self) -> int:
        """Return how many blocks the whole sweep has."""
        return self.header["settings"]["num_rounds"] * len(self.points)

    @property
    def num_rounds(self) -> int:
        """Return the rounds that are whole at every point."""
        return len(self.blocks) // len(self.points)

    @property
    def is_whole(self) -> bool:
        return self.summary is not None

    @property
    def status(self) -> str:
        """Return a sentence for a file that is only part of a sweep, and nothing for a whole one."""
        if self.is_whole:
            return ""
        return (
            f"{self.path} is not whole: it has {len(self.blocks)} of {self.num_wanted} rounds at single points; "
            "the command that began it goes on with it."
        )

    def records(self, point: int) -> list[Record]:
        """Return the lines of the whole blocks of a point."""
        return [record for block in self.blocks for record in block if record["point"] == point]

    def run(self, point: int) -> RunFile:
        """Return what was measured at a point as the run that it is."""
        conditions = self.points[point]
        has_costs = conditions["concurrency"] == 1
        header = {
            **self.header,
            "settings": {**self.header["settings"], "temperature": conditions["temperature"]},
            "systems": {name: {**facts, "has_costs": has_costs} for name, facts in self.header["systems"].items()},
        }
        records: list[Record] = []
        for record in self.records(point):
            if record["kind"] == "costs":
                asked = record["uses_draft"]
                records += [{**record, "system": name} for name in self._modes if (name not in DRAFTLESS) == asked]
            elif record["kind"] == "sample":
                records.append(record)
        return results_file.assembled(None, header, records)

    def walls(self, point: int, system: str) -> list[list[tuple[float, int]]]:
        """Return seconds and new tokens of what ran at once at a point, [rounds][batches]."""
        rounds: dict[int, list[tuple[float, int]]] = {}
        for record in self.records(point):
            if record["kind"] == "batch" and record["system"] == system:
                rounds.setdefault(record["round"], []).append((record["wall_s"], record["num_tokens"]))
        return list(rounds.values())

    def block_size(self, point: int) -> int:
        """Return how many lines a whole block of a point has."""
        num_tasks, at_once = len(self.header["prompts"]["tasks"]), self.points[point]["concurrency"]
        num_costs = len({name not in DRAFTLESS for name in self._modes}) if at_once == 1 else 0
        return len(self._modes) * (num_tasks + num_tasks // at_once) + num_costs


def read(path: Path) -> SweepFile:
    """Return the whole blocks of a file, and its summary where it has one.

    Raises:
        InvalidRequest: there is no such file, it is no results file of `sweep`, or a line before its last is damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"The results file {path} cannot be read ({error.strerror}).", param="file") from error
    lines = content.split(b"\n")[:-1]  # what follows the last line feed is nothing, or was cut off
    try:
        header = json.loads(lines[0])
        if header["kind"] != KIND or header["schema"] != SCHEMA:
            raise KeyError(KIND)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise InvalidRequest(f"{path} is no results file of `sweep`.", param="file") from error
    found = SweepFile(path, results_file.completed(header), num_kept_bytes=len(lines[0]) + 1)
    try:
        _take(found, lines[1:])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise InvalidRequest(f"{path} is damaged in the middle; measure again.", param="file") from error
    return found


def _take(found: SweepFile, lines: Iterable[bytes]) -> None:
    """Take in the lines behind the first one."""
    block: list[Record] = []
    end = found.num_kept_bytes
    for line in lines:
        end += len(line) + 1
        record = json.loads(line)
        if record["kind"] == "summary":
            found.summary = record
            continue
        wanted = divmod(len(found.blocks), len(found.points))
        if (record["round"], record["point"]) != wanted:
            raise KeyError("a block that does not follow")
        block.append(record)
        if len(block) == found.block_size(record["point"]):
            found.blocks.append(block)
            block, found.num_kept_bytes = [], end
    found.num_dropped = len(block)
