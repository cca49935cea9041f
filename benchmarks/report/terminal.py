"""The tables of `run`, `sweep`, `compare`, `smoke` and `profile` in the terminal."""

from __future__ import annotations

from rich.console import Console

from benchmarks.compare import CONFIDENCE, Comparison
from benchmarks.measuring import Found
from benchmarks.report import sections, systems
from benchmarks.report.console import show_neighbours, show_tables
from benchmarks.report.tables import Record, Table, inflated, models_of, number, spread


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False)


def _beginning(console: Console, found: Found, details: str) -> None:
    """Print the conditions of a measurement, and what weakens its numbers."""
    settings, summary = found.file.header["settings"], found.summary
    prompts = len(found.file.header["prompts"]["tasks"])
    _say(
        console, f"{models_of(settings)}, {settings['dtype']}, {prompts} prompts x {settings['num_new_tokens']} tokens"
    )
    _say(console, f"{settings['threads']} threads, {details}; medians of alternating rounds with 95 % intervals")
    show_neighbours(console, summary["neighbours_share"])
    if not summary["is_complete"]:
        wanted = settings["num_rounds"]
        _say(console, f"Not whole: {found.file.num_rounds} of {wanted} rounds at all points are measured and shown;")
        _say(console, "the same command with the same --output goes on.")
    for name, why in summary["skipped"].items():
        _say(console, f"Skipped {name}: {why}")


def show_run(console: Console, found: Found) -> None:
    """Print everything that fits a terminal; the rest stands in the summary."""
    _beginning(console, found, f"temperature {found.file.header['settings']['temperature']:g}")
    show_tables(console, sections.run_tables(found.summary["systems"]))
    _agreement(console, found.summary)


def show_sweep(console: Console, found: Found) -> None:
    """Print a line per point and mode."""
    _beginning(console, found, f"round trips on: {found.file.header['settings']['link']}")
    show_tables(console, [sections.point_table(found.summary["points"])])
    _agreement(console, found.summary)


def _agreement(console: Console, summary: Record) -> None:
    _say(console, systems.agreement(summary))
    show_tables(console, [systems.differences(summary, is_folded=False)])


def show_smoke(console: Console, record: Record) -> None:
    """Print rates, bars, acceptance and agreement of `smoke`."""
    settings, acceptance = record["settings"], record["acceptance"]
    shape = "/".join(str(settings[name]) for name in ("nodes", "depth", "branching"))
    _say(
        console,
        f"embedded pair, fp32, greedy, {settings['num_prompts']} prompts x {settings['num_new_tokens']} tokens, "
        f"{settings['threads']} threads, tree {shape} (nodes/depth/branching); median of {record['num_rounds']} "
        "alternating rounds, 95 % interval",
    )
    show_neighbours(console, record["neighbours_share"])
    if not record["is_complete"]:
        _say(console, f"Interrupted: {record['num_rounds']} of {settings['num_rounds']} rounds are whole and shown.")
    decoding = record["decode_tokens_per_s"]
    ordered = sorted(record["tokens_per_s"].items(), key=lambda item: -item[1]["median"])
    rates = [(name, spread(value, 0), spread(decoding.get(name), 0)) for name, value in ordered]
    depths = [number(rate) for rate in acceptance["by_depth"]]
    show_tables(
        console,
        [
            Table("Tokens per second", ("system", "with the prompt", "decoding only"), rates),
            sections.bar_table(record["bars"]),
            Table("Acceptance", ("", *map(str, range(1, len(depths) + 1))), [("accepted at depth", *depths)]),
        ],
    )
    _say(
        console,
        f"{acceptance['mean_acceptance_length']:.2f} tokens a round (bonus included), "
        f"{acceptance['path_acceptance_rate']:.1%} of the drafted path, {acceptance['node_acceptance_rate']:.1%} of "
        f"the nodes, {acceptance['num_rounds']} rounds",
    )
    _agreement(console, record)


def show_profile(console: Console, record: Record) -> None:
    """Print the parts of a round, the packages and the functions that take most of it."""
    settings = record["settings"]
    _say(
        console,
        f"target {settings['target']}{inflated(settings)}, mode {settings['mode']}: {record['num_rounds']} rounds, "
        f"median {record['round_ms']:.2f} ms, {record['tokens_per_s']:.0f} tokens/s with spans on",
    )
    parts, functions = sections.profile_tables(record)
    packages = [(name, f"{time_ms:.3f}") for name, time_ms in record["packages"].items() if time_ms >= 0.001]
    title = "Exclusive time of the event loop's thread, profiler's cost included"
    shown = Table(functions.title, functions.columns, functions.rows)
    show_tables(console, [parts, Table(title, ("package", "ms per round"), packages), shown])


def show_comparison(console: Console, found: Comparison) -> None:
    """Print the conditions, every metric with its interval, and last the changes."""
    first, second = found.num_rounds
    _say(
        console,
        f"{first} and {second} rounds; times are divided by those of {found.reference} beside them; intervals hold for "
        f"all rows together at {CONFIDENCE:.1%}.",
    )
    for note in [*(f"Different: {each}" for each in found.settings), *found.notes]:
        _say(console, note)
    rows = [
        (
            f"{change.system} {change.metric}",
            f"{change.before:.4g}",
            f"{change.after:.4g}",
            f"{change.ratio:.3f}",
            f"[{change.low:.3f}, {change.high:.3f}]",
            change.verdict,
            "any" if change.detectable is None else f"{change.detectable:.0%}",
        )
        for change in found.changes
    ]
    columns = ("system, metric", "before", "after", "ratio", "interval", "", "would find")
    show_tables(console, [Table("After / before", columns, rows)])
    _say(console, f"Times and rates are in tokens of {found.reference}: 1 is the time of one of its tokens.")
    if not found.changed:
        _say(console, "Nothing changed beyond noise.")
    for change in found.changed:
        _say(console, f"{change.system}: {change.metric} is {change.verdict}, {change.ratio:.3f} of its former value.")
