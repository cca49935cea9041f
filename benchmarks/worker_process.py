"""A worker of ours in a process of its own. Knows its command line and its ready line, nothing of what it serves."""

from __future__ import annotations

import json
import subprocess
import sys

from specsplit.core.errors import ResourceError


class WorkerProcess:
    """`specsplit` with these arguments on a free port, from its ready line to `end`."""

    def __init__(self, *arguments: str) -> None:
        self._command = arguments[0]
        # A session of its own: Ctrl-C is for the benchmark, which ends its workers when it has finished a run.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "specsplit", *arguments, "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def wait_ready(self) -> str:
        """Return the address once it serves.

        Raises:
            ResourceError: it ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ResourceError(
                f"A worker process ended before it served; run `specsplit {self._command}` by hand to see why."
            )
        return str(json.loads(line)["address"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        """Tell it to stop and wait until it has."""
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
