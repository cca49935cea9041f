"""The results files of `run` and `sweep`: whole JSON lines, written as soon as they are there.

Knows what makes a block (one round at one point) whole; what the numbers mean is others' business. See
results/README.md for the lines. A `run` is a sweep of one point.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.limits import Costs, read_costs
from benchmarks.systems import RunSample, from_record
from specsplit.core.defaults import DRAFTLESS
from specsplit.core.errors import InvalidRequest, InvalidSettings, ResourceError

SCHEMA = 1
RUN, SWEEP = "run", "sweep"
_SETTINGS_OF_OLDER_FILES = {"lookup": True}
"""The values that settings had in files from before they were written down."""
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """The whole rounds of one point."""

    header: Record
    samples: dict[str, list[list[RunSample]]]
    """[rounds][tasks] by system."""
    costs: dict[str, list[Costs]]
    """[rounds] by system, for those that have any."""

    @property
    def num_rounds(self) -> int:
        return len(next(iter(self.samples.values()), []))

    @property
    def tasks(self) -> list[str]:
        return [task["id"] for task in self.header["prompts"]["tasks"]]

    @property
    def categories(self) -> dict[str, list[int]]:
        """Return the places of each category's tasks among `tasks`."""
        found: dict[str, list[int]] = {}
        for place, task in enumerate(self.header["prompts"]["tasks"]):
            found.setdefault(task["category"], []).append(place)
        return found


