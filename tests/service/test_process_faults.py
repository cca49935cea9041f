"""Real workers killed, stopped and cut off in the middle of a text: same text, and only what was lost is sent again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from dataclasses import replace

import pytest

from specsplit.assembly.workers import Workers
from specsplit.core.ports import Verifier
from specsplit.core.types import Proposal, SessionParams, Turn, Verdict, prefix_hash
from specsplit.orchestrator.request import Replay
from tests.support.bad_network import BadNetwork
from tests.support.disturbed import (
    SAMPLINGS,
    WAKES_S,
    check_noticed_soon,
    generate,
    links,
    own_cache,
    pair,
    restart,
    resyncs_of,
    truth,
)
from tests.support.processes import WorkerProcess
from tests.support.rpc_servers import wait_until

__all__ = ["own_cache", "pair"]  # fixtures

MORE_KILLS = [(who, seed) for who in ("target", "draft", "both") for seed in range(1, 5)]
KILLS = [("target", 0), *(pytest.param(*kill, marks=pytest.mark.slow) for kill in MORE_KILLS)]


@pytest.mark.parametrize(("who", "seed"), KILLS)
async def test_a_killed_worker_is_sent_what_it_held_and_nothing_else(
    pair: dict[str, WorkerProcess], who: str, seed: int
) -> None:
    sampling = ("greedy", "sampled")[seed % 2]
    expected = await truth(pair, sampling)
    fault_round = random.Random(seed).randint(1, 12)
    killed = [pair[role] for role in ("target", "draft") if who in (role, "both")]
    async with links(pair["target"].address, pair["draft"].address) as workers:
        run = await generate(workers, SAMPLINGS[sampling], {fault_round: lambda: restart(*killed)})
    result = run.done
    assert result.token_ids == expected
    held_by_target = run.lengths[fault_round] - 1
    held_by_draft = run.lengths[fault_round - 1]
    if who != "draft":
        assert resyncs_of(result, "target") == [Replay("target", fault_round + 1, "slot_lost", held_by_target)]
    else:
        assert resyncs_of(result, "target") == []
    if who != "target":
        assert [resync.reason for resync in resyncs_of(result, "draft")][-1] == "slot_lost"
        assert sum(resync.num_tokens for resync in resyncs_of(result, "draft")) == held_by_draft
    else:
        assert resyncs_of(result, "draft") == []
    assert result.speculative_decoding.num_accepted_draft_tokens > 0


@pytest.mark.parametrize(
    ("mode", "who"), [("overlap", "both"), pytest.param("overlap", "draft", marks=pytest.mark.slow), ("auto", "target")]
)
async def test_a_killed_worker_changes_no_token_in_any_mode(
    pair: dict[str, WorkerProcess], mode: str, who: str
) -> None:
    expected = await truth(pair, "sampled")
    settings = SAMPLINGS["sampled"].model_copy(update={"mode": mode, "lookup": True})
    killed = [pair[role] for role in ("target", "draft") if who in (role, "both")]
    async with links(pair["target"].address, pair["draft"].address) as workers:
        run = await generate(workers, settings, {4: lambda: restart(*killed)})
    assert run.done.token_ids == expected
    sent_again = [resync for resync in resyncs_of(run.done, "target") if resync.num_tokens]
    assert len(sent_again) == (who != "draft")
    for resync in sent_again:  # a round that was under way may have ended before the workers did
        assert resync.round > 4
        assert resync == Replay("target", resync.round, "slot_lost", run.lengths[resync.round - 1] - 1)


@pytest.mark.parametrize("seed", range(4))
async def test_cut_connections_lose_nothing_that_has_to_be_sent_again(
    pair: dict[str, WorkerProcess], seed: int
) -> None:
    rng = random.Random(seed)
    sampling = ("greedy", "sampled")[seed % 2]
    expected = await truth(pair, sampling)
    async with BadNetwork(pair["target"].address) as to_target, BadNetwork(pair["draft"].address) as to_draft:
        faults = {rng.randint(1, 5): to_target.cut, rng.randint(6, 9): to_draft.cut, rng.randint(10, 14): to_target.cut}
        async with links(to_target.address, to_draft.address) as workers:
            run = await generate(workers, SAMPLINGS[sampling], faults)
        assert to_target.num_connections >= 3
    assert run.done.token_ids == expected
    assert resyncs_of(run.done, "target") == []
    assert all(resync.num_tokens == 0 for resync in run.done.resyncs)


async def test_answers_under_way_when_the_connection_breaks_are_given_again(pair: dict[str, WorkerProcess]) -> None:
    expected = await truth(pair, "greedy")
    async with BadNetwork(pair["target"].address) as proxy, links(proxy.address, None) as workers:
        cuts: list[asyncio.Task[None]] = []

        async def swallow_then_cut() -> None:
            async def later() -> None:
                await wait_until(lambda: proxy.sent_bytes > num_before)
                await asyncio.sleep(0.3)  # the round was swallowed by now
                proxy.set(is_black_hole=False)
                await proxy.cut()

            num_before = proxy.sent_bytes
            proxy.set(is_black_hole=True)
            cuts.append(asyncio.create_task(later()))

        run = await generate(workers, SAMPLINGS["greedy"], {3: swallow_then_cut, 9: swallow_then_cut})
        await asyncio.gather(*cuts)
    assert run.done.token_ids == expected
    assert run.done.resyncs == ()
    assert [(phase.worker, phase.reason) for phase in run.done.degraded] == [("target", "unreachable")] * 2
    assert [phase.first_round for phase in run.done.degraded] == [4, 10]


async def test_latency_and_jitter_change_no_token(pair: dict[str, WorkerProcess]) -> None:
    expected = await truth(pair, "sampled")
    async with BadNetwork(pair["target"].address) as to_target, BadNetwork(pair["draft"].address) as to_draft:
        to_target.set(latency_s=0.003, jitter_s=0.004)
        to_draft.set(latency_s=0.001, jitter_s=0.008)
        async with links(to_target.address, to_draft.address) as workers:
            run = await generate(workers, SAMPLINGS["sampled"])
    assert run.done.token_ids == expected
    assert run.done.resyncs == ()


async def test_a_hung_target_is_noticed_within_three_seconds(pair: dict[str, WorkerProcess]) -> None:
    target = pair["target"]
    await check_noticed_soon(target.address, target.pid, is_connected=True)


async def test_hung_workers_that_wake_up_go_on_where_they_were(pair: dict[str, WorkerProcess]) -> None:
    expected = await truth(pair, "greedy")
    wakers: list[asyncio.Task[None]] = []

    async def hang() -> None:
        async def wake() -> None:
            await asyncio.sleep(WAKES_S)
            for worker in pair.values():
                os.kill(worker.pid, signal.SIGCONT)

        for worker in pair.values():
            os.kill(worker.pid, signal.SIGSTOP)
        wakers.append(asyncio.create_task(wake()))

    async with links(pair["target"].address, pair["draft"].address) as workers:
        run = await generate(workers, SAMPLINGS["greedy"], {4: hang})
        await asyncio.gather(*wakers)
    assert run.done.token_ids == expected
    assert resyncs_of(run.done, "target") == []
    assert {phase.worker for phase in run.done.degraded} == {"target", "draft"}


class PlantingVerifier:
    """Writes, once, other tokens of the same length into the session's slot, behind the client's back."""

    def __init__(self, inner: Verifier, at_round: int) -> None:
        self._inner, self._at_round = inner, at_round
        self.num_planted = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        if turn.round == self._at_round and not self.num_planted:
            self.num_planted = turn.base_length
            lie = replace(
                turn,
                epoch=turn.epoch + 1,
                round=0,
                base_length=0,
                base_hash=prefix_hash(()),
                tail=(7,) * turn.base_length,
                opening=SessionParams(prompt_length=turn.base_length, max_tokens=64),
            )
            await self._inner.verify(lie, Proposal(first_node=1, root_position=turn.base_length - 1))
        return await self._inner.verify(turn, proposal)


async def test_other_tokens_of_equal_length_in_a_slot_are_found_out(pair: dict[str, WorkerProcess]) -> None:
    expected = await truth(pair, "greedy")
    async with links(pair["target"].address, None) as workers:
        planting = PlantingVerifier(workers.verifier, at_round=6)
        run = await generate(Workers(planting, None, workers.tokenizer), SAMPLINGS["greedy"])  # type: ignore[arg-type]
    assert run.done.token_ids == expected
    raised, lost = run.done.resyncs
    assert (raised.reason, raised.num_tokens) == ("epoch_raised", 0)
    assert (lost.reason, lost.num_tokens) == ("slot_lost", planting.num_planted)
    assert planting.num_planted == run.lengths[lost.round - 1] - 1
