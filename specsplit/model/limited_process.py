"""Keeps one process for work on files that others wrote: within limits of time and memory, killed when they are over.

The process is `specsplit.model.tokenizer_process`, which sets its own limits; here it is started, asked and replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, cast

from specsplit.core.errors import ResourceError

CALL_S = 5.0
"""Limit of one call. Chosen: a conversation of a megabyte takes a tenth of it."""
_SLACK_S = 30.0
"""Time beyond a limit after which the process is killed from here. It ends itself at the limit, which it counts without
its own start; this is for a machine that has other work to do, and for a process that was stopped."""
MAX_ANSWER_BYTES = 64 << 20
_EXIT_S = 1.0
"""Time from the end of its connection to that of the process."""
_MAX_REASON = 200
HEAD = struct.Struct(">I")
"""The length of a message, in front of it."""


class OverLimit(Exception):
    """The work took more time or memory than it may, or brought its process down."""


class LimitedProcess:
    """A process that answers one call at a time, for any number of threads; one that was killed is started again."""

    def __init__(self, limit_s: float = CALL_S) -> None:
        self.limit_s = limit_s
        self._set_up: list[tuple[Mapping[str, Any], float]] = []
        """The calls that every new process is sent first, and their limits in seconds."""
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def set_up(self, request: Mapping[str, Any], limit_s: float) -> Any:
        """Make a call that every later process is sent, too; raises as `call` does."""
        answer = self.call(request, limit_s)
        self._set_up.append((request, limit_s))
        return answer

    def call(self, request: Mapping[str, Any], limit_s: float | None = None) -> Any:
        """Return the answer to `request`, or raise what the process said instead.

        Raises:
            OverLimit: it needed more time or memory than it may have, or its process ended.
            Refused: the work itself said no.
            ResourceError: no process can be started.
        """
        with self._lock:
            try:
                if self._running is not None and self._running.has_ended:
                    self._end()
                if self._running is None:
                    self._running = _Running()
                    for earlier, earlier_s in self._set_up:
                        self._running.call(earlier, earlier_s)
                return self._running.call(request, self.limit_s if limit_s is None else limit_s)
            except Refused:
                raise
            except BaseException:
                # Also when interrupted: an answer that nobody took would be taken for that of the next call.
                self._end()
                raise

    def close(self) -> None:
        """End the process; a later call starts another."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()


def reason_of(error: BaseException) -> str:
    """Return an error's words on one line, without characters that would drive a terminal."""
    words = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
    return words[:_MAX_REASON].rstrip(".") or type(error).__name__


class Refused(Exception):
    """The work ended with an error of its own; the text is its reason, cleaned and cut."""


class _Running:
    """One process, from its start to its end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "specsplit.model.tokenizer_process"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # panics of the tokenizers library go there, and our sentence says it better
                env=environment,
                start_new_session=True,  # Ctrl-C is ours to hear
            )
        except OSError as error:
            ours.close()
            raise ResourceError(f"No process for the tokenizer can be started ({error.strerror}).") from error
        finally:
            theirs.close()
        self._socket = ours
        self._finalizer = weakref.finalize(self, _end, self._process, ours)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def call(self, request: Mapping[str, Any], limit_s: float) -> Any:
        """Return the answer; raises as `LimitedProcess.call` does."""
        content = json.dumps({**request, "limit_s": limit_s}).encode()
        end_s = time.monotonic() + limit_s + _SLACK_S
        try:
            self._socket.settimeout(limit_s + _SLACK_S)
            self._socket.sendall(HEAD.pack(len(content)) + content)
            (length,) = HEAD.unpack(self._read(HEAD.size, end_s))
            if length > MAX_ANSWER_BYTES:
                raise OverLimit("its answer is too long")
            answer = cast("dict[str, Any]", json.loads(self._read(length, end_s)))
        except TimeoutError as error:
            raise OverLimit(f"it took longer than {limit_s:g} s") from error
        except OSError as error:
            raise self._ended(limit_s) from error
        if "refused" in answer:
            raise Refused(answer["refused"])
        if "over" in answer:
            raise OverLimit(answer["over"])
        return answer["result"]

    def _read(self, length: int, end_s: float) -> bytes:
        content = bytearray()
        while len(content) < length:
            self._socket.settimeout(max(1e-3, end_s - time.monotonic()))
            part = self._socket.recv(min(1 << 20, length - len(content)))
            if not part:
                raise ConnectionResetError
            content += part
        return bytes(content)

    def _ended(self, limit_s: float) -> OverLimit:
        """Return why the process has closed its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.wait(_EXIT_S) == -signal.SIGALRM:
                return OverLimit(f"it took longer than {limit_s:g} s")
        return OverLimit("it needed too much memory, or crashed")

    def close(self) -> None:
        """Kill the process if it lives, and leave nothing of it."""
        self._finalizer()


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()
