"""One line of the log for each thing that happens to a session beside its rounds: ids and a reason, and never text.

A session's key lets whoever knows it use the session, so that logs and traces have an id which is made of it instead.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal

from specsplit.core.errors import AccessDenied, LinkError, NoFreeSlot

SessionEvent = Literal["queued", "refused", "preempted", "evicted", "lost"]
"""It waits for a slot; was sent away; gave its rows to older ones; was idle and gave its slot to another one; or its
client, or a worker that it needs, is gone."""
_log = logging.getLogger("specsplit.sessions")


def session_id(key: str) -> str:
    """Return the id of a session in logs and traces, the same in every process."""
    return hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=6).hexdigest()


def log_session(event: SessionEvent, key: str, request_id: str = "", reason: object = "") -> None:
    """Log what happened to the session of a key; any thread may call this."""
    if not _log.isEnabledFor(logging.INFO):
        return
    session = session_id(key)
    request = f" of request {request_id}" if request_id else ""
    because = f": {reason}" if reason else ""
    ids = {"event": event, "session": session, "request": request_id}
    _log.info("%s session %s%s%s", event, session, request, because, extra=ids)


def log_request(event: SessionEvent, request_id: str, status: int, code: str) -> None:
    """Log how a request over HTTP ended that got no answer."""
    ids = {"event": event, "request": request_id}
    _log.info("%s request %s: status %d, %s", event, request_id, status, code, extra=ids)


@contextmanager
def following(
    key: str, request_id: str, is_new: Callable[[str, str], bool] = lambda key, reason: True
) -> Generator[None]:
    """Log the error with which a call for a session ends, if the session is refused, or lost for a reason that is new.

    `is_new` is asked about the session and the reason: a call that is tried again may fail many times a second.
    """
    try:
        yield
    except (NoFreeSlot, AccessDenied) as error:
        log_session("refused", key, request_id, error)
        raise
    except LinkError as error:
        if is_new(key, str(error)):
            log_session("lost", key, request_id, error)
        raise
