"""Whose a session is, over links with certificates: which callers a worker keeps apart."""

from __future__ import annotations

from pathlib import Path

from specsplit.core.types import SessionParams
from specsplit.rpc.clients import RemoteVerifier
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from specsplit.target.engine import TargetEngine
from tests.contract.verifier_contract import without_tree
from tests.support.certificates import Authority
from tests.support.hash_model import hash_model
from tests.support.rounds import script
from tests.support.rpc_servers import LOOPBACK


async def test_named_callers_share_rows_and_others_are_identities(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    engine = TargetEngine(hash_model("target", max_sessions=4, context=80)[0])
    service = TargetService(engine, lambda: engine.num_sessions, engine)
    async with serving(LOOPBACK, [service], security=authority.role("target").security("target")) as server:
        alice, bob = (
            RemoteVerifier(server.address, security=authority.role("gateway", name).security("gateway"))
            for name in ("alice", "bob")
        )
        prompt = [*range(1, 31)]

        async def reused(client: RemoteVerifier, caller: str) -> int:
            """Return how many rows of earlier sessions a session over a prompt finds that goes on where they end."""
            prompt.append(1)
            params = SessionParams(prompt_length=len(prompt), caller=caller)
            turn = script(params, prompt, 0, 1, f"{len(prompt)}")
            verdict = await client.verify(turn, without_tree(turn))
            await client.close(turn.session)
            return verdict.num_reused

        try:
            assert [await reused(alice, ""), await reused(bob, "")] == [0, 0]
            assert await reused(alice, "carol") == 0
            assert await reused(bob, "carol") == len(prompt) - 1
            assert await reused(alice, "") == 31
        finally:
            await alice.aclose()
            await bob.aclose()
            await engine.aclose()
