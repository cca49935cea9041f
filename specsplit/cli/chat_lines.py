"""The lines that a user types into a chat, or that come through a pipe; waiting for one can be given up."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from specsplit.cli import render

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

ReadLine = Callable[[], Coroutine[Any, Any, str]]


def line_reader() -> ReadLine:
    """Return what reads the next line: with history and editing on a terminal, from the pipe otherwise.

    It raises EOFError at the end, and is cancelled where Ctrl-C comes as a key.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            from prompt_toolkit import PromptSession
        except ModuleNotFoundError:
            render.dim_note("For history and editing: pip install 'specsplit[chat]'.")
        else:
            return _edited(PromptSession("> "))
    return _PlainLines("> " if sys.stdin.isatty() else "").next


def _edited(session: PromptSession[str]) -> ReadLine:
    async def read() -> str:
        try:
            # It would take the signal's handler away at the end of each line.
            return await session.prompt_async(handle_sigint=False)
        except KeyboardInterrupt:
            # Out of a task it would end the loop.
            raise asyncio.CancelledError from None

    return read


class _PlainLines:
    """Lines of stdin, each read on a thread that nothing waits for: a read cannot be broken off."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        # With a buffer of its own: that of sys.stdin is closed at exit, which aborts while a thread reads from it.
        source = sys.stdin
        # Bytes that are no text end no chat: whoever gets the line refuses it.
        self._file = open(source.fileno(), encoding=source.encoding, errors="surrogateescape", closefd=False)  # noqa: SIM115
        self._coming: asyncio.Future[str] | None = None
        """The line that is being read; it outlives a wait that was given up."""

    async def next(self) -> str:
        """Return the next line.

        Raises:
            EOFError: there is none.
        """
        sys.stderr.write(self._prompt)
        sys.stderr.flush()
        if self._coming is None:
            loop = asyncio.get_running_loop()
            self._coming = loop.create_future()
            threading.Thread(target=self._read, args=(loop, self._coming), name="specsplit-stdin", daemon=True).start()
        line = await asyncio.shield(self._coming)
        self._coming = None
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _read(self, loop: asyncio.AbstractEventLoop, coming: asyncio.Future[str]) -> None:
        # The loop is closed if the chat has ended meanwhile.
        with contextlib.suppress(RuntimeError):
            try:
                loop.call_soon_threadsafe(coming.set_result, self._file.readline())
            except (OSError, ValueError) as error:
                loop.call_soon_threadsafe(coming.set_exception, error)