@dataclass(slots=True)
class ResultsFile:
    """The content of a file, or of a measurement under way; blocks that are not whole are left out."""

    path: Path
    header: Record
    blocks: list[list[Record]] = field(default_factory=list[list[Record]])
    """In the order in which they were measured: rounds, and in each all points."""
    summary: Record | None = None
    num_dropped: int = 0
    """Lines that belong to no whole block, a torn last one included."""
    num_kept_bytes: int = 0
    """Up to the end of the last whole block."""

    @property
    def points(self) -> list[Record]:
        """Return the conditions of each point."""
        alone = {"rtt_ms": 0.0, "concurrency": 1, "temperature": self.header["settings"].get("temperature", 0.0)}
        return self.header.get("points") or [alone]

    @property
    def num_wanted(self) -> int:
        """Return how many blocks the whole measurement has."""
        return self.header["settings"]["num_rounds"] * len(self.points)

    @property
    def num_rounds(self) -> int:
        """Return the rounds that are whole at every point."""
        return len(self.blocks) // len(self.points)

    @property
    def is_whole(self) -> bool:
        """Whether the measurement came to its end; a file without a summary is part of one."""
        return self.summary is not None and self.summary.get("is_complete", True)

    @property
    def status(self) -> str:
        """Return a sentence for a file that is only part of a measurement, and nothing for a whole one."""
        if self.is_whole:
            return ""
        at = " at single points" if len(self.points) > 1 else " and no summary"
        return (
            f"{self.path} is not whole: it has {len(self.blocks)} of {self.num_wanted} rounds{at}; "
            "the command that began it goes on with it."
        )

    @property
    def measured_points(self) -> list[int]:
        """Return the places of the points that have a whole round."""
        return list(range(min(len(self.blocks), len(self.points))))

    def _records(self, point: int, kind: str) -> list[Record]:
        return [
            record
            for block in self.blocks
            for record in block
            if record["kind"] == kind and record.get("point", 0) == point
        ]

    def run(self, point: int = 0) -> Run:
        """Return the whole rounds of a point."""
        conditions, systems = self.points[point], self.header["systems"]
        facts = {name: {**each, "has_costs": self._has_costs(each, conditions)} for name, each in systems.items()}
        settings = {**self.header["settings"], "temperature": conditions["temperature"]}
        header = {**self.header, "settings": settings, "systems": facts}
        tasks = [task["id"] for task in self.header["prompts"]["tasks"]]
        by_place: dict[tuple[str, str], list[RunSample]] = {}
        for record in self._records(point, "sample"):
            by_place.setdefault((record["system"], record["task"]), []).append(from_record(record))
        rounds = range(len(next(iter(by_place.values()), [])))
        samples = {name: [[by_place[name, task][number] for task in tasks] for number in rounds] for name in systems}
        return Run(header, samples, self._costs(point, facts))

    def _has_costs(self, system: Record, conditions: Record) -> bool:
        return system["has_costs"] if self.header["kind"] == RUN else conditions["concurrency"] == 1

    def _costs(self, point: int, systems: Record) -> dict[str, list[Costs]]:
        found: dict[str, list[Costs]] = {name: [] for name, facts in systems.items() if facts["has_costs"]}
        for record in self._records(point, "costs"):
            # A line of `sweep` is for all modes that ask a draft, or for all that do not.
            names = [record["system"]] if "system" in record else list(found)
            for name in names:
                if "system" in record or (name not in DRAFTLESS) == record["uses_draft"]:
                    found[name].append(read_costs(record))
        return found

    def walls(self, point: int, system: str) -> list[list[tuple[float, int]]]:
        """Return seconds and new tokens of the sessions that ran at once at a point, [rounds][batches]."""
        rounds: dict[int, list[tuple[float, int]]] = {}
        for record in self._records(point, "batch"):
            if record["system"] == system:
                rounds.setdefault(record["round"], []).append((record["wall_s"], record["num_tokens"]))
        return list(rounds.values())

    def block_size(self, point: int) -> int:
        """Return how many lines a whole block of a point has."""
        systems, num_tasks = self.header["systems"], len(self.header["prompts"]["tasks"])
        if self.header["kind"] == RUN:
            return len(systems) * num_tasks + sum(system["has_costs"] for system in systems.values())
        at_once = self.points[point]["concurrency"]
        num_costs = len({name not in DRAFTLESS for name in systems}) if at_once == 1 else 0
        return len(systems) * (num_tasks + num_tasks // at_once) + num_costs


def read(path: Path, kind: str = RUN) -> ResultsFile:
    """Return the whole blocks of a file of `run` or `sweep`, and its summary if it has one.

    Raises:
        InvalidRequest: there is no such file, it is of another kind, or a line before its last is damaged.
    """
    content = content_of(path)
    *lines, torn = content.split(b"\n")  # after the last line feed comes nothing, or a line that was cut off
    try:
        header = json.loads(lines[0])
        if header["kind"] != kind:
            raise KeyError(header["kind"])
        if header["schema"] != SCHEMA:
            raise InvalidRequest(f"{path} has schema {header['schema']}, not {SCHEMA}.", param="file")
        header["settings"] = {**_SETTINGS_OF_OLDER_FILES, **header["settings"]}
        found = ResultsFile(path, header, num_kept_bytes=len(lines[0]) + 1)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise InvalidRequest(f"{path} is no results file of `{kind}`.", param="file") from error
    open_block: list[Record] = []
    end = found.num_kept_bytes
    for number, line in enumerate(lines[1:], 2):
        end += len(line) + 1
        try:
            if line:
                open_block = _taken(found, open_block, json.loads(line), end)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(f"Line {number} of {path} is damaged; measure again.", param="file") from error
    found.num_dropped = len(open_block) + bool(torn)
    return found


def content_of(path: Path) -> bytes:
    """Return the bytes of a results file.

    Raises:
        InvalidRequest: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"The results file {path} cannot be read ({error.strerror}).", param="file") from error


_CHECKS: dict[str, Callable[[Record], object]] = {
    "sample": from_record,
    "costs": read_costs,
    "batch": lambda record: (record["wall_s"], record["num_tokens"]),
}
"""How a line is seen to be whole, by its kind."""


def _taken(found: ResultsFile, block: list[Record], record: Record, end: int) -> list[Record]:
    """Take in a line whose last byte is before `end`; return the block that it leaves open."""
    if record["kind"] == "summary":
        found.summary = record
        return block
    _CHECKS[record["kind"]](record)
    if (record["round"], record.get("point", 0)) != divmod(len(found.blocks), len(found.points)):
        raise KeyError("a block that does not follow")
    block.append(record)
    if len(block) < found.block_size(record.get("point", 0)):
        return block
    found.blocks.append(block)
    found.num_kept_bytes = end
    return []


class Writer:
    """Appends whole lines to a file, for the length of a `with` block; without a path it writes nothing.

    Raises:
        InvalidSettings: the file cannot be written, or another run is writing to it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        if self._path is None:
            return self
        try:
            self._file = self._path.open("ab", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.__exit__()
            raise InvalidSettings(f"Another run is writing to {self._path}; give this one another --output.") from error
        except OSError as error:
            raise InvalidSettings(
                f"The results file {self._path} cannot be written ({error.strerror}); check --output."
            ) from error
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def cut(self, keep_bytes: int) -> None:
        """Drop what lies behind so many bytes: lines of a block that is measured again."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a device such as /dev/full has nothing to drop
                os.ftruncate(self._file.fileno(), keep_bytes)

    def add(self, record: Mapping[str, object]) -> None:
        """Write one line, whole or not at all.

        Raises:
            ResourceError: there is no room for it, or the file cannot be written any more.
        """
        if self._file is None:
            return
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END) if self._file.seekable() else 0
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError as error:
            # A half line would look like a torn one only at the end of the file: take it back.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), end)
            raise ResourceError(
                f"The results file {self._path} cannot be written ({error.strerror}). It keeps its whole rounds: make "
                "room and give the same command to go on."
            ) from error
