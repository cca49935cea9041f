"""Checks of the doctor that load no model: a target without a draft or in stages, memory, keys, certificates, ports."""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specsplit.cli.doctor_checks import no_draft_check
from specsplit.cli.doctor_links import check_links
from specsplit.cli.doctor_memory import KVDemand, memory_check, memory_checks
from specsplit.cli.main import main
from specsplit.core.settings import load_settings
from specsplit.model.attention.paths import slot_rows
from tests.support.certificates import Authority


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"target": "a:1"}, "a target that is far away takes steps by itself; name one with --draft"),
        ({"target_model": "m"}, "lookup alone, which gains where a text repeats itself; name one with --draft-model"),
        ({"target_model": "m", "mode": "lookup"}, "lookup alone, which gains where a text repeats itself"),
        ({"target": "a:1", "lookup": False}, "none: decoding is plain"),
    ],
)
def test_doctor_says_what_a_target_does_without_a_draft(given: dict[str, object], words: str):
    check = no_draft_check(load_settings(given, purpose="check").settings)
    assert (check.is_ok, check.detail.endswith(words)) == (True, True), check.detail


@pytest.mark.parametrize(
    ("budgets", "is_warning", "words"),
    [
        (
            (None, None),
            False,
            "4.0 MiB of the target for 4 full sessions and 4.0 MiB of the draft for 4 full sessions; 9",
        ),
        ((2 << 20, 0.5), False, "2.0 MiB of the target for 2048 tokens and 4.5 MiB of the draft for 4608 tokens"),
        # Each of these would fit alone.
        ((0.5, 0.5), True, "; 9.0 MiB are free, of which 95% may be used: set less --kv-memory, or fewer --sessions"),
        ((None, 5 << 20), True, "may be used"),
    ],
)
def test_doctor_adds_up_the_memory_of_the_models_of_a_device(
    budgets: tuple[float | None, float | None], is_warning: bool, words: str
):
    demands = [
        KVDemand(role, 4, 1 << 20, 1 << 10, size) for role, size in zip(("target", "draft"), budgets, strict=True)
    ]
    check = memory_check("cpu", 9 << 20, demands)
    assert (check.name, check.is_ok, check.is_warning) == ("cpu memory", True, is_warning)
    assert words in check.detail
    assert "nothing says" in memory_check("cpu", None, demands).detail


@pytest.mark.parametrize(
    ("lines", "state", "words"),
    [
        (f"anna:{'a' * 64}\n# a remark\nben:{'b' * 64}\n", (True, False), "2 in"),
        ("", (True, True), "nobody is let in"),
        ("sk-specsplit-secret\n", (False, False), "Line 1"),
        (None, (False, False), "cannot be read"),
    ],
)
def test_doctor_reads_the_file_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str | None, state: tuple[bool, bool], words: str
):
    keys = tmp_path / "keys"
    if lines is not None:
        keys.write_text(lines)
    monkeypatch.setenv("SPECSPLIT_GATEWAY_API_KEY_FILE", str(keys))
    effective = load_settings({}, as_options=True, purpose="check")
    (check,) = (check for check in check_links(effective) if check.name == "API keys")
    assert (check.is_ok, check.is_warning) == state
    assert words in check.detail
    assert "sk-specsplit-secret" not in check.detail


@pytest.mark.parametrize(
    ("days", "mode", "state", "words"),
    [
        ((-1, 30), 0o600, (True, False, False), "spiffe://specsplit/target"),
        ((-1, 2), 0o600, (True, True, False), "replace the files in time"),
        ((-1, 30), 0o644, (True, False, True), "chmod o-rw"),
        ((-9, -1), 0o600, (False, False, False), "expired"),
        ((1, 30), 0o600, (False, False, False), "not yet valid (is the clock of this machine right?)"),
    ],
)
def test_doctor_reads_certificates_and_who_may_read_keys(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    days: tuple[int, int],
    mode: int,
    state: tuple[bool, bool, bool],
    words: str,
):
    begins, ends = map(timedelta, days)
    mine = Authority(tmp_path).sign("mine", ["spiffe://specsplit/target"], ["target.specsplit"], begins, ends)
    mine.key.chmod(mode)
    for name, path in (("CERT", mine.cert), ("KEY", mine.key), ("CA", mine.ca)):
        monkeypatch.setenv(f"SPECSPLIT_TARGET_TLS_{name}", str(path))
    checks = {check.name: check for check in check_links(load_settings({}, purpose="check"))}
    found = checks["target certificate"]
    assert (found.is_ok, found.is_warning, "target key file" in checks) == state
    assert words in " ".join(check.detail for check in checks.values())


