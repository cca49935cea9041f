"""What a gateway hands on to the workers that it starts: how a target reaches its stages, and the log."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specsplit.assembly import gateway
from specsplit.assembly.supervision import local_processes
from specsplit.cli.main import main
from specsplit.core.errors import InvalidSettings, WorkerFailed
from specsplit.core.settings import Settings, load_settings
from specsplit.core.types import Note

READY = f"print({json.dumps(json.dumps({'address': '127.0.0.1:7777'}))}, flush=True); import time; time.sleep(60)"
STAGES = '[target]\nstages = ["192.0.2.1:7101"]\n'
OWN = 4
"""Words at the end of a command that are about the process itself: where it listens, and its parent."""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Start, instead of workers, programs that say that they serve; give the words behind `specsplit` of each."""
    started, start = list[list[str]](), asyncio.create_subprocess_exec

    async def start_ready(*command: str, **options: Any) -> asyncio.subprocess.Process:
        started.append(list(command[command.index("specsplit") + 1 :]))
        return await start(sys.executable, "-I", "-S", "-c", READY, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_ready)
    return started


def settings_of(path: Path, text: str) -> Settings:
    path.write_text(text)
    return load_settings({"mode": "plain"}, config=str(path), purpose="gateway").settings


async def start(settings: Settings, arguments: Sequence[str]) -> None:
    async with local_processes(settings, arguments):
        pass


@pytest.mark.parametrize(
    ("text", "is_insecure"),
    [
        (f"{STAGES}insecure = true\n", True),
        (STAGES, False),
        ("[target]\ninsecure = true\n", False),  # of its own links, which are on loopback
        (f"{STAGES}[gateway]\ninsecure = true\n", False),
    ],
    ids=["stages", "stages without", "no stages", "the gateway's"],
)
def test_a_target_that_is_started_reaches_its_stages_as_its_settings_say(
    text: str, is_insecure: bool, tmp_path: Path, commands: list[list[str]], capfd: pytest.CaptureFixture[str]
):
    path = tmp_path / "settings.toml"
    asyncio.run(start(settings_of(path, text), ("--config", str(path))))
    (command,) = commands
    assert main([*command[:-OWN], "--print-config"]) == 0
    (line,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("insecure = "))
    assert line.startswith(f"insecure = {str(is_insecure).lower()}")


def test_a_target_with_certificates_for_its_stages_is_not_started(tmp_path: Path, commands: list[list[str]]):
    text = f'{STAGES}tls_cert = "a.pem"\ntls_key = "a.key"\ntls_ca = "ca.pem"\n'
    settings = settings_of(tmp_path / "settings.toml", text)
    with pytest.raises(InvalidSettings, match="start it by itself with specsplit target, and name it with --target"):
        asyncio.run(start(settings, ()))
    assert not commands


@pytest.mark.parametrize(
    ("command", "opening"),
    [(("serve", "--http", "127.0.0.1:0"), "serving_gateway"), (("lmtp", "--stdio"), "serving_models")],
)
def test_workers_log_as_the_process_that_starts_them_and_read_its_file(
    command: tuple[str, ...],
    opening: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    path, handed = tmp_path / "settings.toml", list[Sequence[str]]()
    path.write_text('[gateway]\nlog_level = "warning"\n')
    package = logging.getLogger("specsplit")
    caplog.set_level(package.level, package.name)  # what the command sets is taken back at the end

    def refuse(settings: Settings, arguments: Sequence[str], note: Note) -> None:
        handed.append(arguments)
        raise WorkerFailed("It has seen enough.")

    monkeypatch.setattr(gateway, opening, refuse)
    assert main([*command, "--config", str(path)]) == 1
    assert handed == [["--log-format", "text", "--log-level", "warning", "--config", str(path)]]
    trace = ["--trace-file", str(tmp_path / "spans")]
    assert main([*command, "--config", str(path), *trace]) == 1
    assert handed[1] == [*handed[0], *trace]


def test_lmtp_says_which_settings_are_for_serve_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: object) -> None:
        raise WorkerFailed("It has seen enough.")

    path = tmp_path / "settings.toml"
    path.write_text("[gateway]\ndrain = 5\n")
    monkeypatch.setattr(gateway, "serving_models", refuse)
    # The handlers of pytest may still write JSON for an earlier test, and the note with them.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv("SPECSPLIT_GATEWAY_METRICS", "127.0.0.1:9464")
    assert main(["lmtp", "--stdio", "--config", str(path)]) == 1
    said = capsys.readouterr().err
    (line,) = (line for line in said.splitlines() if "Not used by lmtp" in line)
    assert "SPECSPLIT_GATEWAY_METRICS, " in line
    assert "drain" in line
    assert "HEALTH" not in line


