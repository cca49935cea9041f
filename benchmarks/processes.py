"""Systems in processes of their own: what one leaves behind (threads, caches, settings of torch) must not slow another.

The parent asks one child at a time; times are taken inside the children.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Protocol

from benchmarks.systems import Sample, System, Task
from specsplit.core.errors import ResourceError, SpecSplitError

ANY_PORT = "127.0.0.1:0"


class Served(Protocol):
    """A child offers systems, and some offer more methods that the parent may `ask` for."""

    @property
    def systems(self) -> Sequence[System]: ...


Factory = Callable[[], AbstractContextManager[Served]]
"""Makes what is served, inside the child; has to be picklable."""


class Child:
    """A process that serves some systems; it starts at once, and ends with the `with` block."""

    def __init__(self, name: str, factory: Factory) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, factory), name=name, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *raised: object) -> None:
        self._connection.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it has been started"
        return self._process.pid

    def wait_systems(self) -> list[System]:
        """Wait until the models are loaded and return the systems, as seen from here.

        Raises:
            SpecSplitError: they cannot be loaded.
        """
        return [RemoteSystem(self, name) for name in self._answer()]

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of what is served.

        Raises:
            SpecSplitError: as the method did, or the process has ended.
        """
        with suppress(BrokenPipeError):  # it has ended, which the answer tells
            self._connection.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            has_failed, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise ResourceError(f"The process of {self._name} has ended; is there enough memory?") from None
        if has_failed:
            raise value
        return value


class RemoteSystem:
    """A system of a child."""

    def __init__(self, child: Child, name: str) -> None:
        self.name = name
        self._child = child

    def generate(self, task: Task) -> Sample:
        return self._child.ask("generate", self.name, task)


def _leave(signum: int, frame: FrameType | None) -> None:
    """End through the blocks that are open, so that a child ends its own workers."""
    raise SystemExit(128 + signum)


def _serve(connection: Connection, factory: Factory) -> None:
    """Load, tell the systems' names, then answer until the parent hangs up; Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    try:
        with factory() as served:
            systems = {system.name: system for system in served.systems}
            gc.freeze()  # as every command does: a collection that looks at models and modules takes 200 ms
            connection.send((False, list(systems)))
            while True:
                method, arguments = connection.recv()
                if method == "generate":
                    name, task = arguments
                    answer: Any = systems[name].generate(task)
                else:
                    answer = getattr(served, method)(*arguments)
                connection.send((False, answer))
    except (EOFError, BrokenPipeError):
        return
    except SpecSplitError as error:
        connection.send((True, error))


class WorkerProcess:
    """`specsplit` with these arguments, on a free port unless `listen` names one, from its ready line to `end`.

    `program` tells Python what to run, and `options` go to Popen.
    """

    def __init__(
        self, *arguments: str, listen: str = ANY_PORT, program: Sequence[str] = ("-m", "specsplit"), **options: Any
    ) -> None:
        self._command = arguments[0]
        # A session of its own: Ctrl-C is for the benchmark, which ends its workers when it has finished a run.
        quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        command = [sys.executable, *program, *arguments, "--listen", listen]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **(quiet | options))

    def wait_ready(self) -> str:
        """Return the address once it serves.

        Raises:
            ResourceError: it ended instead.
        """
        return str(self.read_line()["address"])

    def read_line(self) -> dict[str, object]:
        """Return the next line that it prints.

        Raises:
            ResourceError: it ended instead.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ResourceError(
                f"A worker process ended before it served; run `specsplit {self._command}` by hand to see why."
            )
        return json.loads(line)

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> None:
        """Tell it to stop and wait until it has."""
        self.process.terminate()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
