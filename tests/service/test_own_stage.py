"""A target that holds its first layers itself: the text of one process, whatever happens to the other stages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from specsplit.core.sections import StageSettings, TargetSettings
from specsplit.core.types import SessionParams
from specsplit.rpc.auth import LinkRole
from specsplit.rpc.clients import RemoteVerifier
from specsplit.stages import loading, serve
from tests.support.certificates import Authority
from tests.support.disturbed import SAMPLINGS, generate, links, own_cache
from tests.support.processes import LIMIT_S, WorkerProcess, run
from tests.support.rounds import plain_text
from tests.support.rpc_servers import LOOPBACK, CountingProxy
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

PROMPT = [5, 6, 7, 8, 9]
PARAMS = SessionParams(prompt_length=len(PROMPT), max_tokens=64)
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


def tls(authority: Authority, role: LinkRole) -> dict[str, Any]:
    paths = authority.role(role)
    return {"tls_cert": str(paths.cert), "tls_key": str(paths.key), "tls_ca": str(paths.ca)}


async def test_a_chain_cut_under_mtls_is_restored_for_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That happens in the call of an orchestrator, whose certificate is no claim to the target's own stage."""
    monkeypatch.setattr(serve, "LOOK_S", 3600.0)  # nobody but the request restores it
    authority = Authority(tmp_path / "ca")
    shape: dict[str, Any] = {"model": "embedded", "context": 256, "threads": 1}
    async with AsyncExitStack() as stack:
        behind = StageSettings(layers="5:12", **shape, **tls(authority, "stage"))
        (address,) = stack.enter_context(served_stages(behind))
        proxy = await stack.enter_async_context(CountingProxy(int(address.rpartition(":")[2])).running())
        own: dict[str, Any] = {"layers": "0:5", "stages": (proxy.address,), "listen": LOOPBACK}
        settings = TargetSettings(**own, **shape, **tls(authority, "target"))
        coordinator = await asyncio.to_thread(loading.load_coordinator, settings)
        server = await stack.enter_async_context(serve.serving_chain(coordinator, settings))
        verifier = RemoteVerifier(server.address, security=authority.role("orchestrator").security("orchestrator"))
        stack.push_async_callback(verifier.aclose)
        text = await plain_text(verifier, PROMPT, PARAMS, 4)
        proxy.cut()
        async with asyncio.timeout(LIMIT_S):
            assert await plain_text(verifier, PROMPT, PARAMS, 4) == text


@pytest.mark.parametrize(
    ("layers", "said"), [("2:5", "are the first ones, from 0 on, not 2:5"), ("0:13", "has 12 layers, 0 to 11")]
)
def test_other_layers_than_the_first_are_refused(layers: str, said: str) -> None:
    code, _, err = run("target", "--layers", layers, "--stages", "127.0.0.1:7101")
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
