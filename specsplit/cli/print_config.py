"""`--print-config`: the settings in effect and where each comes from, as TOML for `--config`, or as JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection
from typing import Any, cast

from specsplit.core.settings import EffectiveSettings

MASK = "********"
_SECRET = re.compile(r"token$|secret|password|api_?key(?!_file)", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]+(?=@)")
_FOREIGN = ("HF_TOKEN", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Variables of other libraries that decide what a model source means and where it runs."""


def masked(name: str, value: Any) -> Any:
    """Return `value` with secrets masked, and user and password cut from an address."""
    if value is not None and _SECRET.search(name):
        return MASK
    return _CREDENTIALS.sub(MASK, value) if isinstance(value, str) else value


def print_config(effective: EffectiveSettings, *, as_json: bool, roles: Collection[str] = ()) -> None:
    """Write every setting, or those of some roles, with its source to stdout."""
    rows = [
        (key, masked(key, value), source)
        for key, value, source in effective.rows()
        if not roles or key.partition(".")[0] in roles
    ]
    foreign = [(name, masked(name, os.environ[name])) for name in _FOREIGN if name in os.environ]
    sys.stdout.write(_as_json(rows, foreign) if as_json else _as_toml(rows, foreign))
    sys.stdout.flush()


def _as_json(rows: list[tuple[str, Any, str]], foreign: list[tuple[str, Any]]) -> str:
    answer = {
        "settings": {key: {"value": value, "source": source} for key, value, source in rows},
        "environment": dict(foreign),
    }
    return json.dumps(answer) + "\n"


def _as_toml(rows: list[tuple[str, Any, str]], foreign: list[tuple[str, Any]]) -> str:
    lines: list[str] = []
    table = ""
    for key, value, source in rows:
        role, field = key.split(".")
        if role != table:
            lines += [*([""] if table else []), f"[{role}]"]
            table = role
        # TOML has no null: a setting without a value is a comment, so that the output can be read with --config.
        assignment = f"# {field} is not set" if value is None else f"{field} = {_toml_value(value)}"
        lines.append(f"{assignment:<40} # {source}")
    if foreign:
        lines += ["", "# Also read, by the libraries below:", *(f"# {name}={value}" for name, value in foreign)]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    """Write a scalar, a list of strings, pairs of token id and bias, or a table on one line."""
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value).items()
        pairs = [f"{json.dumps(name)} = {_toml_value(each)}" for name, each in entries if each is not None]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, tuple):
        entries = cast("tuple[str | tuple[int, float], ...]", value)
        value = [entry if isinstance(entry, str) else f"{entry[0]}={entry[1]}" for entry in entries]
    # For these types JSON and TOML spell values alike.
    return json.dumps(value, ensure_ascii=False)
