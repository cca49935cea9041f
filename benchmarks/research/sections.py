"""Sections of the page for tree shapes, couplings, stages, exactness, long prompts and windows of drafts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, product
from pathlib import Path

from benchmarks.report import plots
from benchmarks.report.plots import Plot
from benchmarks.report.sections import warn
from benchmarks.report.tables import Record, Section, models_of, number, spread
from benchmarks.statistics import estimate, quantile


def of_tree(record: Record, path: Path, name: str) -> Section:
    """Return the section of a line of `sweep-tree`."""
    section = Section(f"{path.name}: tree shapes")
    if not record["is_complete"]:
        section.warn("Not whole: it was interrupted.")
    warn(section, record, record)
    groups: dict[str, dict[str, Record]] = {}
    for row in record["rows"]:
        shape = f"{row['nodes']}/{row['depth']}/{row['branching']}"
        groups.setdefault(f"T {row['temperature']:g}", {})[shape] = row["speedup"]
    title = "Speed-up over plain by tree shape: nodes/depth/branching"
    section.add([Plot(f"{name}-shapes", title, plots.bars(title, groups, "times as fast", line=1.0))])
    section.table(
        "Shapes, best first, geometric mean over temperatures",
        ("shape", "speed-up"),
        [(each["shape"], number(each["speedup"])) for each in record["overall"]],
    )
    section.origin(record)
    return section


def of_coupling(record: Record, path: Path, name: str) -> Section:
    """Return the section of one temperature of the coupling study."""
    temperature = record["temperature"]
    section = Section(f"{path.name}: coupled picks and their rivals at T {temperature:g}")
    settings = record["settings"]
    section.text(f"{models_of(settings)}, {settings['num_prompts']} prompts, {record['num_positions']} positions.")
    listed = [
        (f"{each['scheme']}, {each['candidates']}", each["acceptance"], each.get("chi_square"))
        for each in record["schemes"]
    ]
    section.table(
        "Acceptance",
        ("scheme, candidates", "accepted", "standard error over prompts", "chi-square p"),
        [
            (
                scheme,
                number(rate["mean"], 3),
                number(rate["standard_error_over_prompts"], 3),
                number(test["p_value"] if test else None, 3),
            )
            for scheme, rate, test in listed
        ],
    )
    section.origin(record)
    return section


def of_stage_sessions(record: Record, path: Path, name: str) -> Section:
    """Return the section of one line of `stage_sessions`."""
    settings = record["settings"]
    decoding = f"Lookup of {settings['nodes']} nodes" if settings["nodes"] else "Plain decoding"
    ways = list(next(iter(record["tokens_per_s"].values())))
    place = f"{settings['sessions']} sessions on {settings['stages']} stages"
    section = Section(f"{path.name}: {place}, {decoding[0].lower()}{decoding[1:]}")
    section.text(
        f"{decoding}, {settings['tokens']} tokens a session, {settings['rounds']} alternating rounds; steps one after "
        "the other, or one under way per stage; tokens per second of all sessions together."
    )
    warn(section, record, record)
    section.table(
        "Steps of different sessions, by round trip added to every link",
        ("round trip", *ways, "ratio"),
        [
            (rtt, *(spread(estimate(rates[way]).to_dict(), 0) for way in ways), spread(record["ratio"][rtt]))
            for rtt, rates in record["tokens_per_s"].items()
        ],
    )
    section.origin(record)
    return section


def of_exactness(record: Record, path: Path, name: str) -> Section:
    """Return the section of one slice of the study of exactness."""
    settings = record["settings"]
    section = Section(f"{path.name}: texts against plain decoding, slice {settings['slice']}")
    section.text(
        f"The embedded pair in {settings['dtype']}, {settings['num_new_tokens']} tokens a text, token by token "
        "beside plain decoding with one thread in one process."
    )
    counts = ("texts", "tokens", "differing_texts", "differing_tokens")
    section.table(
        "Differences, by what the texts promised",
        ("promise", "texts", "tokens", "texts that differ", "tokens that differ"),
        [(promised, *(str(total.get(count, 0)) for count in counts)) for promised, total in record["totals"].items()],
    )
    section.origin(record)
    return section


def of_long_prompt(record: Record, path: Path, name: str) -> Section:
    """Return the section of one line of `long-prompt`."""
    settings, turns = record["settings"], record["turns"]
    section = Section(f"{path.name}: {settings['num_readers']} readers beside a prompt of somebody else")
    section.text(
        f"{models_of(settings)}, {settings['num_prompt_tokens']} tokens in the prompt, turns: {len(turns)}; "
        f"99th percentile of the waits with the prompt, divided by that without: {spread(record['ratio'])}."
    )
    waits = {each: list(chain.from_iterable(turn[f"{each}_ms"] for turn in turns)) for each in ("without", "with")}
    section.table(
        "Waits of the readers for their next tokens, ms",
        ("the prompt", "waits", "p50", "p99"),
        [
            (each, str(len(waits_ms)), number(quantile(waits_ms, 0.5), 1), number(quantile(waits_ms, 0.99), 1))
            for each, waits_ms in waits.items()
        ],
    )
    section.origin(record)
    return section


def of_draft_window(record: Record, path: Path, name: str) -> Section:
    """Return the section of one line of `draft-window`."""
    settings, answers = record["settings"], record["answers"]
    section = Section(f"{path.name}: {settings['mode']} behind long prompts at T {settings['temperature']:g}")
    section.text(
        f"The embedded pair without lookup, {settings['new_tokens']} new tokens, {settings['rounds']} alternating "
        "rounds; a draft has the end alone of a text beyond its context."
    )
    warn(section, record, record)
    rows: list[tuple[str, ...]] = []
    for length, context in product(settings["lengths"], settings["contexts"]):
        plain, drafted = (
            [each for each in answers if (each["prompt_tokens"], each["draft_context"]) == (length, of)]
            for of in (0, context)
        )
        found = (
            [one["tokens_per_round"] for one in drafted],
            [one["tokens_per_s"] / other["tokens_per_s"] for one, other in zip(drafted, plain, strict=True)],
            [one["ttft_s"] for one in drafted],
        )
        rows.append((str(length), str(context), *(spread(estimate(samples).to_dict()) for samples in found)))
    columns = ("prompt", "draft context", "tokens/round", "of plain's rate", "first token, s")
    section.table("By the prompt's tokens", columns, rows)
    section.origin(record)
    return section


OF_LINE: dict[str, Callable[[Record, Path, str], Section]] = {
    "sweep-tree": of_tree,
    "coupling_study": of_coupling,
    "stage_sessions": of_stage_sessions,
    "exactness": of_exactness,
    "long-prompt": of_long_prompt,
    "draft-window": of_draft_window,
}
"""What makes the section of a line, by the line's benchmark."""
