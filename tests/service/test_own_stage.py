"""A target that holds its first layers itself: the text of one process, whatever happens to the other stages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from specsplit.core.sections import StageSettings
from tests.support.disturbed import SAMPLINGS, generate, links, own_cache
from tests.support.processes import WorkerProcess, run
from tests.support.stage_processes import (
    SAMPLED,
    close_all,
    eventually,
    generated,
    sent_again,
    served_stages,
    stage_process,
)

__all__ = ["own_cache"]  # a fixture

Capture = pytest.CaptureFixture[str]


def target_with(folder: Path, layers: str, stages: str, *arguments: str) -> WorkerProcess:
    return WorkerProcess("target", folder, "--layers", layers, "--stages", stages, "--threads", "1", *arguments)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with served_stages(StageSettings(layers="5:12", threads=1)) as addresses:
        started = target_with(tmp_path_factory.mktemp("own"), "0:5", addresses[0])
        yield started
        started.close()


@pytest.mark.parametrize("sampling", [(), SAMPLED])
def test_the_text_is_that_of_one_process(sampling: tuple[str, ...], target: WorkerProcess, capfd: Capture) -> None:
    expected = generated(capfd, "--mode", "plain", *sampling)
    for mode in ("plain", "auto"):
        assert generated(capfd, "--mode", mode, "--target", target.address, *sampling) == expected


@pytest.mark.slow
def test_with_both_ends_here_too_the_text_is_the_same(tmp_path: Path, capfd: Capture) -> None:
    last = stage_process(tmp_path, "5:12", "--ends", "coordinator")
    private = target_with(tmp_path, "0:5", last.address, "--ends", "coordinator")
    try:
        assert generated(capfd, "--target", private.address, *SAMPLED) == generated(capfd, "--mode", "plain", *SAMPLED)
    finally:
        close_all([private, last])


async def test_a_killed_stage_behind_it_is_sent_what_it_held(tmp_path: Path) -> None:
    behind = stage_process(tmp_path, "5:12")
    target = target_with(tmp_path, "0:5", behind.address)
    try:
        async with links(target.address, None) as workers:
            expected = (await generate(workers, SAMPLINGS["sampled"])).done.token_ids

            async def kill() -> None:
                behind.kill()
                behind.start()
                await asyncio.to_thread(lambda: behind.address)

            disturbed = await generate(workers, SAMPLINGS["sampled"], {20: kill})
        assert disturbed.done.token_ids == expected
        await eventually(lambda: ("behind", disturbed.lengths[20]) in sent_again(target))
    finally:
        close_all([target, behind])


@pytest.mark.parametrize(
    ("layers", "said"), [("2:5", "are the first ones, from 0 on, not 2:5"), ("0:13", "has 12 layers, 0 to 11")]
)
def test_other_layers_than_the_first_are_refused(layers: str, said: str) -> None:
    code, _, err = run("target", "--layers", layers, "--stages", "127.0.0.1:7101")
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
