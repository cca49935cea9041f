"""One request over all processes: one trace from HTTP to the last stage, log lines with its ids, and its text nowhere.

A gateway with keys, a draft, and a target with one session whose two stages see no token ids (ends = coordinator).
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from specsplit.cli.main import main
from specsplit.gateway.keys import new_key
from specsplit.rpc.pb import common_pb2
from specsplit.stages.codec import encode
from specsplit.telemetry import names
from tests.support.gateways import GatewayProcess
from tests.support.processes import LIMIT_S, WorkerProcess
from tests.support.recording_proxy import RecordingProxy, recorded
from tests.support.stage_processes import eventually, stage_process
from tests.unit.test_stage_frames import packet

KEY, LINE = new_key("alice")
MARKER = "zebra_marker_7431"
PROMPT = f"def {MARKER}(first, second):\n    return first"
TRACE_ID, CALLER_SPAN = "a1" * 16, "b2" * 8
ASKED = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "speculative": {"mode": "pingpong"}}
JSON_LOG = ("--log-format", "json")
METRICS = ("--metrics", "127.0.0.1:0")


@dataclass(frozen=True, slots=True)
class Chain:
    """All processes, and what passed between the coordinator and its stages."""

    gateway: GatewayProcess
    workers: list[WorkerProcess]
    """The two stages, the target and the draft."""
    links: list[RecordingProxy]
    trace: Path
    """That of the gateway."""

    @property
    def target(self) -> WorkerProcess:
        return self.workers[2]

    @property
    def logs(self) -> list[str]:
        return [self.gateway.stderr, *(worker.stderr for worker in self.workers)]

    @property
    def traces(self) -> list[Path]:
        return [self.trace, *(worker.trace for worker in self.workers)]

    def post(self, request_id: str, key: str = KEY, **headers: str) -> httpx.Response:
        """Ask for a short answer."""
        headers |= {"authorization": f"Bearer {key}", "x-request-id": request_id}
        return httpx.post(f"{self.gateway.url}/v1/completions", json=ASKED, headers=headers, timeout=LIMIT_S)

    def stop(self) -> None:
        """End all in good order, so that every span is written."""
        assert self.gateway.stop() == 0
        for worker in reversed(self.workers):
            assert worker.stop() == 0


@asynccontextmanager
async def running_chain(folder: Path) -> AsyncGenerator[Chain]:
    (folder / "keys").write_text(LINE + "\n", encoding="utf-8")
    ends = ("--ends", "coordinator", *JSON_LOG, *METRICS)
    async with AsyncExitStack() as stack:
        stages = [stage_process(folder, layers, *ends) for layers in ("0:6", "6:12")]
        draft = WorkerProcess("draft", folder, "--threads", "1", *JSON_LOG, *METRICS)
        for worker in (draft, *stages):
            stack.callback(worker.close)
        links = [await stack.enter_async_context(recorded(stage)) for stage in stages]
        addresses = ",".join(link.address for link in links)
        target = WorkerProcess("target", folder, "--stages", addresses, *ends, "--sessions", "1", "--queue", "1")
        stack.callback(target.close)
        trace = folder / "gateway.jsonl"
        gateway = GatewayProcess(
            folder,
            *(
                "--target",
                f"small={await asyncio.to_thread(lambda: target.address)}",
                "--draft",
                f"small={draft.address}",
            ),
            *("--api-key-file", str(folder / "keys"), "--trace", str(trace), *JSON_LOG),
        )
        stack.callback(gateway.close)
        await asyncio.to_thread(lambda: gateway.ready)
        yield Chain(gateway, [*stages, target, draft], links, trace)


async def crowd(chain: Chain) -> None:
    """Have one request hold the only session, one wait, one be refused, and one come without a key."""
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        body, headers = {**ASKED, "max_tokens": 400, "stream": True}, {"authorization": f"Bearer {KEY}"}
        url = f"{chain.gateway.url}/v1/completions"
        async with client.stream("POST", url, json=body, headers={**headers, "x-request-id": "holds"}) as held:
            lines = held.aiter_lines()
            await anext(lines)
            waiting = asyncio.create_task(asyncio.to_thread(chain.post, "waits"))
            await eventually(lambda: "waits" in chain.target.stderr)
            assert (await asyncio.to_thread(chain.post, "is-refused")).status_code == 503
        assert (await waiting).status_code == 200
    assert (await asyncio.to_thread(chain.post, "has-no-key", "wrong")).status_code == 401


def spans_in(chain: Chain) -> list[dict[str, Any]]:
    lines = [line for path in chain.traces for line in path.read_text(encoding="utf-8").splitlines()]
    return list(map(json.loads, lines))


def check_trace(found: list[dict[str, Any]]) -> None:
    """Check that one trace, the client's, leads from HTTP to both stages."""
    ours = [span for span in found if span["trace_id"] == TRACE_ID]
    by_id = {span["span_id"]: span for span in ours}
    (http,) = (span for span in ours if span["name"] == "http")
    assert (http["parent_id"], http["attributes"]["request"]) == (CALLER_SPAN, "first")

    def path(span: dict[str, Any]) -> list[str]:
        up = [span["name"]]
        while span["parent_id"] != CALLER_SPAN:
            span = by_id[span["parent_id"]]
            up.append(span["name"])
        return up

    in_round = ["rpc", "verify", "round", "request", "http"]
    for number in (0, 1):
        steps = [span for span in ours if span["name"] == "stage" and span["attributes"]["stage"] == number]
        assert len(steps) > 3
        assert all(path(step) == ["stage", *in_round] for step in steps)
    forwards = [path(span) for span in ours if span["name"] == "forward"]
    assert ["forward", *in_round] in forwards
    assert ["forward", "rpc", "propose", "round", "request", "http"] in forwards
    (request,) = (span for span in ours if span["name"] == "request")
    assert request["attributes"]["gen_ai.usage.output_tokens"] == ASKED["max_tokens"]
    assert {span["name"] for span in found} <= names.SPANS.keys()
    assert {name for span in found for name in span["attributes"]} <= names.ATTRIBUTES.keys()