@pytest.mark.parametrize(
    ("text", "has_all"),
    [("", False), ('[target]\naddress = "192.0.2.1:7001"\n', True), ('[target]\ndevice = "cuda:1"\n', True)],
    ids=["here", "elsewhere", "on a gpu"],
)
async def test_a_draft_has_all_cores_where_its_target_computes_elsewhere(
    tmp_path: Path, commands: list[list[str]], text: str, has_all: bool
):
    path = tmp_path / "s.toml"
    path.write_text(f'{text}[draft]\nmodel = "embedded"\n')
    settings = load_settings({}, config=str(path), purpose="gateway").settings
    await start(settings, ())
    assert ("--all-cores" in commands[-1]) == has_all


async def both_of(text: str, folder: Path, commands: list[list[str]], **options: Any) -> list[tuple[str, str | None]]:
    """Return the role and the draft of each process that is started with these settings."""
    path = folder / "s.toml"
    path.write_text(text)
    settings = load_settings({"target_model": "embedded", **options}, config=str(path), purpose="gateway").settings
    await start(settings, ("--config", str(path)))
    given = [dict(pairwise(words)) for words in commands]
    return [(words[0], options.get("--draft-model")) for words, options in zip(commands, given, strict=True)]


@pytest.mark.parametrize(
    ("text", "options", "is_one"),
    [
        ("", {}, True),
        ("", {"device": "cuda:1", "mode": "pingpong"}, True),
        ("", {"mode": "overlap"}, False),
        ('[draft]\ndevice = "cuda"\n', {}, False),
        ("[target]\nlocal_stages = 2\n", {}, False),
    ],
    ids=["here", "on a gpu", "at once", "two devices", "stages"],
)
async def test_one_process_serves_a_draft_and_a_target_that_take_turns(
    tmp_path: Path, commands: list[list[str]], text: str, options: dict[str, Any], is_one: bool
):
    found = await both_of(text, tmp_path, commands, **options)
    assert found == ([("target", "embedded")] if is_one else [("target", None), ("draft", None)])


@pytest.mark.parametrize("options", [{"mode": "plain"}, {"mode": "overlap"}, {"draft_model": "none-of-these"}])
async def test_a_draft_beside_targets_of_the_environment_is_none_of_a_gateway(
    tmp_path: Path,
    commands: list[list[str]],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("SPECSPLIT_TARGET_DRAFT_MODEL", "elsewhere")
    await both_of("", tmp_path, commands, **options)
    assert main([*commands[0][:-OWN], "--print-config"]) == 0
    told = tomllib.loads(capfd.readouterr().out)["target"]
    assert told.get("draft_model") == options.get("draft_model")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dtype": "fp32", "threads": 3, "sessions": 5, "draft_vocab": "99", "draft_context": 64},
        {"record": False},
        {"record": True},
    ],
)
async def test_a_process_of_both_has_the_settings_of_both(
    tmp_path: Path, commands: list[list[str]], capfd: pytest.CaptureFixture[str], given: dict[str, Any]
):
    text = '[target]\ndtype = "bf16"\nqueue = 3\n[draft]\ndtype = "int8"\nqueue = 4\ncontext = 99\nkv_memory = "2GB"\n'
    text += "record = false\n"
    await both_of(text, tmp_path, commands, **given)
    (command,) = commands
    assert main([*command[:-OWN], "--print-config"]) == 0
    told = tomllib.loads(capfd.readouterr().out)
    wanted = load_settings({"target_model": "embedded", **given}, config=str(tmp_path / "s.toml"), purpose="gateway")
    names = ("dtype", "queue", "context", "kv_memory", "threads", "record", "sessions", "vocab")
    for role, section in (("target", wanted.settings.target), ("draft", wanted.settings.draft)):
        assert {name: told[role].get(name) for name in names} == {name: getattr(section, name, None) for name in names}


@pytest.mark.parametrize("word", ["--record", "--no-record"])
async def test_each_of_two_workers_records_as_the_gateway_was_told(
    tmp_path: Path, commands: list[list[str]], capfd: pytest.CaptureFixture[str], word: str
):
    text = f"[target]\nrecord = {str(word == '--no-record').lower()}\n"
    await both_of(text, tmp_path, commands, mode="overlap", record=word == "--record")
    for command in commands:
        assert main([*command[:-OWN], "--print-config"]) == 0
        told = tomllib.loads(capfd.readouterr().out)[command[0]]
        assert told["record"] == (word == "--record")
    assert len(commands) == 2
