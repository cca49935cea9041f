"""The log in JSON: every line is an object, also of workers that a service started, and of a start that fails."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specsplit.cli import logs
from specsplit.core.errors import WorkerFailed
from specsplit.core.sections import TargetSettings
from specsplit.rpc import local_process
from specsplit.rpc.local_process import LocalProcess
from tests.support.gateways import GatewayProcess
from tests.support.processes import run
from tests.support.root_log import root_log
from tests.support.rpc_servers import wait_until

JSON = ("--log-format", "json")
LINE = {"time": "2026-11-30T14:23:33.041+00:00", "level": "warning", "logger": "a", "role": "stage", "pid": 7}
WORKER = """
import json, sys
for text in json.loads(sys.argv[1]):
    print(text, file=sys.stderr, flush=True)
if sys.argv[2] == "serves":
    print(json.dumps({"address": "127.0.0.1:1"}), flush=True)
"""


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Give what this process logs in JSON."""
    with root_log() as stream:
        logs.set_up_logging(TargetSettings(log_format="json"), "gateway")
        yield stream


def worker_that_writes(monkeypatch: pytest.MonkeyPatch, *texts: str, serves: bool = True) -> LocalProcess:
    words = [sys.executable, "-c", WORKER, json.dumps(texts), "serves" if serves else "fails"]

    def command(module: str) -> list[str]:
        return words

    monkeypatch.setattr(local_process, "python_command", command)
    return LocalProcess("The target", (), logs.note)


async def test_lines_of_a_worker_go_on_as_they_are(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    first, inner = {**LINE, "message": "queued", "session": "9f"}, {**LINE, "message": "ready", "process": "Stage 1"}
    plain = ("a library says so", '{"message": 1}', "{half of a li")
    worker = worker_that_writes(monkeypatch, json.dumps(first), json.dumps(inner), *plain)
    await worker.start()
    await wait_until(lambda: log.getvalue().count("\n") == 2 + len(plain) + 1)
    await worker.aclose()
    # That it serves comes from another pipe, so its place among them is open.
    lines = [line for line in map(json.loads, log.getvalue().splitlines()) if " serves at " not in line["message"]]
    passed_on, noted = lines[:2], lines[2:]
    assert passed_on == [{**first, "process": "The target"}, {**inner, "process": "The target: Stage 1"}]
    assert [line["message"] for line in noted] == [f"The target: {text}" for text in plain]


async def test_why_a_worker_failed_is_said_once(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = {**LINE, "level": "error", "message": "There is no model.", "event": "failed"}
    worker = worker_that_writes(monkeypatch, json.dumps(reason), serves=False)
    with pytest.raises(WorkerFailed, match=r"^The target ended before it served: There is no model\.$"):
        await worker.start()
    await worker.aclose()
    assert log.getvalue() == ""


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (("target", *JSON, "-m", "/nope"), {}, "no model folder at /nope"),
        (("target", *JSON, "--no-such"), {}, "No such option: --no-such"),
        (("target", "--log-format=json", "--kv-memory", "1KiB"), {}, "--kv-memory 1.0 KiB holds 0 rows"),
        (("stage",), {"SPECSPLIT_STAGE_LOG_FORMAT": "json"}, "--layers"),
    ],
)
def test_a_start_that_fails_is_a_line_of_json(arguments: tuple[str, ...], variables: dict[str, str], said: str) -> None:
    code, out, err = run(*arguments, stdin=b"", **variables)
    assert (code != 0, out) == (True, "")
    line = [json.loads(line) for line in err.splitlines()][-1]
    assert (line["level"], line["event"], line["role"]) == ("error", "failed", arguments[0])
    assert said in line["message"]


def test_a_settings_file_chooses_json_though_it_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[gateway]\nlog_format = "json"\nno_such = 1\n', encoding="utf-8")
    code, _, err = run("serve", "--config", str(file))
    assert (code, json.loads(err)["role"]) == (2, "gateway")
    assert "gateway.no_such" in json.loads(err)["message"]
    assert run("target", "--config", str(file))[2].startswith("Error: ")


def test_every_line_of_a_gateway_and_its_workers_is_an_object(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, *JSON, "--log-level", "debug")
    try:
        assert gateway.ready["role"] == "gateway"
    finally:
        gateway.stop()
    lines = [json.loads(line) for line in gateway.stderr.splitlines()]
    assert {"gateway", "target"} <= {line["role"] for line in lines}
    assert all(("process" in line) == (line["role"] != "gateway") for line in lines)
    assert not [line for line in lines if line["message"].startswith("The target") and "{" in line["message"]]
