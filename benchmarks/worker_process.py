"""A worker of ours in a process of its own. Knows its command line and its ready line, nothing of what it serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from specsplit.core.errors import ResourceError

ANY_PORT = "127.0.0.1:0"
_HELD = """
import json, sys
import specsplit.assembly.serving, specsplit.cli.serve, specsplit.model.loader, specsplit.rpc.server
print(json.dumps({"event": "held"}), flush=True)
if sys.stdin.readline():  # nothing where whoever holds it has ended
    from specsplit.cli.main import main
    sys.exit(main())
"""
"""The command line, its slow imports done, waiting for a line: what is left takes no longer than loading the model."""


def environment_of(checkout: Path) -> dict[str, str]:
    """Return the environment in which Python imports `specsplit` from a checkout."""
    return {**os.environ, "PYTHONPATH": str(checkout)}


class WorkerProcess:
    """`specsplit` with these arguments, on a free port unless `listen` names one, from its ready line to `end`.

    One that is held does nothing before `release` but import: then it starts as fast as it can. `checkout` names the
    repository whose code runs, this one if left out.
    """

    def __init__(
        self, *arguments: str, listen: str = ANY_PORT, is_held: bool = False, checkout: Path | None = None
    ) -> None:
        self._command = arguments[0]
        way = ("-c", _HELD) if is_held else ("-m", "specsplit")
        # A session of its own: Ctrl-C is for the benchmark, which ends its workers when it has finished a run.
        self._process = subprocess.Popen(
            [sys.executable, *way, *arguments, "--listen", listen],
            stdin=subprocess.PIPE if is_held else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            cwd=checkout,
            env=environment_of(checkout) if checkout is not None else None,
        )
        if is_held:
            self._told()

    def release(self) -> None:
        """Let one that is held begin."""
        assert self._process.stdin is not None, "it is held"
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def wait_ready(self) -> str:
        """Return the address once it serves.

        Raises:
            ResourceError: it ended instead.
        """
        return str(self._told()["address"])

    def _told(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ResourceError(
                f"A worker process ended before it served; run `specsplit {self._command}` by hand to see why."
            )
        return json.loads(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End it as a crash does; `end` is still to come."""
        self._process.kill()

    def end(self) -> None:
        """Tell it to stop and wait until it has."""
        self._process.terminate()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
