"""The server side of `forked`: it has imported everything that a worker imports, and forks a child per command line.

Four fifths of a worker's start are imports of torch and transformers. This process pays for them once; it runs no
model, starts no thread and opens no channel, so that a child begins in the state of a process that has only imported.

It reads requests from a Unix socket, whose descriptor is its only argument, and ends when the other side does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

REQUEST_BYTES = 1 << 17
MODEL_MODULES = ("transformers.models.llama.modeling_llama",)
"""Modules that transformers imports when a model is loaded: those of the embedded pair."""
GPU_MODULES = (
    "specsplit.model.attention.kernel_attention",
    "specsplit.model.attention.slot_kernels",
    "specsplit.sampling.search_kernels",
)
"""Modules that need Triton, which comes with torch's builds for CUDA: a worker on a CPU imports none of them."""


@dataclass(frozen=True)
class Request:
    """A command line to run: `python -m module arguments` in an environment and folder."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str


def serve(connection: socket.socket) -> Request | None:
    """Fork a child for each request and answer with its process id.

    It returns in each child, with the request to run, and in the server itself, with None, at the end.
    """
    while True:
        content, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        if not content:
            return None
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork copies only the thread that calls it"
        pid = _fork_orphan()
        if pid == 0:
            connection.close()
            _take_streams(descriptors)
            return Request(**json.loads(content))
        connection.send(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_orphan() -> int:
    """Fork a process whose parent ends at once, so that the subreaper above the server, the test, becomes its parent.

    Returns the process id here and 0 in the child, which begins only when the test is its parent.
    """
    id_reader, id_writer = os.pipe()
    go_reader, go_writer = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid != 0:
            os.write(id_writer, str(pid).encode())
            os._exit(0)
        for descriptor in (id_reader, id_writer, go_writer):
            os.close(descriptor)
        os.read(go_reader, 1)  # ends when the server has collected the process between the two
        os.close(go_reader)
        return 0
    os.close(id_writer)
    pid = int(os.read(id_reader, 32))
    os.waitpid(between, 0)
    for descriptor in (id_reader, go_reader, go_writer):
        os.close(descriptor)
    return pid


def _take_streams(descriptors: list[int]) -> None:
    """Make the three descriptors stdin, stdout and stderr, with the buffering of a fresh interpreter."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stdout = sys.__stdout__ = _writer(1, is_by_line=os.isatty(1))  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _writer(2, is_by_line=True)  # type: ignore[misc]


def _writer(descriptor: int, *, is_by_line: bool) -> io.TextIOWrapper:
    raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=is_by_line)


def become(request: Request) -> None:
    """Run the command line of `request` in this process; raises SystemExit as a program does."""
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    # torch read this at its import, in the server, where it was 1.
    torch.set_num_threads(int(request.environment.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    sys.argv[1:] = request.arguments
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def import_all() -> None:
    """Import every module of SpecSplit, and with them torch, transformers and grpc."""
    import specsplit

    def fail(name: str) -> Any:
        raise ImportError(name)

    for module in pkgutil.walk_packages(specsplit.__path__, "specsplit.", onerror=fail):
        if not module.name.endswith("__main__") and module.name not in GPU_MODULES:
            importlib.import_module(module.name)
    for name in MODEL_MODULES:
        importlib.import_module(name)
    gc.freeze()  # collections in the children then leave the shared pages alone


def main() -> None:
    """Serve, in the server; run what was asked for, in each child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test to hear
    connection = socket.socket(fileno=int(sys.argv[1]))
    import_all()
    request = serve(connection)
    if request is not None:
        try:
            become(request)
        except SystemExit as end:
            if not isinstance(end.code, int):
                raise
            leave(end.code)


def leave(code: int) -> NoReturn:
    """End as an interpreter does, except that it takes no module apart: that would copy every page of the server's."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()  # what is dropped while it is under way says so, as it does when modules are taken apart
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
