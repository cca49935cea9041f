"""The results file of a run: whole JSON lines, one per sample, written as soon as they are there.

Knows what makes a round whole; what the numbers mean is others' business. See results/README.md for the lines.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from benchmarks.limits import Costs
from benchmarks.samples import RunSample, from_record
from specsplit.core.errors import InvalidRequest, InvalidSettings, ResourceError

SCHEMA = 1
_SETTINGS_OF_OLDER_FILES = {"lookup": True}
"""What settings that a file does not name were when it was written."""
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunFile:
    """What a file holds; rounds that are not whole are left out."""

    path: Path
    header: Record
    samples: dict[str, list[list[RunSample]]]
    """[rounds][tasks] by system."""
    costs: dict[str, list[Costs]]
    """[rounds] by system, for those that have any."""
    summary: Record | None
    num_dropped: int
    """Lines that belong to no whole round, a torn last one included."""
    num_kept_bytes: int
    """Up to the end of the last whole round."""

    @property
    def num_rounds(self) -> int:
        return len(next(iter(self.samples.values()), []))

    @property
    def is_whole(self) -> bool:
        """Whether the run came to its end; a file without a summary is part of one."""
        return self.summary is not None

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

    @property
    def status(self) -> str:
        """Return a sentence for a file that is only part of a run, and nothing for a whole one."""
        if self.is_whole:
            return ""
        wanted = self.header["settings"]["num_rounds"]
        return (
            f"{self.path} is not whole: it has {self.num_rounds} of {wanted} rounds and no summary; "
            "the command that began it goes on with it."
        )


def read(path: Path) -> RunFile:
    """Return the whole rounds of a file, and its summary where it has one.

    Raises:
        InvalidRequest: there is no such file, it is no results file of `run`, or a line before its last is damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"The results file {path} cannot be read ({error.strerror}).", param="file") from error
    collected = _Collected(path)
    offset = 0
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        offset += len(line) + 1
        if number == len(lines):  # what follows the last line feed: nothing, or a line that was cut off
            collected.num_open += bool(line)
        elif line:
            collected.take(number, line, offset)
    return collected.done()


def completed(header: Record) -> Record:
    """Return the first line of a file with the settings that did not exist yet when it was written."""
    return {**header, "settings": {**_SETTINGS_OF_OLDER_FILES, **header["settings"]}}


def assembled(begun: RunFile | None, header: Record, records: Iterable[Record]) -> RunFile:
    """Return a run as its file would be read: what was `begun`, and the records that were measured since."""
    collected = _Collected(begun.path if begun is not None else Path())
    collected.header = begun.header if begun is not None else header
    if begun is not None:
        for number in range(begun.num_rounds):
            samples = {(name, each.task): each for name, rounds in begun.samples.items() for each in rounds[number]}
            collected.rounds.append((samples, {name: costs[number] for name, costs in begun.costs.items()}))
    for record in records:
        collected.keep(record["kind"], record, 0)
    return collected.done()


@dataclass(slots=True)
class _Collected:
    """What the lines so far amount to."""

    path: Path
    header: Record | None = None
    summary: Record | None = None
    rounds: list[tuple[dict[tuple[str, str], RunSample], dict[str, Costs]]] = field(default_factory=list)
    samples: dict[tuple[str, str], RunSample] = field(default_factory=dict)
    costs: dict[str, Costs] = field(default_factory=dict)
    num_open: int = 0
    num_kept_bytes: int = 0

    def take(self, number: int, line: bytes, end: int) -> None:
        try:
            record = json.loads(line)
            kind = record["kind"]
            if (self.header is None) != (kind == "run"):
                raise KeyError(kind)
            self.keep(kind, record, end)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if self.header is None:
                raise InvalidRequest(f"{self.path} is no results file of `run`.", param="file") from error
            raise InvalidRequest(f"Line {number} of {self.path} is damaged; measure again.", param="file") from error

    def keep(self, kind: str, record: Record, end: int) -> None:
        """Take in a record whose last byte is before `end`."""
        if kind == "run":
            if record["schema"] != SCHEMA:
                raise InvalidRequest(f"{self.path} has schema {record['schema']}, not {SCHEMA}.", param="file")
            self.header = completed(record)
            self.num_kept_bytes = end
        elif kind == "summary":
            self.summary = record
        elif kind in ("sample", "costs"):
            self._add(kind, record)
            if self._is_round_whole():
                self.rounds.append((self.samples, self.costs))
                self.samples, self.costs = {}, {}
                self.num_open, self.num_kept_bytes = 0, end
        else:
            raise KeyError(kind)

    def _add(self, kind: str, record: Record) -> None:
        if record["round"] != len(self.rounds):
            raise KeyError("a round that does not follow")
        if kind == "sample":
            sample = from_record(record)
            self.samples[sample.system, sample.task] = sample
        else:
            self.costs[record["system"]] = Costs.from_dict(record)
        self.num_open += 1

    def _is_round_whole(self) -> bool:
        assert self.header is not None
        systems: Record = self.header["systems"]
        num_costs = sum(system["has_costs"] for system in systems.values())
        num_tasks = len(self.header["prompts"]["tasks"])
        return len(self.samples) == len(systems) * num_tasks and len(self.costs) == num_costs

    def done(self) -> RunFile:
        if self.header is None:
            raise InvalidRequest(f"{self.path} holds no run.", param="file")
        systems: Record = self.header["systems"]
        tasks = [task["id"] for task in self.header["prompts"]["tasks"]]
        return RunFile(
            path=self.path,
            header=self.header,
            samples={
                system: [[samples[system, task] for task in tasks] for samples, _ in self.rounds] for system in systems
            },
            costs={
                system: [costs[system] for _, costs in self.rounds]
                for system, facts in systems.items()
                if facts["has_costs"]
            },
            summary=self.summary,
            num_dropped=self.num_open,
            num_kept_bytes=self.num_kept_bytes,
        )


class Writer:
    """Appends whole lines to a file, for the length of a `with` block; without a path it writes nothing.

    What is in the file behind `keep_bytes` is dropped when it is opened: rounds that are measured again.

    Raises:
        InvalidSettings: the file cannot be written, or another run is writing to it.
    """

    def __init__(self, path: Path | None, keep_bytes: int = 0) -> None:
        self._path, self._keep_bytes = path, keep_bytes
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        if self._path is None:
            return self
        try:
            self._file = self._path.open("ab", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(OSError):  # what is no plain file has nothing to drop
                os.ftruncate(self._file.fileno(), self._keep_bytes)
        except BlockingIOError as error:
            self.__exit__(None, None, None)
            raise InvalidSettings(f"Another run is writing to {self._path}; give this one another --output.") from error
        except OSError as error:
            raise InvalidSettings(
                f"The results file {self._path} cannot be written ({error.strerror}); check --output."
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

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
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), end)
            raise ResourceError(
                f"The results file {self._path} cannot be written ({error.strerror}). It keeps its whole rounds: make "
                "room and give the same command to go on."
            ) from error
