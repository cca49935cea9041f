"""What `specsplit top` reads from real workers: their statistics over gRPC, older releases, nobody at an address."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specsplit.cli.main import main
from specsplit.core.errors import Overloaded, PeerMismatch
from specsplit.core.types import Budget, Proposal
from specsplit.draft.engine import DraftEngine
from specsplit.model.loader import load_model
from specsplit.rpc.server import Server, serving
from specsplit.rpc.servicers import DraftService, TargetService
from specsplit.rpc.worker_statistics import StatisticsReader, StatisticsReading, StatisticsRole
from specsplit.target.engine import TargetEngine
from specsplit.telemetry.statistics import TreeCounts
from tests.support.certificates import Authority
from tests.support.fakes import FakeDraft, FakeTarget
from tests.support.processes import WorkerProcess
from tests.support.rounds import plain_text, script
from tests.support.rpc_servers import LOOPBACK, drafter_at, verifier_at
from tests.support.small_target import PARAMS, PROMPT, folder, whole
from tests.support.stage_processes import close_all, generated, stage_process

Capture = pytest.CaptureFixture[str]
READ_S = 10.0
NUM_TOKENS = 4


async def read(role: StatisticsRole, address: str) -> StatisticsReading | None:
    reader = StatisticsReader(role, address)
    try:
        return await reader.read(READ_S)
    finally:
        await reader.aclose()


class OldService(TargetService):
    """A target of the release before statistics: gRPC itself answers the call."""

    def handlers(self) -> grpc.GenericRpcHandler:
        known = super().handlers()

        class Handlers(grpc.GenericRpcHandler):
            def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
                is_new = handler_call_details.method.endswith("/Stats")
                return None if is_new else known.service(handler_call_details)

        return Handlers()


@asynccontextmanager
async def old_target() -> AsyncIterator[Server]:
    async with serving(LOOPBACK, [OldService(FakeTarget())]) as server:
        yield server


async def test_a_target_counts_what_it_does_and_holds() -> None:
    target = TargetEngine(whole())
    target.open_queue(0)
    service = TargetService(target, lambda: target.num_sessions, target)
    async with serving(LOOPBACK, [service]) as server, verifier_at(server) as verifier:
        text = await plain_text(verifier, PROMPT, PARAMS, NUM_TOKENS)
        turn = script(PARAMS, PROMPT, 0, 1, "with a tree")
        wrong = next(token for token in range(3, 9) if token != text[1])
        nodes = Proposal(1, len(PROMPT) - 1, (text[0], text[1], wrong), (0, 1, 1), (-0.5, -0.5, -0.5))
        assert (await verifier.verify(turn, nodes)).accepted == (1, 2)
        for number in range(1, whole().max_sessions):
            await verifier.verify(script(PARAMS, PROMPT, 0, 1, f"{number}"), Proposal(1, len(PROMPT) - 1))
        with pytest.raises(Overloaded):
            await verifier.verify(script(PARAMS, PROMPT, 0, 1, "one too many"), Proposal(1, len(PROMPT) - 1))
        reading = await read("target", server.address)
        await target.aclose()
    assert reading is not None
    held = reading.statistics
    assert reading.uptime_s > 0
    assert (held.num_sessions, held.num_slots, held.num_slots_used) == (4, 4, 4)
    assert (held.num_waiting, held.num_refused, held.num_running) == (0, 1, 0)
    # Four plain tokens, two accepted and one bonus, and a first token for each of the three others.
    assert held.trees == TreeCounts(NUM_TOKENS + 3 + 3, num_tree_rounds=1, num_nodes=3, num_accepted=2)
    steps, num_reused = held.steps, held.num_reused_tokens
    assert steps.num_steps == steps.num_sequences == NUM_TOKENS + 1 + 3
    assert steps.num_rows == 5 * len(PROMPT) + (NUM_TOKENS - 1) + 3 - num_reused
    assert num_reused > 0
    assert steps.busy_s > 0


async def test_a_draft_counts_the_nodes_that_it_offers() -> None:
    draft = DraftEngine(load_model(str(folder()), role="draft", threads=1, max_sessions=2, context=80, record=False))
    service = DraftService(draft, lambda: draft.num_sessions, draft)
    async with serving(LOOPBACK, [service]) as server, drafter_at(server) as drafter:
        proposal = await drafter.propose(script(PARAMS, PROMPT, 0, 1, "drafts"), 0, Budget(4, 2, 2))
        reading = await read("draft", server.address)
        await draft.aclose()
    assert reading is not None
    assert reading.statistics.trees == TreeCounts(num_nodes=len(proposal))
    assert reading.statistics.steps.num_steps == proposal.timings.num_forwards


async def test_an_older_release_is_told_from_another_role(capsys: Capture) -> None:
    async with old_target() as server:
        assert await read("target", server.address) is None
        with pytest.raises(PeerMismatch, match="is no draft"):
            await read("draft", server.address)
        arguments = ["top", "--target", server.address, "--once", "--interval", "0.1"]
        assert await asyncio.to_thread(main, arguments) == 0
        assert "is of an older release, which tells no statistics." in capsys.readouterr().out
        assert await asyncio.to_thread(main, ["top", "--draft", server.address, *arguments[3:]]) == 1
        assert "is no draft" in capsys.readouterr().out


async def test_the_workers_of_a_gateways_settings_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    authority = Authority(tmp_path)
    targets, drafts = (authority.role(role).security(role) for role in ("target", "draft"))
    for name, path in zip(("CERT", "KEY", "CA"), authority.role("gateway").options()[1::2], strict=True):
        monkeypatch.setenv(f"SPECSPLIT_GATEWAY_TLS_{name}", path)
    async with (
        serving(LOOPBACK, [TargetService(FakeTarget())], security=targets) as first,
        serving(LOOPBACK, [TargetService(FakeTarget())], security=targets) as second,
        serving(LOOPBACK, [DraftService(FakeDraft())], security=drafts) as draft,
    ):
        monkeypatch.setenv("SPECSPLIT_GATEWAY_TARGETS", f"m={first.address},m={second.address}")
        monkeypatch.setenv("SPECSPLIT_GATEWAY_DRAFTS", f"m={draft.address}")
        assert await asyncio.to_thread(main, ["top", "--once", "--interval", "0.1", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["workers"]
        assert await asyncio.to_thread(main, ["doctor", "--json"]) == 0
        checks = json.loads(capsys.readouterr().out)["checks"]
    addresses = [("target", first.address), ("target", second.address), ("draft", draft.address)]
    assert [(row["role"], row["address"]) for row in rows] == addresses
    found = [(check["name"], check["detail"].partition(": ")[0]) for check in checks]
    assert [each for each in addresses if each not in found] == []
    assert not any(check["name"] == "cpu" for check in checks), "no model is loaded here"


async def test_top_says_that_a_worker_speaks_no_tls(tmp_path: Path, capsys: Capture) -> None:
    options = Authority(tmp_path).role("gateway").options()
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server:
        arguments = ["top", "--target", server.address, "--once", "--interval", "0.1", *options]
        assert await asyncio.to_thread(main, arguments) == 1
    reason = "it speaks no TLS; start it with the --tls options, too"
    assert f"{server.address} cannot be reached: {reason}" in capsys.readouterr().out


def test_top_shows_a_target_its_stage_and_a_draft(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stage = stage_process(tmp_path, "0:12")
    target = WorkerProcess("target", tmp_path, "--stages", stage.address)
    draft = WorkerProcess("draft", tmp_path, "--threads", "1")
    addresses = ["--target", target.address, "--draft", draft.address, "--stage", stage.address]
    once = ["--once", "--interval", "0.1"]
    try:
        text = generated(capfd, *addresses[:4], "--mode", "pingpong")
        assert main(["top", *addresses, *once, "--json"]) == 0
        rows = {row["role"]: row for row in json.loads(capfd.readouterr().out)["workers"]}
        assert main(["top", *addresses, *once]) == 0
        table = capfd.readouterr().out
    finally:
        close_all([target, draft])
    assert [rows[role]["state"] for role in ("target", "draft", "stage")] == ["ok"] * 3
    assert rows["target"]["num_slots"] == 4
    assert rows["target"]["num_slots_warm"] == 1
    assert rows["stage"]["layers"] == "0:12"
    assert rows["stage"]["num_slots_used"] == 1, "the warm slot's rows"
    assert (rows["stage"]["num_sessions"], rows["stage"]["num_slots_warm"]) == (None, None), "no stage knows them"
    assert re.search(r" - +0 +1/4 open or warm ", next(line for line in table.splitlines() if stage.address in line))
    assert len(text) > 0
    assert all(address in table for address in addresses[1::2])
    assert main(["top", "--target", target.address, "--stage", stage.address, *once]) == 1
    assert f"{target.address} cannot be reached" in capfd.readouterr().out
    close_all([stage])


def test_top_needs_something_to_watch(capsys: Capture) -> None:
    assert main(["top", "--once"]) == 2
    assert capsys.readouterr().err.startswith("Error: There is nothing to watch")
    assert main(["top", "--target", "nowhere", "--once"]) == 2
    assert "nowhere" in capsys.readouterr().err
