"""`specsplit stage-check`: shows where a chain of stages leaves what the model computes in one process, if anywhere."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specsplit.cli import render
from specsplit.cli.logs import set_up_logging
from specsplit.core.settings import load_settings
from specsplit.model.source import check_source
from specsplit.stages.check import StageCheck, check_stages

_FILE_WIDTH = 160


def run(given: Mapping[str, Any]) -> int:
    """Check the chain and print what was found; return 0 if all stages are equal to the model, else 1."""
    chosen = {name: value for name, value in given.items() if name not in ("config", "json")}
    effective = load_settings(chosen, config=given.get("config"), as_options=True, purpose="target")
    set_up_logging()
    check_source(effective.settings.target.model, "target")
    checks = check_stages(effective.settings.target)
    first = next((check for check in checks if not check.is_equal), None)
    if given.get("json"):
        sys.stdout.write(json.dumps({"ok": first is None, "stages": [_record(check) for check in checks]}) + "\n")
    else:
        _print_table(checks)
    sys.stdout.flush()
    if first is None:
        return 0
    others = f", {first.num_other_picks} picks differ" if first.num_other_picks else ""
    render.note(
        f"Stage {first.stage} at {first.address} (layers {first.layers}) is the first that differs from the model in "
        f"one process: by {first.max_deviation:.1e}{others}."
    )
    return 1


def _record(check: StageCheck) -> dict[str, Any]:
    """Return the check as JSON can hold it, which knows no NaN."""
    is_number = math.isfinite(check.max_deviation)
    return {**asdict(check), "max_deviation": check.max_deviation if is_number else None}


def _print_table(checks: Sequence[StageCheck]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("stage", "address", "layers", "max deviation", "other picks", "ms to here and back", "state"):
        table.add_column(name, justify="left" if name in ("stage", "address", "state") else "right")
    for check in checks:
        picks = "-" if check.num_other_picks is None else str(check.num_other_picks)
        state = "[green]equal[/green]" if check.is_equal else "[bold red]differs[/bold red]"
        # rich would read an IPv6 address in brackets as markup.
        address = check.address.replace("[", "\\[")
        cells = (address, check.layers, f"{check.max_deviation:.1e}", picks, f"{check.time_ms:.1f}", state)
        table.add_row(str(check.stage), *cells)
    is_terminal = sys.stdout.isatty()
    Console(width=None if is_terminal else _FILE_WIDTH, soft_wrap=not is_terminal, highlight=False).print(table)
