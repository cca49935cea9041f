"""Tables and plots of systems that were measured beside each other: a run, or one point of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.registry import GENERATE, PLAIN
from benchmarks.report import plots
from benchmarks.report.plots import Plot
from benchmarks.report.tables import NONE, Record, Table, number, spread

_LIMITS = ("AR", "L0", "L1", "L1_streamed", "L2")
_PHIS = ("phi0", "phi1", "phi2")
_SPEED = ("tokens/s", "decoding", "over plain", "over generate", "decoding over plain", "same texts", "same tokens")
_ACCEPTANCE = ("mean length", "tokens/round", "of path", "of nodes", "by depth", "histogram", "hit rate")
_WAITS = ("TTFT p50", "p95", "token p50", "p95", "p99", "arrival p50", "p95", "p99")
_COSTS = ("target busy", "bytes/token", "rest of a round, ms")


def tables(title: str, blocks: Mapping[str, Record], *, is_folded: bool = False) -> list[Table]:
    """Return the tables of one task or of all tasks together; `blocks` are by system."""

    def listed(what: str, columns: Sequence[str], cells: Callable[[str, Record], Sequence[str]], key: str) -> Table:
        rows = [(name, *cells(name, block)) for name, block in blocks.items() if key in block]
        return Table(f"{title}: {what}", ("system", *columns), rows, is_folded or key == "spec_bench")

    return [
        listed("speed", _SPEED, _speed, "tokens_per_s"),
        listed("acceptance", _ACCEPTANCE, _acceptance, "acceptance"),
        listed("waiting in ms, and the costs of a round", (*_WAITS, *_COSTS), _waits, "ttft_s"),
        listed(
            "as Spec-Bench defines it",
            ("mean accepted tokens", "mean tokens/s", "speed-up over plain"),
            _spec_bench,
            "spec_bench",
        ),
    ]


def own_plain(name: str, speedups: Record) -> Record | None:
    """Return the speed-up over plain decoding at the system's own place, else over plain in process."""
    place = name.partition("@")[2]
    return speedups.get(f"{PLAIN}@{place}" if place else PLAIN) or speedups.get(PLAIN)


def _speed(name: str, block: Record) -> Sequence[str]:
    agreement = block["agreement"] or {}
    return (
        spread(block["tokens_per_s"], 0),
        spread(block["decode_tokens_per_s"], 0),
        spread(own_plain(name, block["speedup"])),
        spread(block["speedup"].get(GENERATE)),
        spread(own_plain(name, block["decode_speedup"])),
        number(agreement.get("texts"), 3),
        number(agreement.get("tokens_before_the_first_difference"), 3),
    )


def _acceptance(name: str, block: Record) -> Sequence[str]:
    found = block["acceptance"]
    known = bool(found["num_rounds"])
    return (
        number(found["mean_acceptance_length"] if known else None),
        number(block["tokens_per_round"]),
        number(found["path_acceptance_rate"] if known else None),
        number(found["node_acceptance_rate"] if known else None),
        " ".join(map(number, found["by_depth"])) or NONE,
        " ".join(map(str, found["histogram"])) or NONE,
        number(block.get("hit_rate")),
    )


def _waits(name: str, block: Record) -> Sequence[str]:
    ttft = block["ttft_s"] or {}
    cells = [number(ttft.get("p50"), 1, 1e3), number(ttft.get("p95"), 1, 1e3)]
    for key in ("inter_token_s", "inter_arrival_s"):
        cells += [number((block[key] or {}).get(part), 2, 1e3) for part in ("p50", "p95", "p99")]
    overhead = block.get("overhead_ms")
    return (
        *cells,
        number(block.get("target_busy_fraction")),
        number(block.get("bytes_per_token"), 0),
        number(overhead["median"] if overhead else None),
    )


