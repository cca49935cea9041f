"""Local stages that hang, stopped or in a step that does not end: killed, started again, and the text goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from specsplit.core.errors import DeadlineExceeded, LinkError, WorkerUnreachable
from specsplit.rpc import local_process
from specsplit.stages import local as local_stages
from specsplit.stages.wire.frames import ChainId
from specsplit.stages.wire.peer import StagePeer, StagePing
from tests.support.disturbed import SAMPLINGS, generate, links, own_cache
from tests.support.processes import LIMIT_S, WorkerProcess
from tests.support.stage_processes import eventually, is_gone, local_pids, sent_again

__all__ = ["own_cache"]  # a fixture

ARGUMENTS = ("--model", "embedded", "--context", "256", "--threads", "1")
NEVER_CONFIGURED = """
import asyncio, sys
from specsplit.cli.main import main
from specsplit.stages.chain.stage import StageEngine

async def place(stage, *where):
    await asyncio.Event().wait()

StageEngine.place = place
sys.exit(main(sys.argv[1:]))
"""


def _pids(told: list[str]) -> list[int]:
    return [int(pid) for line in told for pid in re.findall(r" serves at \S+, process (\d+)\.$", line)]


async def _answer(peer: StagePeer) -> StagePing:
    """Ping until there is an answer."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(WorkerUnreachable, DeadlineExceeded):
                return await peer.ping()
            await peer.renew()


@pytest.mark.slow
async def test_a_stopped_local_stage_is_killed_and_its_sessions_go_on(tmp_path: Path):
    target = WorkerProcess("target", tmp_path, "--local-stages", "2", "--threads", "1")
    try:
        async with links(target.address, None) as workers:
            expected = (await generate(workers, SAMPLINGS["sampled"])).done.token_ids
            stopped = local_pids(target)[1]

            async def stop() -> None:
                os.kill(stopped, signal.SIGSTOP)

            run = await generate(workers, SAMPLINGS["sampled"], {10: stop})
        assert run.done.token_ids == expected
        assert is_gone(stopped)
        assert local_pids(target)[1] != stopped
        told = target.stderr
        assert re.search(r"Stage 1 \(layers 6:12\) is ended, since it hangs: it does not answer\.$", told, re.MULTILINE)
        assert "Stage 1 (layers 6:12) ended (signal 9); starting it again in 0.2 s" in told
        assert set(re.findall(r"Stage (\d+) .*is ended", told)) == {"1"}
        await eventually(lambda: ("behind", run.lengths[10]) in sent_again(target))
        assert [tokens for reason, tokens in sent_again(target) if reason == "behind"] == [run.lengths[10]]
        pids = local_pids(target)
        assert await asyncio.to_thread(target.stop) == 0
        await eventually(lambda: all(map(is_gone, pids.values())))
    finally:
        target.close()


@pytest.mark.slow
async def test_a_local_stage_on_an_endless_step_is_killed_though_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    start, told = asyncio.create_subprocess_exec, list[str]()

    async def start_stuck(*command: str, **options: Any) -> asyncio.subprocess.Process:
        program, safe, module, name, *arguments = command
        assert (safe, module, name) == ("-P", "-m", "specsplit")
        return await start(program, "-c", NEVER_CONFIGURED, *arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_stuck)
    caplog.set_level(logging.WARNING, local_process.__name__)
    async with local_stages.local_stages(["2:5"], ARGUMENTS, told.append, step_timeout_s=1.0) as addresses:
        peer = StagePeer(addresses[0])
        with pytest.raises(LinkError):
            await peer.configure(ChainId("me", 1), 0, 1, "", keep_slots=False)
        await eventually(lambda: len(_pids(told)) == 2)
        assert (await peer.ping()).computing_s == 0.0
        await peer.aclose()
    assert all(map(is_gone, _pids(told)))
    found = re.search(
        r"Stage 0 \(layers 2:5\) is ended, since it hangs: .* one step for ([0-9.]+) s, and 1 s", caplog.text
    )
    assert found is not None
    assert float(found[1]) >= 1.0, "told in tenths of a second"


@pytest.mark.slow
async def test_a_local_stage_that_is_stopped_for_a_moment_is_left_alone(caplog: pytest.LogCaptureFixture):
    told: list[str] = []
    async with local_stages.local_stages(["2:5"], ARGUMENTS, told.append) as addresses:
        (pid,), peer = _pids(told), StagePeer(addresses[0])
        before = (await peer.ping()).process
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(LinkError):
            await peer.ping(1.0)
        os.kill(pid, signal.SIGCONT)
        assert (await _answer(peer)).process == before
        await peer.aclose()
    assert len(_pids(told)) == 1
    assert "is ended" not in caplog.text