def check_logs(chain: Chain, trace: list[dict[str, Any]]) -> None:
    """Check that every line is JSON, and that what happened has one line with its ids."""
    lines = [json.loads(line) for log in chain.logs for line in log.splitlines()]
    assert {line["role"] for line in lines} >= {"gateway", "target"}
    events = [(line["role"], line["event"], line["request"]) for line in lines if "event" in line]
    for told in (
        ("target", "queued", "waits"),
        ("target", "refused", "is-refused"),
        ("gateway", "refused", "has-no-key"),
    ):
        assert events.count(told) == 1, (told, events)
    assert events.count(("gateway", "refused", "is-refused")) == 1
    assert not [event for event in events if event[2] == "first"]
    sessions = {line["session"] for line in lines if line.get("event") == "queued"}
    assert sessions <= {span["attributes"]["session"] for span in trace if span["name"] == "request"}


def check_secrecy(chain: Chain, pages: list[bytes], ids: list[int]) -> None:
    """Check that prompt and key are in no log, trace or metric, and in no packet of a stage, not even as token ids."""
    texts = [log.encode() for log in chain.logs] + [path.read_bytes() for path in chain.traces] + pages
    passed = [bytes(link.seen) for link in chain.links]
    for words in (MARKER, "return first", KEY):
        assert all(words.encode() not in text for text in (*texts, *passed)), words
    quads = [ids[at : at + 4] for at in range(len(ids) - 3)]
    runs = [struct.pack("<4I", *quad) for quad in quads]
    told = packet(len(ids))
    shown = b"".join(encode(replace(told, sessions=(replace(told.sessions[0], token_ids=tuple(ids)),), payload=b"")))
    assert all(run in shown for run in runs), "a packet with ids would show them"
    assert all(len(link) > 10_000 for link in passed)
    # As numbers of any size and order, as protobuf packs them, and as JSON and logs write them.
    others = [struct.pack(f"{order}4{size}", *quad) for quad in quads for order in "<>" for size in "HIQ"]
    others += [common_pb2.Turn(tail=quad).SerializeToString()[2:] for quad in quads]
    written = [mark.join(map(str, quad)).encode() for quad in quads for mark in (",", ", ", " ")]
    assert not [run for run in (*runs, *others, *written) for link in passed if run in link]
    assert not [run for run in written for text in texts if run in text]


async def test_a_request_is_one_trace_and_its_text_stays_with_those_who_need_it(tmp_path: Path, capsys: Any) -> None:
    async with running_chain(tmp_path) as chain:
        traceparent = f"00-{TRACE_ID}-{CALLER_SPAN}-01"
        answer = await asyncio.to_thread(lambda: chain.post("first", traceparent=traceparent))
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "first")
        await crowd(chain)
        headers = {"authorization": f"Bearer {KEY}"}
        asked = {"prompt": PROMPT}
        ids = httpx.post(f"{chain.gateway.url}/tokenize", json=asked, headers=headers).json()["tokens"]
        pages = [httpx.get(f"http://{worker.ready['metrics']}/metrics").content for worker in chain.workers]
        pages.append(httpx.get(f"{chain.gateway.url}/metrics", headers=headers).content)
        await asyncio.to_thread(chain.stop)
        found = spans_in(chain)
        check_trace(found)
        check_logs(chain, found)
        check_secrecy(chain, pages, ids)


@pytest.mark.parametrize(
    ("mode", "roles"),
    [
        ("auto", {"target": "target with its draft"}),
        pytest.param("overlap", {"target": "target", "draft": "draft"}, marks=pytest.mark.slow),
    ],
)
def test_workers_that_a_gateway_starts_trace_to_files_beside_its_own(
    mode: str, roles: dict[str, str], tmp_path: Path, capsys: Any
) -> None:
    trace = tmp_path / "spans"
    gateway = GatewayProcess(tmp_path, "--trace", str(trace), "--mode", mode)
    try:
        answer = httpx.post(f"{gateway.url}/v1/completions", json=ASKED, timeout=LIMIT_S)
        assert answer.status_code == 200
        assert gateway.stop() == 0
    finally:
        gateway.close()
    for role, name in roles.items():
        assert f"The {name}: Its spans go to {trace}.{role}." in gateway.stderr
    assert main(["trace", *map(str, tmp_path.glob("spans*"))]) == 0
    shown = capsys.readouterr().out
    assert "of the time computing" in shown
    assert "no spans of" not in shown
