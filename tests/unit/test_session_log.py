"""The log: one line for what happens to a session, as JSON or for people, from the level that was chosen."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from specsplit.cli import logs
from specsplit.core.errors import AccessDenied, Overloaded, SlotBehind, WorkerUnreachable
from specsplit.core.sections import TargetSettings
from specsplit.core.types import Proposal
from specsplit.orchestrator.events import RequestEvents
from specsplit.target.engine import TargetEngine
from specsplit.telemetry import spans
from specsplit.telemetry.session_log import following, log_session, session_id
from specsplit.telemetry.spans import Span
from tests.support.root_log import GRPC, root_log
from tests.support.rounds import script
from tests.support.small_target import PARAMS, PROMPT, whole
from tests.unit.test_sessions import HandClock

KEY = "0123456789abcdef" * 2


@pytest.fixture
def root() -> Iterator[io.StringIO]:
    """Give what a process logs to stderr."""
    with root_log() as stream:
        yield stream


def test_a_line_of_json_has_the_ids_and_no_key(root: io.StringIO) -> None:
    logs.set_up_logging(TargetSettings(log_format="json"), "target")
    spans.record_to(list[Span]().append)
    try:
        with spans.span("rpc") as span:
            log_session("refused", KEY, "request-1", "all sessions are in use")
    finally:
        spans.record_to(None)
    logs.note("Draining for up to 2 s.")
    refused, noted = map(json.loads, root.getvalue().splitlines())
    assert isinstance(span, Span)
    expected = {"level": "info", "logger": "specsplit.sessions", "role": "target", "event": "refused"}
    expected |= {"session": session_id(KEY), "request": "request-1", "trace_id": f"{span.trace_id:032x}"}
    assert refused.items() >= expected.items()
    assert refused["message"] == f"refused session {session_id(KEY)} of request request-1: all sessions are in use"
    assert (noted["message"], noted["role"]) == ("Draining for up to 2 s.", "target")
    assert KEY not in root.getvalue()


def test_a_log_that_cannot_be_written_ends_no_service(root: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str, /) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stderr", Full())
    logging.getLogger().handlers = []
    logs.set_up_logging(TargetSettings(), "target")
    logs.note("Draining for up to 2 s.")
    assert root.getvalue() == ""


def test_the_level_that_was_chosen_is_kept(root: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECSPLIT_DEBUG", raising=False)
    logs.set_up_logging(TargetSettings(log_level="warning"), "target")
    log_session("queued", KEY)
    logging.getLogger("specsplit.rpc").warning("something is wrong")
    assert root.getvalue() == "something is wrong\n"


def test_grpc_writes_no_traceback_of_a_call_cut_before_its_first_step(root: io.StringIO) -> None:
    logs.set_up_logging(TargetSettings(), "target")
    for error in (asyncio.CancelledError(), ValueError("a mistake")):
        try:
            raise error
        except (asyncio.CancelledError, ValueError):
            logging.getLogger(GRPC).exception("Exception not handled by _handle_exceptions")
    assert "CancelledError" not in root.getvalue()
    assert "ValueError: a mistake" in root.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_collector_that_is_away_disturbs_no_answer_on_a_terminal(
    *, is_terminal: bool, root: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECSPLIT_DEBUG", raising=False)
    monkeypatch.setattr(root, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", root)
    monkeypatch.setattr(logging.getLogger("opentelemetry"), "handlers", [])
    logging.getLogger().handlers = []
    logs.set_up_logging()
    # The exporter's own logger leaves out what it has said before.
    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc").warning("Transient error")
    assert root.getvalue() == ("" if is_terminal else "Transient error\n")


def test_errors_of_a_session_are_logged_once_each_and_go_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specsplit.sessions")
    errors = [Overloaded("full", 1.0), AccessDenied("not yours"), WorkerUnreachable("a stage is gone"), SlotBehind(3)]
    for error in errors:
        with pytest.raises(type(error)), following(KEY, "r"):
            raise error
    events: list[Any] = [getattr(record, "event", None) for record in caplog.records]
    assert events == ["refused", "refused", "lost"], "falling behind is how a worker is sent what it lacks"


async def test_sessions_that_lose_their_slots_are_logged_with_their_requests(caplog: pytest.LogCaptureFixture) -> None:
    clock, params, model = HandClock(), PARAMS, whole()
    caplog.clear()  # a load is logged, too
    caplog.set_level(logging.INFO, "specsplit.sessions")
    target = TargetEngine(model, ttl_s=60.0, grace_s=5.0, clock=clock)
    keys = [f"key-{number}" for number in range(whole().max_sessions + 1)]
    try:
        for number, key in enumerate(keys):
            clock.now_s += 10.0
            opening = type(params)(params.sampling, seed=1, max_tokens=4, request_id=f"request-{number}")
            await target.verify(script(opening, PROMPT, 0, 1, key), Proposal(1, len(PROMPT) - 1))
        clock.now_s += 55.0
        assert await target.sweep() == whole().max_sessions - 1
    finally:
        await target.aclose()
    assert caplog.messages[0] == (
        f"evicted session {session_id('key-0')} of request request-0: it was idle, and its slot goes to a new one"
    )
    assert caplog.messages[1:] == [
        f"lost session {session_id(f'key-{number}')} of request request-{number}: its client was silent for 60 s"
        for number in range(1, whole().max_sessions)
    ]


def test_a_draft_that_is_away_loses_no_session(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specsplit")
    events = RequestEvents()
    events.key, events.request_id = KEY, "request-1"
    events.degrade("draft", "unreachable")
    assert caplog.messages == []
    events.degrade("target", "unreachable")
    assert caplog.messages == [f"lost session {session_id(KEY)} of request request-1: the target is unreachable"]
