"""A gateway's certificate is replaced by one with another name, between texts and within: none fails, none differs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.errors import AccessDenied
from specsplit.core.types import Proposal, SessionParams
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result, RetryPolicy
from specsplit.rpc import rounds
from specsplit.rpc.clients import RemoteDrafter, RemoteVerifier
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import DraftService, TargetService
from specsplit.speculation.options import Speculation
from tests.contract.session_contract import Script
from tests.contract.verifier_contract import without_tree
from tests.support.bad_network import BadNetwork
from tests.support.certificates import Authority, Paths
from tests.support.fakes import FakeDraft, FakeTarget, FakeTokenizer, good_guess, plain_tokens
from tests.support.processes import LIMIT_S
from tests.support.remote_chains import mended, num_rows, opened_over, served
from tests.support.rounds import script
from tests.support.rpc_servers import LOOPBACK, wait_until
from tests.support.small_target import PARAMS, shards
from tests.support.small_target import PROMPT as STAGED_PROMPT

PROMPT, LENGTH = tuple(b"Once upon a time there was a fork " * 8), 40
EXPECTED = tuple(plain_tokens(SessionParams(seed=7), PROMPT, LENGTH))
REQUEST = Request(prompt_ids=PROMPT, max_new_tokens=LENGTH, seed=7, ignore_eos=True)
MODES: tuple[Mode, ...] = ("plain", "pingpong", "overlap", "stream")


@dataclass
class Renamed:
    """Workers behind networks that can be cut, and their gateway, whose certificate can get another name."""

    draft: RemoteDrafter
    target: RemoteVerifier
    networks: tuple[BadNetwork, ...]
    rename: Callable[[], None]

    async def cut(self) -> None:
        for network in self.networks:
            await network.cut()

    async def rename_and_cut(self) -> None:
        self.rename()
        await self.cut()

    async def text(self, mode: Mode, faults: dict[int, Callable[[], object]] | None = None) -> Result:
        """Generate; after round r, `faults[r]` happens."""
        speculation = Speculation(mode=mode, lookup=False, nodes=4, depth=3, branching=2)
        patience = RetryPolicy(draft_s=float(LIMIT_S))
        owner = Orchestrator(self.target, self.draft, FakeTokenizer(), speculation, retry_policy=patience)
        number, result = 0, None
        async with aclosing(owner.stream(REQUEST)) as chunks:
            async for chunk in chunks:
                happened = (faults or {}).get(number, lambda: None)()
                if isinstance(happened, Awaitable):
                    await happened
                number, result = number + 1, chunk.result
        assert result is not None
        return result


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[Renamed]:
    authority, numbers = Authority(folder / "ca"), count()
    mine = Paths(folder / "mine.pem", folder / "mine.key", folder / "ca.pem")
    mine.replace_with(authority.role("gateway", "first"))
    security = mine.security("gateway")

    def rename() -> None:
        mine.replace_with(authority.role("gateway", f"named-{next(numbers)}"))
        assert security.certificates is not None
        security.certificates.look()

    async with AsyncExitStack() as stack:
        addresses: list[str] = []
        networks: list[BadNetwork] = []
        for role, service in (("draft", DraftService(FakeDraft(good_guess))), ("target", TargetService(FakeTarget()))):
            own = authority.role(role).security(role)
            server = await stack.enter_async_context(serving(LOOPBACK, [service], security=own))
            networks.append(await stack.enter_async_context(BadNetwork(server.address)))
            addresses.append(networks[-1].address)
        draft, target = RemoteDrafter(addresses[0], security=security), RemoteVerifier(addresses[1], security=security)
        for client in (draft, target):
            stack.push_async_callback(client.aclose)
        yield Renamed(draft, target, tuple(networks), rename)


@pytest.mark.parametrize("mode", MODES)
async def test_texts_before_and_after_another_name_are_plain_decodings(
    mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt travels in a stream of its own, and the rounds after it in a stream that may be older than the name."""
    monkeypatch.setattr(rounds, "SMALL_BYTES", 200)
    async with gateway(tmp_path) as renamed:
        for _ in range(3):
            result = await renamed.text(mode)
            assert (result.token_ids, result.degraded, result.resyncs) == (EXPECTED, (), ())
            renamed.rename()


@pytest.mark.parametrize("has_large", [False, True])
@pytest.mark.parametrize("mode", MODES)
async def test_another_name_within_a_text_changes_no_token(
    mode: Mode, has_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SMALL_BYTES", 200 if has_large else 1 << 16)
    async with gateway(tmp_path) as renamed:
        faults = {1: renamed.rename, 3: renamed.rename_and_cut, 5: renamed.cut, 6: renamed.rename_and_cut}
        for _ in range(2):
            result = await renamed.text(mode, faults)
            assert result.token_ids == EXPECTED
            lost = [resync for resync in result.resyncs if (resync.worker, resync.reason) == ("target", "slot_lost")]
            assert lost, "the target still holds the session, and gives it to nobody else"
        needs_no_tree = mode in ("plain", "stream")
        async with asyncio.timeout(20):
            while True:
                result = await renamed.text(mode)
                assert (result.token_ids, result.resyncs) == (EXPECTED, ())
                if needs_no_tree or result.speculative_decoding.num_accepted_draft_tokens > 0:
                    break  # a draft that failed is left alone for a while, which a short text may spend without it


async def test_a_session_of_the_name_before_is_refused_to_the_new_one(tmp_path: Path) -> None:
    async with gateway(tmp_path) as renamed:
        turn = Script().first()
        await renamed.target.verify(turn, without_tree(turn))
        await renamed.rename_and_cut()
        await renamed.target.ping()
        with pytest.raises(AccessDenied):
            await renamed.target.verify(turn, without_tree(turn))


async def test_a_target_with_another_name_keeps_its_stages_and_their_rows(tmp_path: Path) -> None:
    """Stages obey the name that opened their streams alone, so these are opened anew, and nothing is sent again."""
    authority = Authority(tmp_path / "ca")
    mine = Paths(tmp_path / "mine.pem", tmp_path / "mine.key", tmp_path / "ca.pem")
    mine.replace_with(authority.role("target", "first"))
    security, parts, keys = mine.security("target"), shards(), ["one", "two", "three"]
    certificates = security.certificates
    assert certificates is not None
    async with (
        served(parts.stages, security=authority.role("stage").security("stage")) as hosts,
        opened_over(parts, hosts, [], [host.address for host in hosts], [], security=security) as chain,
    ):
        for key in keys:
            opening = script(PARAMS, STAGED_PROMPT, 0, 1, key)
            await chain.target.verify(opening, Proposal(1, len(STAGED_PROMPT) - 1))
        for number, key in enumerate(keys):
            mine.replace_with(authority.role("target", f"named-{number}"))
            certificates.look()
            await chain.target.close(key)
            await wait_until(lambda: chain.link.trouble is not None)
            await mended(chain)
            left = [0] * (number + 1) + [len(STAGED_PROMPT)] * (2 - number) + [0]
            await wait_until(lambda left=left: [num_rows(host) for host in hosts] == [left] * len(hosts))
        assert (chain.resent, chain.link.statistics.num_reconnects) == ([], 3)
