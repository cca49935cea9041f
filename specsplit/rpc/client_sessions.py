"""The sessions of one worker as its clients use them: whose each is, and on which connection it was heard last.

Another identity can neither use nor end a session. A session whose connection has ended has lost its client.
Knows neither rounds nor engines; event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from specsplit.core.errors import AccessDenied
from specsplit.core.types import SessionParams, Turn
from specsplit.limits import MAX_KNOWN_SESSIONS
from specsplit.rpc.auth import PeerIdentity, current_peer


@dataclass(slots=True, eq=False)
class Connection:
    """One stream of rounds, with the sessions that were heard last on it."""

    sessions: dict[str, _Client] = field(default_factory=dict[str, "_Client"])
    on_end: Callable[[Sequence[str]], None] | None = None
    """Takes those sessions when the client is gone."""

    def end(self) -> None:
        """Let its sessions lose their client; again does nothing."""
        sessions, self.sessions = self.sessions, {}
        for client in sessions.values():
            client.connection = None
        if self.on_end is not None and sessions:
            self.on_end(list(sessions))


@dataclass(slots=True, eq=False)
class _Client:
    """Who uses a session."""

    owner: str
    """The identity that opened it, empty if no certificate proved one."""
    connection: Connection | None = None
    used_s: float = 0.0
    num_calls: int = 0
    """Calls under way; a session that has some is kept."""
    has_ended: bool = False
    """Whether its end has been asked for, and nothing else since."""
    reasons: set[str] = field(default_factory=set[str])
    """Why calls have failed since one succeeded."""


_current: ContextVar[Connection | None] = ContextVar("specsplit_connection", default=None)


@contextmanager
def serving_connection() -> Generator[Connection]:
    """Let rounds begun in this block be those of a connection, which the caller ends."""
    connection = Connection()
    token = _current.set(connection)
    try:
        yield connection
    finally:
        _current.reset(token)


class ClientSessions:
    """Who uses each session of a worker; `lost` is called with sessions whose client has vanished.

    A session is forgotten once nobody used it for `keep_s`, which is longer than an engine keeps it.
    """

    def __init__(self, lost: Callable[[Sequence[str]], None], keep_s: float = 120.0) -> None:
        self.keep_s = keep_s
        self._lost = lost
        self._clients: dict[str, _Client] = {}
        """The least recently used first."""

    def __len__(self) -> int:
        return len(self._clients)

    @contextmanager
    def using(self, session: str, *, is_last: bool = False) -> Generator[None]:
        """Use a session as the current peer for the length of the block; it opens one that nobody has.

        A call of its own that is cancelled has lost its client; a round of a connection was only withdrawn.

        Raises:
            AccessDenied: on entry, if the session is another identity's.
        """
        peer = current_peer()
        self._forget_old()
        owner = peer.name if peer.is_authenticated else ""
        client = self._clients.get(session) or _Client(owner)
        if client.owner != owner:
            raise AccessDenied("The session belongs to another identity.")
        self._use(session, client)
        connection = _current.get()
        if connection is not None:
            self._hear(session, client, connection)
        client.num_calls += 1
        client.has_ended = is_last
        try:
            yield
            client.reasons.clear()
        except asyncio.CancelledError:
            if connection is None and not is_last:
                self._lost([session])
            raise
        finally:
            client.num_calls -= 1
            self._use(session, client)
            if client.has_ended and not client.num_calls:  # a round that was withdrawn may leave after the end
                self._forget(session)

    def is_new(self, session: str, reason: str) -> bool:
        """Return whether a reason of a failed call is none of those since a call for the session succeeded; note it."""
        reasons = self._clients[session].reasons if session in self._clients else set[str]()
        is_new = reason not in reasons
        reasons.add(reason)
        return is_new

    def _use(self, session: str, client: _Client) -> None:
        self._clients.pop(session, None)
        self._clients[session] = client
        client.used_s = time.monotonic()

    def _hear(self, session: str, client: _Client, connection: Connection) -> None:
        # A session that goes on over another connection leaves the earlier one: its client has only moved.
        if client.connection is not connection:
            if client.connection is not None:
                client.connection.sessions.pop(session, None)
            client.connection, connection.sessions[session] = connection, client
            connection.on_end = self._lost

    def _forget(self, session: str) -> None:
        client = self._clients.pop(session)
        if client.connection is not None:
            client.connection.sessions.pop(session, None)

    def _forget_old(self) -> None:
        """Forget sessions that nobody used for long, from the least recently used on."""
        old_s = time.monotonic() - self.keep_s
        while self._clients:
            session, client = next(iter(self._clients.items()))
            is_surplus = len(self._clients) > MAX_KNOWN_SESSIONS and not client.owner and not client.num_calls
            if client.used_s > old_s and not is_surplus:
                return
            if client.num_calls:
                self._use(session, client)
            else:
                self._forget(session)


def with_opener(turn: Turn, peer: PeerIdentity) -> Turn:
    """Return an opening with its peer as the opener, unless the peer is believed about the caller."""
    return turn if turn.opening is None else replace(turn, opening=opened_by(turn.opening, peer))


def opened_by(params: SessionParams, peer: PeerIdentity) -> SessionParams:
    """Return parameters with their peer as the opener, unless the peer is believed about the caller."""
    if peer.may_name_callers and (params.caller or not peer.is_authenticated):
        return params
    return replace(params, opener=peer.name)


def caller_of_peer(peer: PeerIdentity) -> str:
    """Return the caller of a call that names none; empty if it comes from this machine without a certificate."""
    return "" if peer.may_name_callers and not peer.is_authenticated else peer.name