def test_doctor_tries_the_ports_of_services(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("SPECSPLIT_TARGET_LISTEN", address)
        monkeypatch.setenv("SPECSPLIT_TARGET_HEALTH", "127.0.0.1:0")
        checks = {check.name: check for check in check_links(load_settings({}, purpose="check"))}
    assert f"{address} is in use" in checks["target listen"].detail
    assert [checks[name].is_warning for name in ("target listen", "target health")] == [True, False]


def test_doctor_loads_no_model_whose_layers_are_on_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Its weights are no weights: to load them would fail, as it would where they do not fit the memory."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setenv("SPECSPLIT_TARGET_STAGES", "127.0.0.1:1")
    assert main(["doctor", "--target-model", str(tmp_path), "--json"]) == 1, "no stage is there"
    checks = {check["name"]: check for check in json.loads(capfd.readouterr().out)["checks"]}
    assert [name for name, check in checks.items() if not check["is_ok"]] == ["stage 127.0.0.1:1"]
    assert checks["target"]["detail"] == f"{tmp_path}: not loaded here, since its layers are on stages"
    assert "cpu memory" not in checks


def test_doctor_counts_the_memory_of_stages_for_no_draft(monkeypatch: pytest.MonkeyPatch):
    cache = SimpleNamespace(capacity=1 << 10, row_bytes=1 << 10)
    draft: Any = SimpleNamespace(role="draft", runner=SimpleNamespace(cache=cache, device=torch.device("cpu")))
    monkeypatch.setenv("SPECSPLIT_TARGET_STAGES", "127.0.0.1:1")
    monkeypatch.setenv("SPECSPLIT_TARGET_KV_MEMORY", "1TiB")
    monkeypatch.setenv("SPECSPLIT_DRAFT_SESSIONS", "4")
    (check,) = memory_checks([draft], load_settings({}, purpose="check").settings)
    assert "4.0 MiB of the draft for 4 full sessions" in check.detail


@pytest.mark.parametrize(("free_mib", "words"), [(1 << 10, "16 full"), (40, "10 full"), (1, "4 full")])
def test_doctor_counts_the_slots_that_a_service_would_take(monkeypatch: pytest.MonkeyPatch, free_mib: int, words: str):
    cache = SimpleNamespace(capacity=slot_rows(1000 + 24), row_bytes=(1 << 20) // slot_rows(1000 + 24))
    runner = SimpleNamespace(cache=cache, device=torch.device("cpu"))
    model: Any = SimpleNamespace(role="target", runner=runner, context=1000, node_limit=24)
    monkeypatch.setattr("specsplit.model.memory.available_bytes", lambda _device: free_mib << 20)
    (check,) = memory_checks([model], load_settings({}, purpose="check").settings)
    assert f"of the target for {words} sessions" in check.detail


def test_doctor_goes_on_behind_each_failed_check(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setenv("SPECSPLIT_ORCHESTRATOR_TEMPERATURE", "-1")
    monkeypatch.setenv("SPECSPLIT_GATEWAY_TARGETS", '["127.0.0.1:2"]')
    files = [f"--tls-{name}=~no-such-user/{name}.pem" for name in ("cert", "key", "ca")]
    assert main(["doctor", "--target", "127.0.0.1:1", *files, "--json"]) == 1
    checks = json.loads(capfd.readouterr().out)["checks"]
    failed = {check["name"]: check["detail"] for check in checks if not check["is_ok"]}
    assert failed["settings"].startswith("temperature must be")
    assert failed["certificate"].startswith("~no-such-user/cert.pem cannot be read")
    assert failed["target"].startswith("127.0.0.1:2 cannot be reached"), "over the gateway's links, which are fine"
    assert {"torch", "safetensors"} <= {check["name"] for check in checks}
    assert len(set(failed.values())) == len(failed), "one sentence is said once"
