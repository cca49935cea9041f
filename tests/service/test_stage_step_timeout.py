"""`--step-timeout` of a target: a stage that answers pings and never ends its step is given up after that long."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from specsplit.core.sections import StageSettings
from specsplit.rpc.clients import RemoteVerifier
from specsplit.stages.chain.stage import StageEngine
from specsplit.stages.packet import Packet
from tests.support.processes import WorkerProcess
from tests.support.stage_processes import generated, sent_again, served_stages

STEP_TIMEOUT_S = 4.5


async def step_times(address: str) -> Sequence[tuple[int, float]]:
    verifier = RemoteVerifier(address)
    try:
        return (await verifier.ping()).step_times
    finally:
        await verifier.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["serving", "measuring"])
def test_a_step_that_never_ends_is_given_up_when_the_setting_says(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    text = generated(capfd, "--mode", "plain")
    hung: list[StageEngine] = []
    may_hang = asyncio.Event()  # the target measures its chain when it starts, behind some tokens, too
    if when == "measuring":
        may_hang.set()
    forward = StageEngine.forward

    async def forward_or_hang(stage: StageEngine, packet: Packet) -> Packet:
        session = packet.sessions[0]
        is_the_one = session.start > 20 if when == "serving" else len(session.hashes) == 5
        if may_hang.is_set() and not hung and stage.index == 1 and is_the_one:
            hung.append(stage)
        if stage in hung:
            await asyncio.Event().wait()
        return await forward(stage, packet)

    monkeypatch.setattr(StageEngine, "forward", forward_or_hang)
    # A stage that hangs on its loop answers no ping, like a process that is stopped; this is about one that does.
    monkeypatch.setattr(StageEngine, "forward_now", lambda stage, packet: None)
    settings = [StageSettings(layers=layers, threads=1) for layers in ("0:4", "4:12", "4:12")]
    with served_stages(*settings) as (first, second, spare):
        where = ("--stages", f"{first},{second}", "--spares", spare)
        target = WorkerProcess("target", tmp_path, *where, "--step-timeout", str(STEP_TIMEOUT_S))
        try:
            address = target.address
            assert bool(hung) == (when == "measuring")
            assert max(seconds for _, seconds in asyncio.run(step_times(address))) < 1, "no forward that hung is told"
            may_hang.set()
            assert generated(capfd, "--mode", "plain", "--target", address) == text
            assert len(hung) == 1
            assert target.stop() == 0
            told = target.stderr
        finally:
            target.close()
    told_s = [float(seconds) for seconds in re.findall(r"computing one step for ([0-9.]+) s, and 4.5 s are the ", told)]
    assert told_s, told
    assert all(seconds > STEP_TIMEOUT_S for seconds in told_s)
    assert f"the spare at {spare} took a stage's place" in told
    reasons = ["lost", "behind"] if when == "serving" else ["lost"]  # the slot that is measured holds nothing
    assert [reason for reason, _ in sent_again(target)] == reasons
