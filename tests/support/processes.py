"""The command line in processes of its own: real workers over loopback, to be used, stopped and killed by tests."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.forked import ROOT, ForkedProcess

LIMIT_S = 120
"""Nothing takes longer, however busy the machine, so a test that waits so long waits in vain."""
SILENT_S = 45
"""By then a keepalive has found a silent peer; without keepalives gRPC takes a minute (ADR 0004)."""


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a user with no settings of our own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPECSPLIT_")}
    return {**inherited, "PYTHONPATH": str(ROOT), "TERM": "xterm", **changes}


def command(*arguments: str) -> list[str]:
    """Return what runs `specsplit` with `arguments`."""
    return [sys.executable, "-m", "specsplit", *arguments]


def start(*arguments: str, stdin: int | None = None, **changes: str) -> ForkedProcess:
    """Start `specsplit` with stdout and stderr in pipes."""
    pipe = subprocess.PIPE
    return ForkedProcess("specsplit", *arguments, env=environment(**changes), stdin=stdin, stdout=pipe, stderr=pipe)


def run(*arguments: str, stdin: bytes = b"", **changes: str) -> tuple[int, str, str]:
    """Run `specsplit` to its end; return exit code, stdout and stderr."""
    process = start(*arguments, stdin=subprocess.PIPE, **changes)
    out, err = process.communicate(stdin, LIMIT_S)
    return process.wait(), out.decode(), err.decode()


def start_from(
    tree: Path, arguments: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start `specsplit` as a user does, with the code that lies in `tree`."""
    places = {**env, "PYTHONPATH": str(tree)}
    return subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=stderr, env=places, cwd=tree)


class WorkerProcess:
    """A worker of the embedded pair; it keeps its port over restarts. Starting does not wait, `address` does.

    It is forked from a process that has the imports (see `forked`); if it `is_fresh`, its first start is a user's, with
    the code of `tree`.
    """

    def __init__(self, role: str, folder: Path, *arguments: str, is_fresh: bool = False, tree: Path = ROOT) -> None:
        self.role = role
        self._is_fresh, self._tree = is_fresh, tree
        self._folder = folder
        self._arguments = arguments
        self._listen = "127.0.0.1:0"
        self._ready: dict[str, Any] | None = None
        self._num_starts = 0
        self.start()

    def start(self) -> None:
        """Start it, the first time or after its end."""
        self._num_starts += 1
        self._ready = None
        with self._log.open("wb") as log:
            arguments = (self.role, "--listen", self._listen, *self._arguments, "--trace-file", str(self.trace))
            env = environment(OMP_NUM_THREADS="1")
            self._process = (
                start_from(self._tree, arguments, env, log)
                if self._is_fresh and self._num_starts == 1
                else ForkedProcess("specsplit", *arguments, stdout=subprocess.PIPE, stderr=log, env=env)
            )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self._process, self._lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[bytes] | ForkedProcess, lines: queue.SimpleQueue[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        process.stdout.close()
        lines.put(b"")

    @property
    def trace(self) -> Path:
        """The spans of the latest start."""
        return self._folder / f"{self.role}-{self._num_starts}.jsonl"

    @property
    def _log(self) -> Path:
        return self._folder / f"{self.role}-{self._num_starts}.err"

    @property
    def stderr(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def ready(self) -> dict[str, Any]:
        """The line that said that it serves; waits for it."""
        if self._ready is None:
            line = self._lines.get(timeout=LIMIT_S)
            assert line, f"the {self.role} ended before it served: {self.stderr}"
            self._ready = json.loads(line)
            assert self._ready is not None
            self._listen = self._ready["address"]
        return self._ready

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End it as a crash would; its port is free afterwards."""
        self._process.kill()
        self._process.wait(timeout=LIMIT_S)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end; return its exit code."""
        self._process.send_signal(number)
        return self._process.wait(timeout=LIMIT_S)

    def rest_of_stdout(self) -> bytes:
        """Return what it wrote after the line that said that it serves; waits for its end."""
        rest = b""
        while line := self._lines.get(timeout=LIMIT_S):
            rest += line
        return rest

    def close(self) -> None:
        """End it for good, whatever state it is in."""
        if self._process.poll() is None:
            self.kill()
