"""A worker of ours in a process of its own. Knows its command line and its ready line, nothing of what it serves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from specsplit.core.errors import ResourceError

ANY_PORT = "127.0.0.1:0"


class WorkerProcess:
    """`specsplit` with these arguments, on a free port unless `listen` names one, from its ready line to `end`.

    `program` tells Python what to run, and `options` go to Popen.
    """

    def __init__(
        self, *arguments: str, listen: str = ANY_PORT, program: Sequence[str] = ("-m", "specsplit"), **options: Any
    ) -> None:
        self._command = arguments[0]
        # A session of its own: Ctrl-C is for the benchmark, which ends its workers when it has finished a run.
        quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        command = [sys.executable, *program, *arguments, "--listen", listen]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **(quiet | options))

    def wait_ready(self) -> str:
        """Return the address once it serves.

        Raises:
            ResourceError: it ended instead.
        """
        return str(self.read_line()["address"])

    def read_line(self) -> dict[str, object]:
        """Return the next line that it prints.

        Raises:
            ResourceError: it ended instead.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ResourceError(
                f"A worker process ended before it served; run `specsplit {self._command}` by hand to see why."
            )
        return json.loads(line)

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> None:
        """Tell it to stop and wait until it has."""
        self.process.terminate()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