def _spec_bench(name: str, block: Record) -> Sequence[str]:
    found = block["spec_bench"]
    return (
        number(found["mean_accepted_tokens"]),
        spread(found["mean_tokens_per_s"], 0),
        spread(found.get("speedup")),
    )


def limits(systems: Mapping[str, Record]) -> Table:
    """Return the limits of each system and how much of them it reached."""
    inputs = ("A", "D", "h", "t_d ms", "t_v(n) ms", "t_v(1) ms", "r ms")
    return Table(
        "The limit: decoded tokens/s that nothing can beat, and the fractions that were reached",
        ("system", "AR", "L0", "L1", "L1'", "L2", *_PHIS, *inputs),
        [
            (
                name,
                *(number(found[limit]["median"], 0) for limit in _LIMITS),
                *(spread(found[phi]) for phi in _PHIS),
                *(number(found["inputs"][letter]) for letter in ("A", "D", "h")),
                *(number(found["inputs"][letter], 2, 1e3) for letter in ("t_d", "t_v_n", "t_v_1", "r")),
            )
            for name, found in _known_limits(systems).items()
        ],
    )


def _known_limits(systems: Mapping[str, Record]) -> dict[str, Record]:
    return {name: system["limits"] for name, system in systems.items() if system["limits"] is not None}


def agreement(summary: Record) -> str:
    """Return in a sentence whether all systems wrote the same."""
    if not summary["differences"]:
        return "Every system that can be compared wrote the same tokens in every round."
    return f"{len(summary['differences'])} differences from the reference's text, {summary['num_ties']} of them ties."


def differences(summary: Record, points: Sequence[str] = ()) -> Table:
    """Return the places where texts part, with the margin of the target's best two scores there."""
    return Table(
        "Differences",
        ("system", "prompt", "point", "after", "expected", "got", "margin"),
        [
            (
                item["system"],
                item["task"],
                points[item["point"]] if points else NONE,
                *(str(item[key]) for key in ("position", "expected", "got")),
                f"{item['margin']:.2e}",
            )
            for item in summary["differences"]
        ],
    )


def figures(name: str, systems: Mapping[str, Record], suffix: str) -> list[Plot]:
    """Return the plots of systems measured beside each other; `name` begins their files' names."""
    pooled = {system: found["pooled"] for system, found in systems.items()}
    ratios = {
        "over plain, same engine": {system: own_plain(system, block["speedup"]) for system, block in pooled.items()},
        "over transformers generate": {system: block["speedup"].get(GENERATE) for system, block in pooled.items()},
    }
    known = {label: {name: each for name, each in by.items() if each is not None} for label, by in ratios.items()}
    groups = {label: values for label, values in known.items() if values}
    order = [system for system in pooled if any(system in values for values in groups.values())]
    accepting = {
        system: block["acceptance"]
        for system, block in pooled.items()
        if "acceptance" in block and block["acceptance"]["num_rounds"]
    }
    made: list[Plot] = []

    def add(kind: str, title: str, draw: Any) -> None:
        made.append(Plot(f"{name}-{kind}", title, draw))

    if groups:
        title = f"Speed-up, prompt included, with 95 % intervals{suffix}"
        add("speedup", title, plots.bars(title, groups, "times as fast", order=order, line=1.0))
    if accepting:
        title = f"Acceptance by depth, given that the depth before was accepted{suffix}"
        add("depth", title, plots.by_depth(title, {system: each["by_depth"] for system, each in accepting.items()}))
        title = f"Accepted length{suffix}"
        shares = {
            system: [count / each["num_rounds"] for count in each["histogram"]] for system, each in accepting.items()
        }
        add("lengths", title, plots.columns(title, shares, "drafted tokens accepted in a round", "share of rounds"))
    if limited := _known_limits(systems):
        title = f"Fraction of the limit that was reached{suffix}"
        reached = {phi: {system: found[phi] for system, found in limited.items()} for phi in _PHIS}
        add("limit", title, plots.bars(title, reached, "of the limit", line=1.0))
    return made
