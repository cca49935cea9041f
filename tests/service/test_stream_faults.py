"""Streams over real workers that are killed, stopped and cut off in the middle of a text: the same text."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from specsplit.core.sections import OrchestratorSettings
from tests.support.bad_network import BadNetwork
from tests.support.disturbed import (
    SAMPLINGS,
    WAKES_S,
    Run,
    generate,
    links,
    own_cache,
    pair,
    restart,
    resyncs_of,
    truth,
)
from tests.support.processes import WorkerProcess

__all__ = ["own_cache", "pair"]  # fixtures


def streamed(sampling: str, *, lookup: bool = True) -> OrchestratorSettings:
    return SAMPLINGS[sampling].model_copy(update={"mode": "stream", "lookup": lookup})


def check_target_resyncs(run: Run) -> None:
    """Check that the target was sent again exactly what it held when its slot was lost, and nothing else."""
    for resync in resyncs_of(run.done, "target"):
        held = run.lengths[resync.round - 1] - 1
        assert (resync.reason, resync.num_tokens) in (("epoch_raised", 0), ("slot_lost", held))


@pytest.mark.parametrize(
    ("who", "seed"),
    [("target", 0), *(pytest.param(*kill, marks=pytest.mark.slow) for kill in (("both", 1), ("draft", 2)))],
)
async def test_a_killed_worker_changes_no_token_of_a_stream(
    pair: dict[str, WorkerProcess], who: str, seed: int
) -> None:
    sampling = ("greedy", "sampled")[seed % 2]
    expected = await truth(pair, sampling)
    fault_round = random.Random(seed).randint(1, 8)
    killed = [pair[role] for role in ("target", "draft") if who in (role, "both")]
    async with links(pair["target"].address, pair["draft"].address) as workers:
        run = await generate(workers, streamed(sampling), {fault_round: lambda: restart(*killed)})
    assert run.done.token_ids == expected
    assert set(run.done.rounds_by_mode) == {"stream"}
    lost = [resync for resync in resyncs_of(run.done, "target") if resync.reason == "slot_lost"]
    assert len(lost) == (who != "draft")
    check_target_resyncs(run)


@pytest.mark.parametrize("seed", range(3))
async def test_a_cut_stream_is_opened_again(pair: dict[str, WorkerProcess], seed: int) -> None:
    rng = random.Random(seed)
    sampling = ("greedy", "sampled")[seed % 2]
    expected = await truth(pair, sampling)
    async with BadNetwork(pair["target"].address) as to_target, BadNetwork(pair["draft"].address) as to_draft:
        to_target.set(latency_s=0.004)
        faults = {rng.randint(1, 4): to_target.cut, 6: to_draft.cut, rng.randint(8, 11): to_target.cut}
        async with links(to_target.address, to_draft.address) as workers:
            run = await generate(workers, streamed(sampling), faults)
        assert to_target.num_connections >= 3
    assert run.done.token_ids == expected
    check_target_resyncs(run)
    assert "epoch_raised" in {resync.reason for resync in resyncs_of(run.done, "target")}


async def test_latency_and_jitter_change_no_token_of_a_stream(pair: dict[str, WorkerProcess]) -> None:
    expected = await truth(pair, "sampled")
    async with BadNetwork(pair["target"].address) as to_target, BadNetwork(pair["draft"].address) as to_draft:
        to_target.set(latency_s=0.003, jitter_s=0.004)
        to_draft.set(latency_s=0.001, jitter_s=0.008)
        async with links(to_target.address, to_draft.address) as workers:
            run = await generate(workers, streamed("sampled"))
    assert run.done.token_ids == expected
    assert resyncs_of(run.done, "target") == []


async def test_a_hung_target_that_wakes_up_goes_on_with_the_text(pair: dict[str, WorkerProcess]) -> None:
    expected = await truth(pair, "greedy")
    wakers: list[asyncio.Task[None]] = []
    pid = pair["target"].pid

    async def hang() -> None:
        async def wake() -> None:
            await asyncio.sleep(WAKES_S)
            os.kill(pid, signal.SIGCONT)

        os.kill(pid, signal.SIGSTOP)
        wakers.append(asyncio.create_task(wake()))

    async with links(pair["target"].address, pair["draft"].address) as workers:
        run = await generate(workers, streamed("greedy"), {3: hang})
        await asyncio.gather(*wakers)
    assert run.done.token_ids == expected
    assert "target" in {phase.worker for phase in run.done.degraded}
    check_target_resyncs(run)
