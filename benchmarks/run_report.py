"""The tables of `run`: rates and speed-ups, acceptance, waits, the fraction of the limit, agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from benchmarks.report import show_neighbours, table
from benchmarks.run import Found

Record = Mapping[str, Any]
_INPUTS = ("A", "D", "h", "t_d ms", "t_v(n) ms", "r ms")
_NONE = "-"


def show(console: Console, found: Found) -> None:
    """Print everything that fits a terminal; the rest stands in the summary."""
    settings, summary, num_prompts = found.run.header["settings"], found.summary, len(found.run.tasks)
    inflated = " (inflated)" if settings["is_inflated"] else ""
    without_lookup = "" if settings["lookup"] else ", without lookup"
    console.print(
        f"target {settings['target']}{inflated}, draft {settings['draft']}{without_lookup}, {settings['dtype']}, "
        f"temperature {settings['temperature']:g}, {num_prompts} prompts x {settings['num_new_tokens']} tokens, "
        f"{settings['threads']} threads",
        markup=False,
    )
    console.print(f"Median of {found.run.num_rounds} alternating rounds, 95 % interval", markup=False)
    show_neighbours(console, summary["neighbours_share"])
    if not summary["is_complete"]:
        console.print(
            f"Not whole: {found.run.num_rounds} of {settings['num_rounds']} rounds are measured and shown; "
            "the same command with the same --output goes on."
        )
    for name, why in summary["skipped"].items():
        console.print(f"Skipped {name}: {why}", markup=False)
    systems: Record = summary["systems"]
    _show_rates(console, systems)
    _show_speculation(console, systems)
    _show_waits(console, systems)
    _show_limits(console, systems)
    _show_categories(console, systems)
    _show_agreement(console, summary)


def _spread(value: Record | None, digits: int = 2) -> str:
    if value is None:
        return _NONE
    return f"{value['median']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


def _number(value: float | None, digits: int = 2, scale: float = 1.0) -> str:
    return _NONE if value is None else f"{value * scale:.{digits}f}"


def _baselines(systems: Record, key: str) -> list[str]:
    return list(dict.fromkeys(name for system in systems.values() for name in system["pooled"][key]))


def _show_rates(console: Console, systems: Record) -> None:
    over, decode_over = _baselines(systems, "speedup"), _baselines(systems, "decode_speedup")
    rates = table("Tokens per second", "system", "with the prompt", "decoding only")
    for name, system in systems.items():
        block = system["pooled"]
        rates.add_row(escape(name), _spread(block["tokens_per_s"], 0), _spread(block["decode_tokens_per_s"], 0))
    console.print(rates)
    for title, key, baselines in (
        ("Speed-up, prompt included", "speedup", over),
        ("Speed-up, decoding only", "decode_speedup", decode_over),
    ):
        if baselines:
            listed = table(title, "system", *(escape(f"over {name}") for name in baselines))
            for name, system in systems.items():
                values = [_spread(system["pooled"][key].get(baseline)) for baseline in baselines]
                listed.add_row(escape(name), *values)
            console.print(listed)


def _show_speculation(console: Console, systems: Record) -> None:
    told = {name: system["pooled"] for name, system in systems.items() if "acceptance" in system["pooled"]}
    if not told:
        return
    listed = table(
        "Rounds",
        "system",
        "tokens/round",
        "of path",
        "of nodes",
        "by depth",
        "busy",
        "bytes/token",
        "rest, ms",
    )
    for name, block in told.items():
        found = block["acceptance"]
        depths = " ".join(_number(rate) for rate in found["by_depth"])
        listed.add_row(
            escape(name),
            _number(block["tokens_per_round"]),
            _number(found["path_acceptance_rate"] if found["num_rounds"] else None),
            _number(found["node_acceptance_rate"] if found["num_rounds"] else None),
            depths or _NONE,
            _number(block["target_busy_fraction"]),
            _number(block["bytes_per_token"], 0),
            _number(block["overhead_ms"]["median"] if block["overhead_ms"] else None),
        )
    console.print(listed)


def _show_waits(console: Console, systems: Record) -> None:
    listed = table("Waiting, ms", "system", "TTFT p50", "token p50", "p95", "p99", "arrival p50", "p95", "p99")
    for name, system in systems.items():
        block = system["pooled"]
        if block["ttft_s"] is None and block["inter_token_s"] is None:
            continue
        waits = [_number((block["ttft_s"] or {}).get("p50"), 2, 1e3)]
        for key in ("inter_token_s", "inter_arrival_s"):
            waits += [_number((block[key] or {}).get(name), 2, 1e3) for name in ("p50", "p95", "p99")]
        listed.add_row(escape(name), *waits)
    console.print(listed)


def _show_limits(console: Console, systems: Record) -> None:
    known = {name: system["limits"] for name, system in systems.items() if system["limits"] is not None}
    if not known:
        return
    columns = ("AR", "L0", "L1", "L1_streamed", "L2", "phi0", "phi1", "phi2")
    listed = table(
        "The limit, decoded tokens per second",
        "system",
        *("L1'" if each == "L1_streamed" else each for each in columns),
        *_INPUTS,
    )
    for name, limits in known.items():
        inputs = limits["inputs"]
        listed.add_row(
            escape(name),
            *(_number(limits[column]["median"], 2 if column.startswith("phi") else 0) for column in columns),
            *(_number(inputs[letter]) for letter in ("A", "D", "h")),
            *(_number(inputs[letter], 2, 1e3) for letter in ("t_d", "t_v_n", "r")),
        )
    console.print(listed)


def _show_categories(console: Console, systems: Record) -> None:
    categories = list(next(iter(systems.values()))["categories"])
    if len(categories) < 2:
        return
    listed = table("Tokens per second by task, with the prompt", "system", *map(escape, categories))
    for name, system in systems.items():
        blocks: Sequence[Record] = [system["categories"][category] for category in categories]
        rates = [_number((block["tokens_per_s"] or {}).get("median"), 0) for block in blocks]
        listed.add_row(escape(name), *rates)
    console.print(listed)


def _show_agreement(console: Console, summary: Record) -> None:
    listed = summary["differences"]
    if not listed:
        console.print("Agreement: every system that can be compared wrote the same tokens in every round.")
        return
    console.print(f"Agreement: {len(listed)} differences, {summary['num_ties']} of them ties.")
    rows = table("Differences", "system", "prompt", "after", "expected", "got", "margin")
    for item in listed:
        cells = (str(item[key]) for key in ("position", "expected", "got"))
        rows.add_row(escape(item["system"]), escape(item["task"]), *cells, f"{item['margin']:.2e}")
    console.print(rows)
