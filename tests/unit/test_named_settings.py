"""Errors that name a setting as the user set it: an option, a variable, or a line of the settings file."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsplit.cli.main import main

Capture = pytest.CaptureFixture[str]
COMMANDS = [["target"], ["stage", "--layers", "0:2"], ["serve"], ["orchestrate", "Hello"], ["chat"], ["draft"]]


def role_of(command: list[str]) -> str:
    return command[0] if command[0] in ("draft", "stage") else "target"


@pytest.mark.parametrize("command", COMMANDS, ids=[words[0] for words in COMMANDS])
def test_a_size_of_memory_is_named_as_it_was_set(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    role = role_of(command)
    config = tmp_path / "settings.toml"
    config.write_text(f"[{role}]\nkv_memory = 'much'\n")
    assert main([*command, "--config", str(config)]) == 2
    assert capfd.readouterr().err.startswith(f"Error: {role}.kv_memory in {config} must be a size such as 8GiB")
    name = f"SPECSPLIT_{role.upper()}_KV_MEMORY"
    monkeypatch.setenv(name, "most")
    assert main([*command, "--config", str(config)]) == 2
    assert capfd.readouterr().err.startswith(f"Error: {name} must be a size such as 8GiB")
    assert main([*command, "--kv-memory", "all"]) == 2
    assert capfd.readouterr().err.startswith("Error: --kv-memory must be a size such as 8GiB")


@pytest.mark.parametrize("command", COMMANDS[:3], ids=[words[0] for words in COMMANDS[:3]])
def test_links_with_and_without_certificates_are_named_as_they_were_set(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    name = f"SPECSPLIT_{'GATEWAY' if command == ['serve'] else command[0].upper()}_INSECURE"
    monkeypatch.setenv(name, "true")
    assert main([*command, "--tls-cert", "a", "--tls-key", "b", "--tls-ca", "c"]) == 2
    said = f"Error: {name} is for links without certificates, and --tls-cert names one; leave one out.\n"
    assert capfd.readouterr().err == said
    monkeypatch.setenv(name, "")
    assert main([*command, "--insecure", "--tls-ca", "c"]) == 2
    said = "Error: --insecure is for links without certificates, and --tls-ca names one; leave one out.\n"
    assert capfd.readouterr().err == said
