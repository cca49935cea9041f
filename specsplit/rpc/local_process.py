"""Processes of this machine that serve an address: started, restarted when they end, and ended with their parent.

The address is the one that the process's ready line names; a restarted process gets the same. Knows no service.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

from specsplit.core.errors import InvalidSettings, ResourceError, SpecSplitError, UsageError, WorkerFailed
from specsplit.core.types import Note
from specsplit.model.child_python import python_command, python_environment
from specsplit.rpc.child_log import FAILED, json_fields, pass_on
from specsplit.rpc.hang import wait_stalled

PAUSES_S = (0.2, 10.0)
"""Pause before a process that ended is started again: the first one, and the longest."""
_LASTING_S = 60.0
"""A process that ran for so long is restarted with the first pause again."""
_STOP_S = 5.0
LINE_BYTES = 1 << 20
WaitHung = Callable[[str, int], Awaitable[str]]
"""Returns why the process at an address, with this id, has to be killed, once it hangs."""
_log = logging.getLogger(__name__)


class LocalProcess:
    """One process of `specsplit` after the other, all at the address of the first; `arguments` begin with the command.

    `note` shows what it says. It does not see variables whose names begin with one of `hidden`. Whatever ends this
    process ends it, too: it asks the system to be killed with its parent.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        note: Note | None = None,
        wait_hung: WaitHung | None = None,
        hidden: tuple[str, ...] = (),
    ) -> None:
        self.address = "127.0.0.1:0"
        self._name, self._arguments = name, tuple(arguments)
        self._note, self._wait_hung, self._hidden = note, wait_hung, hidden
        self._process: asyncio.subprocess.Process | None = None
        self._forwarding: asyncio.Task[None] | None = None
        self._supervising: asyncio.Task[None] | None = None
        self._said = ""
        """Last line that the process wrote to stderr; of a line of JSON, its message."""
        self._serves = False
        """Whether the process has said where it serves."""

    async def start(self) -> None:
        """Start the process, and wait until it serves.

        Raises:
            WorkerFailed: it ended or hung before it served, and what it said last; or it said something else.
            InvalidSettings: it ended so since its settings are wrong.
            ResourceError: it cannot be started.
        """
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(*python_command("specsplit"), *self._arguments),
                *("--listen", self.address, "--parent", str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=python_environment(hidden=self._hidden),
                start_new_session=True,  # Ctrl-C is the parent's to hear, which needs this process to drain
                limit=LINE_BYTES,
            )
        except OSError as error:
            raise ResourceError(f"{self._name} cannot be started ({error.strerror}).") from error
        assert process.stdout is not None
        assert process.stderr is not None
        self._said, self._serves = "", False
        self._forwarding = asyncio.create_task(self._forward(process.stderr))
        stalling = asyncio.create_task(self._kill_when_stalled(process))
        try:
            line = await process.stdout.readline()
        except ValueError:  # longer than any line should be
            line = b"?"
        finally:
            stalling.cancel()
            await asyncio.wait({stalling})
        if not line:
            code = await process.wait()
            await self._forwarding
            stalled = "" if stalling.cancelled() else stalling.result()
            reason = stalled or self._said.removeprefix("Error: ") or f"{_ending(code)}."
            # Its exit code says that settings are wrong, and they are ours, handed on.
            kind = InvalidSettings if code == UsageError.exit_code else WorkerFailed
            raise kind(f"{self._name} ended before it served: {reason}")
        address = _address_in(line)
        if address is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # Its pipe is read to the end: a process that waits on a full pipe would never close it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    while await process.stdout.read(LINE_BYTES):
                        pass
            await process.wait()
            raise WorkerFailed(f"{self._name} did not say where it serves, and was ended; it said {line[:80]!r}.")
        self.address, self._serves = address, True
        if self._note is not None:
            self._note(f"{self._name} serves at {self.address}, process {process.pid}.")

    def supervise(self) -> None:
        """Restart the process whenever it ends or hangs, from now on."""
        self._supervising = asyncio.create_task(self._supervise())

    async def aclose(self) -> None:
        """End the process, in good order if it reacts in time; its last output is not passed on."""
        self._note = None
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait({self._supervising})
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._forwarding is not None:
            await asyncio.wait({self._forwarding})

    async def _supervise(self) -> None:
        loop, pause_s = asyncio.get_running_loop(), PAUSES_S[0]
        while True:
            # A process that keeps dying is restarted ever more rarely; one that lasted a while starts over.
            began_s = loop.time()
            code = await self._ended()
            if loop.time() - began_s > _LASTING_S:
                pause_s = PAUSES_S[0]
            _log.warning("%s ended (%s); starting it again in %g s", self._name, _ending(code), pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSES_S[1])
            try:
                await self.start()
            except SpecSplitError as error:
                _log.warning("%s", error)

    async def _ended(self) -> int:
        """Wait until the process has ended, killing it if it hangs, and return its exit code."""
        process = self._process
        assert process is not None
        watching = asyncio.create_task(self._kill_when_hung(process))
        try:
            return await process.wait()
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    async def _kill_when_hung(self, process: asyncio.subprocess.Process) -> None:
        if self._wait_hung is None:
            return
        why = await self._wait_hung(self.address, process.pid)
        _log.warning("%s is ended, since it hangs: %s", self._name, why)
        with contextlib.suppress(ProcessLookupError):
            # Not `terminate`: a process that is stopped or stuck would never handle that signal.
            process.kill()

    async def _kill_when_stalled(self, process: asyncio.subprocess.Process) -> str:
        """Kill a process that hangs while it loads, and return why it was killed."""
        why = await wait_stalled(
            process.pid, lambda seconds: _log.info("%s is still loading, for %.0f s now", self._name, seconds)
        )
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return why

    async def _forward(self, stream: asyncio.StreamReader) -> None:
        """Pass on what the process writes, under its name."""
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than any line should be, and dropped
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            fields = json_fields(text)
            self._said = text if fields is None else fields["message"]
            # Why it does not serve is said by the error that `start` raises.
            is_reason = text.startswith("Error: ") if fields is None else fields.get("event") == FAILED
            is_said_twice = is_reason and not (fields or {}).get("exception")
            if self._note is None or (is_said_twice and not self._serves):
                continue
            if fields is None:
                self._note(f"{self._name}: {text}")
            else:
                pass_on(self._name, fields)


@asynccontextmanager
async def running(processes: Sequence[LocalProcess]) -> AsyncGenerator[list[str]]:
    """Start all of `processes` at once, keep them running for the length of the block, and give their addresses.

    Raises what `LocalProcess.start` raises; all have ended by then.
    """
    async with AsyncExitStack() as stack:
        for process in processes:
            stack.push_async_callback(process.aclose)
        # All start at once, since each of them loads a model; the first error wins after all have ended or serve.
        for error in await asyncio.gather(*(process.start() for process in processes), return_exceptions=True):
            if isinstance(error, BaseException):
                raise error
        for process in processes:
            process.supervise()
        yield [process.address for process in processes]


def _address_in(line: bytes) -> str | None:
    """Return the address that a ready line names, None if it is no ready line."""
    try:
        ready = cast(object, json.loads(line))
    except ValueError:
        return None
    address = cast("dict[str, object]", ready).get("address") if isinstance(ready, dict) else None
    return address if isinstance(address, str) else None


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
