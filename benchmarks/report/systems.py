"""Tables and plots of systems that were measured beside each other: a run, or one point of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.metrics import QUANTILES
from benchmarks.registry import GENERATE, PLAIN
from benchmarks.report import plots
from benchmarks.report.plots import Plot
from benchmarks.report.tables import NONE, Record, Table, number, spread

_LIMITS = ("AR", "L0", "L1", "L1_streamed", "L2")
_PHIS = ("phi0", "phi1", "phi2")
Column = tuple[str, Callable[[str, Record], str]]


def own_plain(name: str, speedups: Record) -> Record | None:
    """Return the speed-up over plain decoding at the system's own place, else over plain in process."""
    place = name.partition("@")[2]
    return speedups.get(f"{PLAIN}@{place}" if place else PLAIN) or speedups.get(PLAIN)


def _known(block: Record, key: str) -> Any:
    """Return a rate of acceptance, None where there was no round."""
    return block["acceptance"][key] if block["acceptance"]["num_rounds"] else None


def _share(block: Record, key: str) -> str:
    return number((block["agreement"] or {}).get(key), 3)


def _ms(key: str, part: str, digits: int = 2) -> Callable[[str, Record], str]:
    return lambda name, block: number((block[key] or {}).get(part), digits, 1e3)


_SPEED: tuple[Column, ...] = (
    ("tokens/s", lambda name, block: spread(block["tokens_per_s"], 0)),
    ("decoding", lambda name, block: spread(block["decode_tokens_per_s"], 0)),
    ("over plain", lambda name, block: spread(own_plain(name, block["speedup"]))),
    ("over generate", lambda name, block: spread(block["speedup"].get(GENERATE))),
    ("decoding over plain", lambda name, block: spread(own_plain(name, block["decode_speedup"]))),
    ("same texts", lambda name, block: _share(block, "texts")),
    ("same tokens", lambda name, block: _share(block, "tokens_before_the_first_difference")),
)
_ACCEPTANCE: tuple[Column, ...] = (
    ("mean length", lambda name, block: number(_known(block, "mean_acceptance_length"))),
    ("tokens/round", lambda name, block: number(block["tokens_per_round"])),
    ("of path", lambda name, block: number(_known(block, "path_acceptance_rate"))),
    ("of nodes", lambda name, block: number(_known(block, "node_acceptance_rate"))),
    ("by depth", lambda name, block: " ".join(map(number, block["acceptance"]["by_depth"])) or NONE),
    ("histogram", lambda name, block: " ".join(map(str, block["acceptance"]["histogram"])) or NONE),
    ("hit rate", lambda name, block: number(block.get("hit_rate"))),
)
_WAITS: tuple[Column, ...] = (
    ("TTFT p50", _ms("ttft_s", "p50", 1)),
    ("p95", _ms("ttft_s", "p95", 1)),
    *((f"{'token ' * (part == 'p50')}{part}", _ms("inter_token_s", part)) for part in QUANTILES),
    *((f"{'arrival ' * (part == 'p50')}{part}", _ms("inter_arrival_s", part)) for part in QUANTILES),
    ("target busy", lambda name, block: number(block.get("target_busy_fraction"))),
    ("bytes/token", lambda name, block: number(block.get("bytes_per_token"), 0)),
    ("rest of a round, ms", lambda name, block: number((block.get("overhead_ms") or {}).get("median"))),
)
_SPEC_BENCH: tuple[Column, ...] = (
    ("mean accepted tokens", lambda name, block: number(block["spec_bench"]["mean_accepted_tokens"])),
    ("mean tokens/s", lambda name, block: spread(block["spec_bench"]["mean_tokens_per_s"], 0)),
    ("speed-up over plain", lambda name, block: spread(block["spec_bench"].get("speedup"))),
)
_TABLES = (
    ("speed", "tokens_per_s", _SPEED),
    ("acceptance", "acceptance", _ACCEPTANCE),
    ("waiting in ms, and the costs of a round", "ttft_s", _WAITS),
    ("as Spec-Bench defines it", "spec_bench", _SPEC_BENCH),
)
"""Title, the field that the systems in it have, and columns."""


def tables(title: str, blocks: Mapping[str, Record], *, is_folded: bool = False) -> list[Table]:
    """Return the tables of one task or of all tasks together; `blocks` are by system."""
    return [
        Table(
            f"{title}: {what}",
            ("system", *(column for column, _ in columns)),
            [(name, *(cell(name, block) for _, cell in columns)) for name, block in blocks.items() if key in block],
            is_folded or key == "spec_bench",
        )
        for what, key, columns in _TABLES
    ]


def limits(systems: Mapping[str, Record]) -> Table:
    """Return the limits of each system and how much of them it reached."""
    inputs = ("A", "D", "h", "t_d ms", "t_v(n) ms", "t_v(1) ms", "r ms")
    return Table(
        f"Estimated limits in decoded tokens/s, and the fractions reached{too_low(_known_limits(systems).values())}",
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


def too_low(limits: Iterable[Record | None]) -> str:
    """Return the end of a title above limits that were passed; L0 is passed by every mode that drafts ahead."""
    is_passed = any(found[phi]["median"] > 1 for found in limits if found for phi in ("phi1", "phi2"))
    return "; phi1 or phi2 above 1: the limit, estimated from means, is too low there" if is_passed else ""


def _known_limits(systems: Mapping[str, Record]) -> dict[str, Record]:
    return {name: system["limits"] for name, system in systems.items() if system["limits"] is not None}


def agreement(summary: Record) -> str:
    """Return in a sentence whether all systems wrote the same; lines that do not say how many compared some."""
    if not summary["differences"]:
        if summary.get("num_compared") == 0:
            return "No texts were compared: neither plain nor generate ran beside a system that must write the same."
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
        title = f"Speed-up, prompt included, with the range of rounds{suffix}"
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
        title = f"Fraction of the estimated limit that was reached{suffix}"
        reached = {phi: {system: found[phi] for system, found in limited.items()} for phi in _PHIS}
        add("limit", title, plots.bars(title, reached, "of the limit", line=1.0))
    return made
