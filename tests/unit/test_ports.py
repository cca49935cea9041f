"""The addresses of a service: what it refuses before a model is loaded, and what the doctor says of them."""

from __future__ import annotations

import json

import pytest

from specsplit.cli.doctor_checks import Check
from specsplit.cli.doctor_links import check_links
from specsplit.cli.main import main
from specsplit.cli.ports import check_distinct
from specsplit.core.errors import InvalidSettings
from specsplit.core.settings import load_settings

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("listen", "metrics", "words"),
    [
        ("127.0.0.1:7010", "127.0.0.1:7010", "name the same address 127.0.0.1:7010; change one of them"),
        ("127.0.0.1:7010", "0.0.0.0:7010", "--listen 127.0.0.1:7010 and --metrics 0.0.0.0:7010 collide, since one is"),
        ("[::]:7010", "localhost:7010", "collide"),
        ("0.0.0.0:7010", "[::]:7010", "collide"),
        ("0.0.0.0:7010", "127.0.0.1:7011", None),
        ("127.0.0.1:7010", "127.0.0.2:7010", None),
        ("0.0.0.0:0", "127.0.0.1:0", None),
        ("0.0.0.0:7010", None, None),
    ],
)
def test_two_options_that_take_one_port_are_refused(listen: str, metrics: str | None, words: str | None) -> None:
    addresses = {"listen": listen, "health": None, "metrics": metrics}
    if words is None:
        check_distinct(addresses)
        return
    with pytest.raises(InvalidSettings) as refused:
        check_distinct(addresses)
    assert words in str(refused.value)


def test_ports_that_collide_are_refused_before_anything_is_loaded(capfd: Capture) -> None:
    assert main(["target", "-m", "/nowhere", "-l", "127.0.0.1:7010", "--metrics", "0.0.0.0:7010"]) == 2
    assert "collide" in capfd.readouterr().err


def failed_checks(**variables: str) -> dict[str, Check]:
    with pytest.MonkeyPatch.context() as patch:
        for name, word in variables.items():
            patch.setenv(f"SPECSPLIT_{name}", word)
        effective = load_settings({}, as_options=True, purpose="check")
    return {check.name: check for check in check_links(effective) if not check.is_ok}


def test_the_doctor_refuses_what_a_gateway_would() -> None:
    failed = failed_checks(GATEWAY_HTTP="0.0.0.0:0")
    assert failed["API keys"].detail.startswith("--http 0.0.0.0:0 can be reached from other machines: name the keys")
    failed = failed_checks(GATEWAY_LMTP="0.0.0.0:0")
    assert failed["API keys"].detail.startswith("--lmtp 0.0.0.0:0 can be reached")
    assert failed_checks(GATEWAY_HTTP="0.0.0.0:0", GATEWAY_ALLOW_ANONYMOUS="true") == {}
    assert list(failed_checks(GATEWAY_HTTP="127.0.0.1:8019", GATEWAY_METRICS="0.0.0.0:8019")) == ["gateway ports"]


@pytest.mark.parametrize("role", ["draft", "target", "stage"])
def test_the_doctor_refuses_what_a_service_would(role: str) -> None:
    listen, health = f"{role.upper()}_LISTEN", f"{role.upper()}_HEALTH"
    failed = failed_checks(**{listen: "0.0.0.0:8019", health: "0.0.0.0:8019"})
    assert failed[f"{role} links"].detail.startswith("0.0.0.0:8019 can be reached from other machines, and without")
    assert "--listen and --health name the same address" in failed[f"{role} ports"].detail
    assert failed_checks(**{listen: "0.0.0.0:8019", f"{role.upper()}_INSECURE": "true"}) == {}


def test_the_doctor_refuses_a_plaintext_link_to_a_stage() -> None:
    failed = failed_checks(TARGET_STAGES="elsewhere:1")
    assert failed["target links"].detail.startswith("The link to elsewhere:1 leaves this machine")


def test_the_doctor_ends_with_an_error_for_such_settings(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.setenv("SPECSPLIT_GATEWAY_HTTP", "0.0.0.0:0")
    assert main(["doctor", "--target", "127.0.0.1:9", "--json"]) == 1
    failed = {check["name"] for check in json.loads(capfd.readouterr().out)["checks"] if not check["is_ok"]}
    assert failed == {"API keys", "target"}
