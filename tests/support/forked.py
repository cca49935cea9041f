"""Processes forked from a server that has already imported torch, to be used as those of `subprocess`.

A forked process differs from `python -m` only in how it got its imports: it is a child of the test, with arguments,
environment, folder and streams of its own, and every signal goes to it directly.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import IO

from tests.support.fork_server import REQUEST_BYTES

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_CHILD_SUBREAPER = 36
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}


class _ForkServer:
    """The server process of this test run, started when it is first needed."""

    def __init__(self) -> None:
        # Whoever loses its parent below this process becomes its child: the server's double forks rely on that.
        assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**os.environ, **_ONE_THREAD, "PYTHONPATH": str(ROOT)},
            )
        atexit.register(self._close)

    def start(self, content: bytes, streams: tuple[int, int, int]) -> int:
        """Start a process with these three descriptors as its streams; return its process id."""
        assert len(content) < REQUEST_BYTES
        with self._lock:
            socket.send_fds(self._socket, [content], list(streams))
            answer = self._socket.recv(32)
        assert answer, "the fork server ended; see its stderr"
        return int(answer)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


@cache
def _server() -> _ForkServer:
    return _ForkServer()


def _reader(wanted: int | None, theirs: ExitStack) -> tuple[IO[bytes] | None, int]:
    """Return our end of its stdin, if it is to be a pipe, and its descriptor, which `theirs` closes here."""
    if wanted is None:
        return None, 0
    reader, writer = os.pipe()
    theirs.callback(os.close, reader)
    return os.fdopen(writer, "wb", buffering=0), reader


def _writer(inherited: int, wanted: int | IO[bytes] | None, theirs: ExitStack) -> tuple[IO[bytes] | None, int]:
    """Return our end of its stdout or stderr, if it is to be a pipe, and its descriptor."""
    if wanted is None:
        return None, inherited
    if not isinstance(wanted, int):
        return None, wanted.fileno()
    reader, writer = os.pipe()
    theirs.callback(os.close, writer)
    return os.fdopen(reader, "rb"), writer


class ForkedProcess:
    """`python -m module arguments`, forked; of `subprocess.Popen` it has what tests use, with the same meaning."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        env: Mapping[str, str],
        stdin: int | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> None:
        self.returncode: int | None = None
        request = {"module": module, "arguments": arguments, "environment": dict(env), "folder": str(Path.cwd())}
        with ExitStack() as theirs:
            self.stdin, reader = _reader(stdin, theirs)
            self.stdout, out = _writer(1, stdout, theirs)
            self.stderr, err = _writer(2, stderr, theirs)
            self.pid = _server().start(json.dumps(request).encode(), (reader, out, err))
        self._exited = os.pidfd_open(self.pid)
        self._collecting = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        with self._collecting:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid == self.pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    os.close(self._exited)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code."""
        while (code := self.poll()) is None:
            if not select.select([self._exited], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, content: bytes = b"", timeout: float | None = None) -> tuple[bytes, bytes]:
        """Write `content`, wait for its end, and return everything that it wrote."""
        assert self.stdout is not None
        assert self.stderr is not None
        with ThreadPoolExecutor(2) as pool:
            out, err = pool.submit(self.stdout.read), pool.submit(self.stderr.read)
            if self.stdin is not None:
                with self.stdin:
                    self.stdin.write(content)
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            with self.stdout, self.stderr:
                return out.result(timeout), err.result(timeout)
