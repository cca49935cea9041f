"""A draft worker that has done its imports and waits for a line, so that it then starts as fast as it can."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from benchmarks.processes import WorkerProcess

_HELD = """
import json, sys
import specsplit.assembly.serving, specsplit.cli.serve, specsplit.model.loader, specsplit.rpc.server
print(json.dumps({"event": "held"}), flush=True)
if sys.stdin.readline():  # nothing where whoever holds it has ended
    from specsplit.cli.main import main
    sys.exit(main())
"""
"""The command line, its slow imports done, waiting for a line: what is left takes no longer than loading the model."""


class HeldProcess(WorkerProcess):
    """A worker that does nothing before `release` but import."""

    def __init__(self, arguments: Sequence[str], listen: str) -> None:
        super().__init__(*arguments, listen=listen, program=("-c", _HELD), stdin=subprocess.PIPE)
        self.read_line()

    def release(self) -> None:
        """Let it begin."""
        assert self.process.stdin is not None, "a pipe"
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
