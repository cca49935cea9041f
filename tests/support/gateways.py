"""A gateway as a user starts it: `specsplit serve` in a process of its own, over workers that it starts."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from tests.support.forked import ForkedProcess
from tests.support.processes import LIMIT_S, environment, start_from


class GatewayProcess:
    """One gateway; `ready` waits for its line, and `close` ends it with its workers.

    It is forked from a process that has the imports (see `forked`), or is a user's with the code of `tree`. A forked
    one runs `module`, which has the command line of `specsplit`.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        http: str = "127.0.0.1:0",
        tree: Path | None = None,
        module: str = "specsplit",
        **changes: str,
    ) -> None:
        self._log = folder / "gateway.err"
        words, env = ("serve", "--http", http, *arguments), environment(OMP_NUM_THREADS="1", **changes)
        with self._log.open("wb") as log:
            self.process = (
                ForkedProcess(module, *words, stdout=subprocess.PIPE, stderr=log, env=env)
                if tree is None
                else start_from(tree, words, env, log)
            )
        self._ready: dict[str, Any] | None = None

    @property
    def ready(self) -> dict[str, Any]:
        """The line that said that it serves."""
        if self._ready is None:
            assert self.process.stdout is not None
            late = threading.Timer(LIMIT_S, self.process.kill)
            late.start()
            line = self.process.stdout.readline()
            late.cancel()
            assert line, f"the gateway ended before it served: {self.stderr}"
            self._ready = json.loads(line)
        assert self._ready is not None
        return self._ready

    @property
    def url(self) -> str:
        return f"http://{self.ready['address']}"

    @property
    def stderr(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def worker_pid(self, role: str) -> int:
        """Return the process of a worker that it started last."""
        starts = (f"The {role} serves at ", "The target with its draft serves at ")
        lines = [line for line in self.stderr.splitlines() if line.startswith(starts)]
        return int(lines[-1].rstrip(".").rpartition(" ")[2])

    def stop(self) -> int:
        """Ask it to end; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)

    def close(self) -> None:
        """End it for good, whatever state it is in; its workers end with it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(LIMIT_S)
