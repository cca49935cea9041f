"""Targets cut into stage processes: the text of one process in every mode, and what kills, hangs and drains leave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specsplit.cli.main import main
from specsplit.core.errors import LinkError
from specsplit.core.sections import StageSettings
from tests.support.disturbed import SAMPLINGS, generate, links, own_cache
from tests.support.machine import DTYPE
from tests.support.processes import LIMIT_S, SILENT_S, WorkerProcess
from tests.support.stage_processes import (
    SAMPLED,
    altered_model,
    close_all,
    eventually,
    generated,
    is_gone,
    local_pids,
    sent_again,
    served_stages,
    stage_process,
)

__all__ = ["own_cache"]  # a fixture

Capture = pytest.CaptureFixture[str]


class Cut:
    """A target over two uneven stages, and a spare for the second one where it is asked for."""

    def __init__(self, folder: Path, *, has_spare: bool = False, ends: str = "stages") -> None:
        own = ("--ends", ends)
        self.stages = [stage_process(folder, layers, *own) for layers in ("0:4", "4:12")]
        self.spare = stage_process(folder, "4:12", *own) if has_spare else None
        addresses = ",".join(stage.address for stage in self.stages)
        spares = () if self.spare is None else ("--spares", self.spare.address)
        self.target = WorkerProcess("target", folder, "--stages", addresses, *spares, *own)

    @property
    def services(self) -> tuple[str, ...]:
        return "--target", self.target.address

    def close(self) -> None:
        close_all([self.target, *([self.spare] if self.spare else []), *self.stages])


class Near:
    """A target process over two uneven stages that this process serves, and a draft."""

    def __init__(self, folder: Path, stages: list[str]) -> None:
        self.stages = stages
        self.draft = WorkerProcess("draft", folder, "--threads", "1")
        self.target = WorkerProcess("target", folder, "--stages", ",".join(stages))

    @property
    def services(self) -> tuple[str, ...]:
        return "--target", self.target.address


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Near]:
    settings = [StageSettings(layers=layers, threads=1) for layers in ("0:4", "4:12")]
    with served_stages(*settings) as addresses:
        started = Near(tmp_path_factory.mktemp("near"), addresses)
        yield started
        close_all([started.target, started.draft])


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cut]:
    started = Cut(tmp_path_factory.mktemp("cut"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def truths() -> dict[tuple[str, ...], list[int]]:
    return {}


def _truth(truths: dict[tuple[str, ...], list[int]], capfd: Capture, sampling: tuple[str, ...]) -> list[int]:
    """Return what the single process generates, computed once."""
    if sampling not in truths:
        truths[sampling] = generated(capfd, "--mode", "plain", *sampling)
    return truths[sampling]


MODES = [("near", "plain", SAMPLED), ("near", "pingpong", ()), ("near", "overlap", SAMPLED), ("near", "stream", ())]
MORE_MODES = [("cut", "plain", ()), ("cut", "pingpong", SAMPLED), ("cut", "overlap", ()), ("cut", "stream", SAMPLED)]


@pytest.mark.parametrize(
    ("stages", "mode", "sampling"), [*MODES, *(pytest.param(*mode, marks=pytest.mark.slow) for mode in MORE_MODES)]
)
def test_the_text_over_stages_is_that_of_one_process(
    stages: str,
    mode: str,
    sampling: tuple[str, ...],
    near: Near,
    truths: dict[tuple[str, ...], list[int]],
    capfd: Capture,
    request: pytest.FixtureRequest,
):
    services = request.getfixturevalue(stages).services
    draft = ("--draft", near.draft.address) if mode != "plain" else ()
    assert generated(capfd, "--mode", mode, *services, *draft, *sampling) == _truth(truths, capfd, sampling)


def test_the_doctor_takes_it_for_any_other_target(near: Near, capfd: Capture):
    code = main(["doctor", "--target", near.target.address, "--draft", near.draft.address, "--json"])
    report = json.loads(capfd.readouterr().out)
    assert (code, report["ok"]) == (0, True)
    found = {check["name"]: check["detail"] for check in report["checks"]}
    assert f"embedded: {DTYPE} on cpu, vocabulary 4096, context 4096" in found["target"]
    assert found["vocabulary"] == "the same for draft and target"


def test_stages_that_do_not_fit_are_refused_with_the_reason(near: Near, tmp_path: Path, capfd: Capture):
    first, last = near.stages
    other = str(altered_model(tmp_path / "other", "model.layers.1.mlp.down_proj.weight", 0.0))
    for arguments, reason in (
        (
            ("--stages", f"{last},{first}"),
            f"The first stage, at {last}, has layers 4:12 and does not begin with layer 0",
        ),
        (("--stages", first), f"Layers 4:12 are missing behind the last stage, at {first} (layers 0:4)."),
        (("--stages", last), f"The first stage, at {last}, has layers 4:12 and does not begin with layer 0"),
        (("--stages", f"{first},{last}", "--model", other), f"The stage at {first} has other weights for layers 0:4"),
        (("--stages", f"{first},{last}", "--dtype", "fp16"), f"computes in {DTYPE}, not in fp16"),
        (("--stages", f"{first},{last}", "--dtype", "int8"), f"computes in {DTYPE}, not in int8; give both the same"),
        (("--stages", f"{first},{last}", "--ends", "coordinator"), f"The stage at {first} holds the embedding"),
        (("--stages", f"{first},{last}", "--sessions", "9"), f"The stage at {first} has 4 slots, but the coordinator"),
        (("--stages", f"{first},{last}"), f"The stage at {first} refuses: The stage serves another coordinator"),
        (("--stages", f"{first},{near.draft.address}"), f"At {near.draft.address} is no stage"),
        (("--stages", f"{first},{first}"), f"The stage at {first} is named twice."),
    ):
        code = main(["target", *arguments])
        out, err = capfd.readouterr()
        assert (code in (1, 2), out) == (True, ""), arguments
        assert err.startswith("Error: "), arguments
        assert reason in err, arguments
        assert err.count("\n") == 1, err


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    worker = WorkerProcess("target", tmp_path_factory.mktemp("local"), "--local-stages", "2", "--threads", "1")
    yield worker
    worker.close()


@pytest.mark.slow
@pytest.mark.parametrize(("index", "sampling"), [(0, "greedy"), (1, "sampled")])
async def test_a_killed_local_stage_comes_back_and_is_sent_what_it_held(
    index: int, sampling: str, local: WorkerProcess
):
    async with links(local.address, None) as workers:
        expected = (await generate(workers, SAMPLINGS[sampling])).done.token_ids
        before, told = local_pids(local)[index], len(sent_again(local))

        async def kill() -> None:
            os.kill(before, signal.SIGKILL)
            await eventually(lambda: local_pids(local)[index] != before)

        run = await generate(workers, SAMPLINGS[sampling], {20: kill})
    assert run.done.token_ids == expected
    await eventually(lambda: ("behind", run.lengths[20]) in sent_again(local)[told:])
    resent = sent_again(local)[told:]
    assert [resync for resync in resent if resync[0] == "behind"] == [("behind", run.lengths[20])]
    assert {resync for resync in resent if resync[0] != "behind"} <= {("lost", 1)}


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [True, False])
async def test_no_stage_outlives_the_target_that_started_it(is_killed: bool, tmp_path: Path):
    target = WorkerProcess("target", tmp_path, "--local-stages", "2", "--threads", "1")
    try:
        await asyncio.to_thread(lambda: target.address)
        pids = local_pids(target)
        assert len(pids) == 2
        if is_killed:
            os.kill(pids[1], signal.SIGSTOP)  # it can do nothing about its own end
            target.kill()
        else:
            assert await asyncio.to_thread(target.stop) == 0
        await eventually(lambda: all(map(is_gone, pids.values())))
    finally:
        target.close()


@pytest.mark.slow
async def test_a_target_told_to_stop_before_its_stages_serve_leaves_none(tmp_path: Path):
    target = WorkerProcess("target", tmp_path, "--local-stages", "2", "--threads", "1")
    try:
        await eventually(lambda: bool(_children(target.pid)))
        pids = _children(target.pid)
        assert await asyncio.to_thread(target.stop) == 0
        await eventually(lambda: all(map(is_gone, pids)))
        assert target.rest_of_stdout() == b""
    finally:
        target.close()


def _children(pid: int) -> list[int]:
    return [
        int(child)
        for tasks in Path(f"/proc/{pid}/task").glob("*/children")
        for child in tasks.read_text(encoding="ascii").split()
    ]


@pytest.mark.slow
async def test_a_hung_stage_without_a_spare_is_a_typed_error_and_health_tells(cut: Cut):
    settings = SAMPLINGS["greedy"].model_copy(update={"retry": 0.0})
    async with links(cut.target.address, None) as workers:
        expected = (await generate(workers, SAMPLINGS["greedy"])).done.token_ids
        hung = cut.stages[1]

        async def hang() -> None:
            os.kill(hung.pid, signal.SIGSTOP)

        try:
            async with asyncio.timeout(SILENT_S):
                with pytest.raises(LinkError):
                    await generate(workers, settings, {10: hang})
            await eventually(lambda: "the chain is not whole" in cut.target.stderr)
            assert _health(cut.target.address) == {"readiness": "NOT_SERVING", "liveness": "SERVING"}
        finally:
            os.kill(hung.pid, signal.SIGCONT)
        await eventually(lambda: _health(cut.target.address)["readiness"] == "SERVING")
        assert (await generate(workers, SAMPLINGS["greedy"])).done.token_ids == expected


def _health(address: str) -> dict[str, str]:
    with grpc.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        names = health_pb2.HealthCheckResponse.ServingStatus.Name
        return {
            name: names(check(health_pb2.HealthCheckRequest(service=name), timeout=LIMIT_S).status)
            for name in ("readiness", "liveness")
        }


@pytest.fixture(scope="module")
def spared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cut]:
    started = Cut(tmp_path_factory.mktemp("spared"), has_spare=True)
    yield started
    started.close()


async def _disturbed(cut: Cut, sampling: str, action: Callable[[], Awaitable[None]]) -> list[int]:
    """Generate once in peace and once with `action` after round 10, and return the lengths of the second."""
    async with links(cut.target.address, None) as workers:
        expected = (await generate(workers, SAMPLINGS[sampling])).done.token_ids
        run = await generate(workers, SAMPLINGS[sampling], {10: action})
    assert run.done.token_ids == expected
    return run.lengths


@pytest.mark.slow
async def test_a_stopping_stage_hands_over_its_slots_and_a_hung_one_is_replaced(spared: Cut):
    assert spared.spare is not None
    leaving, spare = spared.stages[1], spared.spare

    async def stop() -> None:
        assert await asyncio.to_thread(leaving.stop) == 0

    await _disturbed(spared, "greedy", stop)
    await eventually(lambda: "slots were moved" in spared.target.stderr)
    assert f"the spare at {spare.address} took a stage's place" in spared.target.stderr
    assert sent_again(spared.target) == []

    leaving.start()  # it stands by now
    await asyncio.to_thread(lambda: leaving.address)

    async def hang() -> None:
        os.kill(spare.pid, signal.SIGSTOP)

    try:
        lengths = await _disturbed(spared, "sampled", hang)
    finally:
        os.kill(spare.pid, signal.SIGCONT)
    await eventually(lambda: f"the spare at {leaving.address} took a stage's place" in spared.target.stderr)
    await eventually(lambda: ("behind", lengths[10]) in sent_again(spared.target))
    assert [tokens for reason, tokens in sent_again(spared.target) if reason == "behind"] == [lengths[10]]


@pytest.mark.slow
def test_with_ends_at_the_coordinator_the_text_is_the_same(
    tmp_path: Path, truths: dict[tuple[str, ...], list[int]], near: Near, capfd: Capture
):
    private = Cut(tmp_path, ends="coordinator")
    try:
        for mode, sampling in (("plain", ()), ("overlap", SAMPLED), ("stream", SAMPLED)):
            draft = ("--draft", near.draft.address) if mode != "plain" else ()
            text = generated(capfd, "--mode", mode, "--target", private.target.address, *draft, *sampling)
            assert text == _truth(truths, capfd, sampling)
    finally:
        private.close()


@pytest.mark.slow
async def test_a_target_waits_for_a_stage_that_comes_later_and_says_so_once(tmp_path: Path):
    stages = [stage_process(tmp_path, layers) for layers in ("0:3", "3:12")]
    addresses = ",".join([stage.address for stage in stages])
    stages[1].kill()
    target = WorkerProcess("target", tmp_path, "--stages", addresses)
    try:
        await eventually(lambda: "trying again for" in target.stderr)
        stages[1].start()
        assert await asyncio.to_thread(lambda: target.ready["role"]) == "target"
        assert target.stderr.count("trying again for") == 1
    finally:
        close_all([target, *stages])
