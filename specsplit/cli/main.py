"""The entry of the command `specsplit`. Signals end it in good order even while the rest of it is imported."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

_SERVICES = ("serve", "draft", "target", "stage")
"""Commands that a signal ends with exit code 0 unless they have to cut answers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C.

    Without `arguments` it takes those of the process, and may change settings of the whole process.
    """
    if arguments is None:
        _obey_signals(is_service=sys.argv[1:2] in ([name] for name in _SERVICES))
    try:
        # Imported here, since it takes a fifth of a second.
        from specsplit.cli.commands import run

        return run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return 130


def _obey_signals(*, is_service: bool) -> None:
    """Let SIGTERM end the process at once, and SIGHUP a service, until the command handles them itself.

    The kernel gives process 1 of a container no default action, so a signal that came before would be lost for good.
    """

    def end(number: int, frame: FrameType | None) -> None:
        # Nothing has begun that wants an end in order, and an exception could be lost in a destructor.
        os._exit(0 if is_service else 128 + number)

    if not is_service and os.getpid() != 1:
        return  # the kernel's own way ends it even in the middle of a call
    for number in (signal.SIGTERM, signal.SIGHUP) if is_service else (signal.SIGTERM,):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
