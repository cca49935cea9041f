"""The promise of equal bits over real links: a worker with other numerics that takes over ends it, not the text."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specsplit.cli.main import main
from specsplit.core.sections import TargetSettings
from specsplit.core.types import Identity, Proposal, SessionParams, Turn, Verdict
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.rpc.clients import RemoteVerifier
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from specsplit.speculation.options import Speculation
from specsplit.stages.loading import Coordinator
from specsplit.stages.serve import serving_chain
from tests.support.fakes import FakeTarget, FakeTokenizer, plain_tokens
from tests.support.language import WindowedTokenizer
from tests.support.processes import LIMIT_S, WorkerProcess
from tests.support.remote_chains import StageHost, expected_of, once, opened_over, served
from tests.support.rpc_servers import LOOPBACK, verifier_at, wait_until
from tests.support.small_target import PARAMS, PROMPT, TEXT_LENGTH, shards, spare, truth
from tests.support.stage_farm import patient

__all__ = ["patient"]  # a fixture

BITS: dict[str, Any] = {"exactness": "bits", "numerics": "abc"}
OTHERS: list[dict[str, Any]] = [{"numerics": "def"}, {"exactness": "near ties"}]
Capture = pytest.CaptureFixture[str]
PLAIN = Speculation(mode="plain", lookup=False)


class Promising(FakeTarget):
    """A target that says of its forwards what it was told to say."""

    def __init__(self, **said: Any) -> None:
        super().__init__()
        self._said = said

    async def ping(self) -> Identity:
        return replace(await super().ping(), **self._said)


@pytest.mark.parametrize("said", [{}, *OTHERS])
async def test_a_target_that_takes_over_an_address_is_asked_for_its_numerics(said: dict[str, Any]) -> None:
    request = Request(prompt_ids=tuple(b"once upon"), max_new_tokens=24, seed=3, ignore_eos=True)
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        server = await first.enter_async_context(serving(LOOPBACK, [TargetService(Promising(**BITS))]))
        verifier = await second.enter_async_context(verifier_at(server))
        owner = Orchestrator(verifier, None, FakeTokenizer(), PLAIN)
        result, number = None, 0
        async for chunk in owner.stream(request):
            result, number = chunk.result, number + 1
            if number == 4:
                await first.aclose()
                taking_over = TargetService(Promising(**BITS | said))
                await second.enter_async_context(serving(server.address, [taking_over]))
    assert result is not None
    assert list(result.token_ids) == plain_tokens(SessionParams(seed=3), request.prompt_ids, 24)
    assert result.resyncs
    if said:
        assert (result.exactness, "(bits, numerics abc; then" in result.exactness_reason) == ("near ties", True)
    else:
        assert (result.exactness, result.numerics, result.exactness_reason) == ("bits", "abc", "")


class AnyTokenizer(WindowedTokenizer):
    """Takes the tokens of any vocabulary."""

    def __init__(self, vocab_hash: str) -> None:
        self.vocab_hash = vocab_hash

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)


def become(host: StageHost) -> Callable[[], Awaitable[None]]:
    """Return what restarts a stage at its address, with other numerics."""

    async def restart() -> None:
        host.claims |= {"numerics": "def"}
        await host.restart()

    return restart


async def text_over(verifier: RemoteVerifier) -> Result:
    owner = Orchestrator(verifier, None, AnyTokenizer((await verifier.ping()).vocab_hash), PLAIN)
    result = await owner.generate(
        Request(prompt_ids=tuple(PROMPT), max_new_tokens=TEXT_LENGTH, sampling=PARAMS.sampling, seed=3, ignore_eos=True)
    )
    assert list(result.token_ids) == await asyncio.to_thread(truth)
    return result


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("said", [{}, *OTHERS, None])
async def test_a_stage_replaced_in_the_middle_of_a_text(said: dict[str, Any] | None) -> None:
    """A spare takes over that says the same or otherwise; None is the same address, restarted with other numerics."""
    parts, other = shards("stages"), await asyncio.to_thread(spare, 1)
    async with AsyncExitStack() as stack:
        *own, standing_by = await stack.enter_async_context(served([*parts.stages, other]))
        for host in own:
            host.claims |= BITS
        standing_by.claims |= BITS | (said or {})
        spares = [standing_by] if said is not None else []
        addresses = [host.address for host in own], [host.address for host in spares]
        chain = await stack.enter_async_context(opened_over(parts, own, spares, *addresses))
        server = await stack.enter_async_context(serving(LOOPBACK, [TargetService(chain.target)]))
        verifier = await stack.enter_async_context(verifier_at(server))
        before = await verifier.ping()
        assert (before.exactness, before.numerics, before.revision) == ("bits", "abc", 0)
        once(own[1], 43, own[1].stop if said is not None else become(own[1]))
        result, after, again = await text_over(verifier), await verifier.ping(), await text_over(verifier)
        if said == {}:
            assert (result.exactness, result.numerics, after) == ("bits", "abc", before)
        else:
            assert (result.exactness, after.exactness, after.revision) == ("near ties", "near ties", 1)
            assert "a stage of it was replaced by one with other numerics" in result.exactness_reason
        assert (again.exactness, again.exactness_reason) == (after.exactness, ""), "it was promised no more"


@pytest.mark.usefixtures("patient")
async def test_a_coordinator_with_other_numerics_than_its_stages_has_no_bits() -> None:
    parts = shards("coordinator")
    async with served(parts.stages) as hosts:
        for host in hosts:
            host.claims |= BITS
        async with opened_over(parts, hosts, [], [host.address for host in hosts], []) as chain:
            assert parts.ends is not None
            assert parts.ends.head.runner.numerics != "abc"
            assert (chain.link.exactness, chain.link.numerics) == ("bits", "abc")
            identity = await chain.target.ping()
            assert (identity.exactness, identity.numerics) == ("near ties", "")


@pytest.mark.usefixtures("patient")
async def test_a_coordinator_logs_which_stages_differ(caplog: pytest.LogCaptureFixture) -> None:
    parts = shards("stages")
    async with served(parts.stages) as hosts:
        for host in hosts:
            host.claims |= BITS
        hosts[1].claims |= OTHERS[0]
        settings = TargetSettings(stages=tuple(host.address for host in hosts), listen=LOOPBACK)
        coordinator = Coordinator(parts.model, None, expected_of(parts), ())
        async with serving_chain(coordinator, settings) as server, verifier_at(server) as verifier:
            identity = await verifier.ping()
            assert (identity.exactness, identity.numerics) == ("near ties", "")
            await wait_until(lambda: f"{hosts[1].address}: bits, numerics def" in caplog.text)
    assert caplog.text.count("the stages have different numerics") == 1


class Lying:
    """The target at an address that promises bits, and picks another token whenever it is sent a tree."""

    def __init__(self, inner: RemoteVerifier) -> None:
        self._inner = inner

    async def ping(self) -> Identity:
        return replace(await self._inner.ping(), **BITS)

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        if len(proposal):
            proposal = Proposal(proposal.first_node, proposal.root_position)
            verdict = await self._inner.verify(turn, proposal)
            return replace(verdict, token_ids=(verdict.bonus_token ^ 1,))
        return await self._inner.verify(turn, proposal)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def lying_in_front_of(address: str) -> Generator[str]:
    """Serve it on an event loop of its own, and yield where."""
    loop, started, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    where: list[str] = []

    async def serve() -> None:
        async with verifier_at(address) as inner, serving(LOOPBACK, [TargetService(Lying(inner))]) as server:
            where.append(server.address)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(LIMIT_S)
        yield where[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(LIMIT_S)
        loop.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    worker = WorkerProcess("target", tmp_path_factory.mktemp("target"))
    yield worker
    worker.close()


@pytest.mark.parametrize("is_json", [False, True])
def test_a_comparison_fails_where_texts_differ_that_were_promised_equal(
    is_json: bool, target: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ["--prompt", "a b a b a b a b", "--mode", "lookup", "--max-new-tokens", "24", "--seed", "7", "--compare"]
    with lying_in_front_of(target.address) as address:
        code = main(["orchestrate", "--target", address, *options, *(["--json"] if is_json else [])])
        out, err = capfd.readouterr()
        assert main(["doctor", "--target", address]) == 0
        assert "bits, numerics abc" in capfd.readouterr().out
    assert code == 1
    assert err.splitlines()[-1] == (
        "The texts differ although the target promised the same bits for both (numerics abc), which is a bug; please "
        "report it with the model, the prompt and seed 7."
    )
    if is_json:
        compared = json.loads(out)["compare"]
        assert (compared["identical"], compared["promised"], compared["plain"]["exactness"]) == (False, True, "bits")


def test_a_comparison_without_a_promise_or_a_difference_is_well(
    target: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ["--prompt", "a b a b", "--mode", "lookup", "--max-new-tokens", "8", "--compare", "--json"]
    assert main(["orchestrate", "--target", target.address, *options]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["compare"]["identical"] is True
    assert answer["compare"]["promised"] is (answer["exactness"] == "bits")
