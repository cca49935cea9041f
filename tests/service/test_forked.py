"""Forked processes behave as those of `subprocess`: the service tests rely on that."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, TimeoutExpired

import pytest

from tests.support.forked import ForkedProcess
from tests.support.processes import LIMIT_S, environment


def _mirror(*arguments: str, **changes: str) -> ForkedProcess:
    env = environment(**changes)
    return ForkedProcess("tests.support.mirror", *arguments, env=env, stdin=PIPE, stdout=PIPE, stderr=PIPE)


def test_arguments_environment_streams_and_exit_code_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    process = _mirror("--an", "argument", OMP_NUM_THREADS="3", ONLY_HERE="yes")
    out, err = process.communicate(b"one\ntwo\n", LIMIT_S)
    line, _, copied = out.partition(b"\n")
    assert json.loads(line) == {
        "arguments": ["--an", "argument"],
        "environment": environment(OMP_NUM_THREADS="3", ONLY_HERE="yes"),
        "folder": str(tmp_path),
        "parent": os.getpid(),
        "process": process.pid,
        "threads": 3,
    }
    assert (copied, err, process.returncode) == (b"one\ntwo\n", b"the end\n", 3)


def _end_of(process: ForkedProcess, number: signal.Signals) -> int:
    """Return the exit code; Python sees a signal that comes between its last look and a read with the next one."""
    for _ in range(LIMIT_S // 5):
        with suppress(TimeoutExpired):
            return process.wait(5)
        process.send_signal(number)
    return process.wait(5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_a_signal_reaches_the_process_itself(number: signal.Signals):
    process = _mirror()
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdin, process.stdout, process.stderr:
        assert process.stdout.readline()
        assert process.poll() is None
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        process.send_signal(number)
        os.kill(process.pid, signal.SIGCONT)
        assert _end_of(process, number) == -number
        assert not Path(f"/proc/{process.pid}").exists()
        assert process.stdout.read() == b""
