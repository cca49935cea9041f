"""Whose a session of a worker is, on which connection it was heard, and when its client counts as vanished."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specsplit.core.errors import AccessDenied
from specsplit.core.types import SessionParams
from specsplit.engine import callers
from specsplit.rpc.auth import Guard, peer_identity
from specsplit.rpc.client_sessions import ClientSessions, serving_connection, with_opener
from tests.support.rounds import script

ALICE, BOB = "spiffe://specsplit/gateway/alice", "spiffe://specsplit/gateway/bob"


def context(*uris: str, peer: str = "ipv4:10.0.0.7:4711") -> Any:
    return SimpleNamespace(auth_context=lambda: {"peer_uri": [uri.encode() for uri in uris]}, peer=lambda: peer)


def become(uri: str) -> None:
    Guard(is_secure=True).admit(context(uri), "/specsplit.v1.TargetService/Ping")


def tracked(keep_s: float = 120.0) -> tuple[ClientSessions, list[str]]:
    lost: list[str] = []
    return ClientSessions(lost.extend, keep_s), lost


def use(sessions: ClientSessions, keys: Sequence[str], *, is_last: bool = False) -> None:
    for key in keys:
        with sessions.using(key, is_last=is_last):
            pass


def test_a_session_is_its_openers_until_it_ends() -> None:
    sessions, _ = tracked()
    become(ALICE)
    with sessions.using("s"):
        become(BOB)
        for is_last in (False, True):
            with pytest.raises(AccessDenied, match="another identity"), sessions.using("s", is_last=is_last):
                pass
    with pytest.raises(AccessDenied):
        use(sessions, ["s"])
    become(ALICE)
    use(sessions, ["s"], is_last=True)
    assert len(sessions) == 0
    become(BOB)
    use(sessions, ["s"])


def test_a_session_is_forgotten_when_its_last_call_leaves_after_its_end() -> None:
    sessions, _ = tracked()
    become(ALICE)
    with sessions.using("s"):
        use(sessions, ["s"], is_last=True)
        assert len(sessions) == 1
    assert len(sessions) == 0
    with sessions.using("s"):
        use(sessions, ["s"], is_last=True)
        use(sessions, ["s"])  # it began anew
    assert len(sessions) == 1


def test_sessions_that_nobody_uses_are_forgotten_and_those_in_use_are_not() -> None:
    sessions, _ = tracked(keep_s=0.0)
    become(ALICE)
    with sessions.using("long"):
        use(sessions, [f"short-{number}" for number in range(100)])
        assert len(sessions) <= 2
        become(BOB)
        with pytest.raises(AccessDenied):
            use(sessions, ["long"])


def test_without_certificates_anybody_may_use_a_session() -> None:
    sessions, lost = tracked()
    for host in ("ipv4:10.0.0.7:1", "ipv4:10.0.0.8:1"):
        Guard(is_secure=False).admit(context(peer=host), "/specsplit.v1.TargetService/Ping")
        use(sessions, ["s"])
    assert not lost


def test_a_connection_that_ends_loses_the_sessions_heard_on_it_last() -> None:
    sessions, lost = tracked()
    with serving_connection() as first:
        use(sessions, ["stays", "moves", "ends", "calls"])
        use(sessions, ["ends"], is_last=True)
    with serving_connection() as second:
        use(sessions, ["moves"])
    use(sessions, ["calls", "alone"])
    first.end()
    first.end()
    assert lost == ["stays", "calls"], "a call of its own does not take a session from its connection"
    second.end()
    assert lost == ["stays", "calls", "moves"]


async def test_a_call_that_is_broken_off_loses_its_client_and_a_round_does_not() -> None:
    sessions, lost = tracked()

    async def serve(key: str) -> None:
        with sessions.using(key):
            await asyncio.Event().wait()

    async def break_off(key: str) -> None:
        serving = asyncio.create_task(serve(key))
        await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    await break_off("call")
    with serving_connection():
        await break_off("round")
    assert lost == ["call"]


def test_no_more_than_so_many_sessions_without_an_owner_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specsplit.rpc.client_sessions.MAX_KNOWN_SESSIONS", 10)
    sessions, lost = tracked()
    Guard(is_secure=False).admit(context(), "/specsplit.v1.TargetService/Ping")
    with serving_connection() as connection:
        use(sessions, [f"{number}" for number in range(50)])
    assert len(sessions) == 11
    connection.end()
    assert lost == [f"{number}" for number in range(39, 50)]


OPENING = SessionParams(caller="carol")


@pytest.mark.parametrize(
    ("uri", "peer", "caller", "counted", "salt"),
    [
        (None, "ipv4:127.0.0.1:1", "carol", "carol", "carol"),
        (None, "ipv6:%5B::1%5D:1", "carol", "carol", "carol"),
        (None, "unix:", "carol", "carol", "carol"),
        (None, "ipv4:127.0.0.1:1", "", "", ""),
        (None, "ipv4:10.0.0.7:1", "carol", "ipv4:10.0.0.7", "ipv4:10.0.0.7 carol"),
        (None, "ipv4:10.0.0.7:1", "", "ipv4:10.0.0.7", "ipv4:10.0.0.7 "),
        (ALICE, "ipv4:10.0.0.7:1", "carol", "carol", "carol"),
        (ALICE, "ipv4:10.0.0.7:1", "", ALICE, f"{ALICE} "),
        ("spiffe://specsplit/stage", "ipv4:127.0.0.1:1", "carol", "spiffe://specsplit/stage", None),
    ],
)
def test_a_caller_is_believed_from_this_machine_and_from_gateways(
    uri: str | None, peer: str, caller: str, counted: str, salt: str | None
) -> None:
    turn = script(replace(OPENING, caller=caller), [1, 2], 0, 1, "s")
    found = with_opener(turn, peer_identity(context(*([uri] if uri else []), peer=peer)))
    assert found == turn, "whose it is, is no part of a round's body"
    assert found.opening is not None
    assert callers.caller_of(found.opening) == counted
    assert salt is None or callers.salt(found.opening) == salt


def test_a_turn_that_opens_nothing_has_no_opener() -> None:
    turn = script(OPENING, [1, 2, 3], 2, 2, "s")
    assert turn.opening is None
    assert with_opener(turn, peer_identity(context())) is turn
