"""The entry of the command `specsplit`. Ctrl-C ends it with a word even while the rest of it is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C.

    Without `arguments` it takes those of the process, and may change settings of the whole process.
    """
    try:
        # Imported here, since it takes a fifth of a second.
        from specsplit.cli.commands import run

        return run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return 130
