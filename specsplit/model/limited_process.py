"""Keeps one process for work on files that others wrote: within limits of time and memory, killed when they are over.

The process is `specsplit.model.tokenizer_process`, which sets its own limits; here it is started, asked and replaced.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, cast

from specsplit.core.errors import ResourceError
from specsplit.limits import TOKENIZER_CALL_S
from specsplit.model.child_python import python_command, python_environment

_BYTE_S = 10.0 / (1 << 20)
"""Processor time for each byte of a call. Chosen: the slowest texts found take a third of it."""
_SLACK_S = 60.0
"""Time beyond a limit after which the process is killed from here. It ends itself at the limit, which it counts in the
processor's time and without its own start; this is for a process that was stopped, or gets no processor."""
MAX_ANSWER_BYTES = 64 << 20
_EXIT_S = 1.0
"""Time from the end of its connection to that of the process."""
_MAX_REASON = 200
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # transformers imports numpy, whose OpenBLAS reserves some 40 MB of address space for each thread that it may use:
    # with one for each of fifty processors the process would be over its limit before it does anything.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
CALL_HEAD = struct.Struct(">Id")
"""The length of a call in bytes and its limit in seconds, in front of it."""
HEAD = struct.Struct(">I")
"""The length of an answer, in front of it."""


class OverLimit(Exception):
    """The work took more time or memory than it may, or brought its process down."""


class LimitedProcess:
    """A process that answers one call at a time, for any number of threads; one that was killed is started again."""

    def __init__(self, limit_s: float = TOKENIZER_CALL_S) -> None:
        self.limit_s = limit_s
        self._set_up: list[tuple[Mapping[str, Any], float]] = []
        """The calls that every new process is sent first, and their limits in seconds."""
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._is_closed = False

    def another(self) -> LimitedProcess:
        """Return one that was set up as this one, and starts with its first call."""
        made = LimitedProcess(self.limit_s)
        made._set_up = list(self._set_up)
        return made

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
            ResourceError: no process can be started, or this one was closed.
        """
        with self._lock:
            try:
                return self._started().call(request, self.limit_s if limit_s is None else limit_s)
            except Refused:
                raise
            except BaseException as error:
                # Also when interrupted: an answer that nobody took would be taken for that of the next call.
                self._end()
                if self._is_closed and isinstance(error, OverLimit):
                    raise _was_closed() from error
                raise

    def _started(self) -> _Running:
        """Return the process, which is started and set up if it is not there."""
        if self._running is not None and self._running.has_ended:
            self._end()
        if self._running is not None:
            return self._running
        self._running = started = _Running()
        if self._is_closed:  # seen here, or else `close` sees the process
            raise _was_closed()
        for earlier, earlier_s in self._set_up:
            started.call(earlier, earlier_s)
        return started

    def close(self) -> None:
        """End the process for good, and with it the call under way."""
        self._is_closed = True
        running = self._running
        if running is not None:
            running.kill()
        if self._lock.acquire(blocking=False):  # else the call, which is over, cleans up
            try:
                self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()


def _was_closed() -> ResourceError:
    return ResourceError("The tokenizer was closed.")


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
        try:
            self._process = subprocess.Popen(
                python_command("specsplit.model.tokenizer_process"),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # panics of the tokenizers library go there, and our sentence says it better
                env={**python_environment(), **_ENVIRONMENT},
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
        content = json.dumps(request).encode()
        limit_s += len(content) * _BYTE_S
        end_s = time.monotonic() + limit_s + _SLACK_S
        try:
            self._socket.settimeout(limit_s + _SLACK_S)
            self._socket.sendall(CALL_HEAD.pack(len(content), limit_s) + content)
            (length,) = HEAD.unpack(self._read(HEAD.size, end_s))
            if length > MAX_ANSWER_BYTES:
                raise OverLimit("its answer is too long")
            answer = cast("dict[str, Any]", json.loads(self._read(length, end_s)))
        except TimeoutError as error:
            raise OverLimit(f"it took longer than {limit_s:.2g} s") from error
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
            if self._process.wait(_EXIT_S) == -signal.SIGPROF:
                return OverLimit(f"it took longer than {limit_s:.2g} s")
        return OverLimit("it needed too much memory, or crashed")

    def kill(self) -> None:
        """End the process; its connection stays, for whoever waits there."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process if it lives, and leave nothing of it."""
        self._finalizer()


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()
