"""One section of the page per file: runs, sweeps, tree sweeps, the smoke run, traces, profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import plots, summary, sweep_run, trace
from benchmarks.plots import Plot
from benchmarks.report import BUSY_SHARE
from benchmarks.report_html import blocks
from benchmarks.report_html.html import Section, inflated, number, shown, spread
from benchmarks.results_file import RunFile
from benchmarks.statistics import estimate
from benchmarks.sweep_file import SweepFile
from benchmarks.sweep_grid import AXES
from benchmarks.trace import Timeline
from specsplit.core.errors import InvalidRequest

Record = Mapping[str, Any]
_AXIS_LABELS = {"rtt_ms": "round trip added, ms", "concurrency": "sessions at once", "temperature": "temperature"}
_AXIS_NAMES = {"rtt_ms": "round trip", "concurrency": "sessions at once", "temperature": "temperature"}


def _origin(section: Section, header: Record) -> None:
    """Add where the numbers come from."""
    settings = header["settings"]
    section.facts("Settings", settings)
    if "models" in header:
        section.facts("Models", header["models"])
    section.facts("Provenance", header["provenance"])


def _warn(section: Section, found: Record, header: Record) -> None:
    """Say what weakens the numbers: neighbours, uncommitted changes, what was skipped or left out."""
    share = found.get("neighbours_share")
    if share is not None and share > BUSY_SHARE:
        section.text(f"Others used {share:.0%} of the processors meanwhile; repeat this on a quiet machine.", "warning")
    if header["provenance"].get("has_uncommitted_changes"):
        section.text("The tree had uncommitted changes.", "warning")
    for name, why in (header.get("skipped") or {}).items():
        section.text(f"Skipped {name}: {why}", "warning")
    for name, facts in (header.get("systems") or {}).items():
        for line in summary.reservations(name, facts):
            section.text(line, "warning")
    for task in header.get("left_out") or ():
        section.text(f"Left out {task}: it does not fit the context with its new tokens.", "warning")


def _models(settings: Record) -> str:
    without_lookup = "" if settings.get("lookup", True) else ", without lookup"
    return f"Target {settings['target']}{inflated(settings)}, draft {settings['draft'] or 'none'}{without_lookup}"


def of_run(run: RunFile, name: str) -> Section:
    """Return the section of a run; one that is not whole shows its whole rounds."""
    settings = run.header["settings"]
    section = Section(f"{run.path.name}: run{inflated(settings)}")
    section.text(
        f"{_models(settings)}, {settings['dtype']}, temperature {settings['temperature']:g}, "
        f"{settings['threads']} threads, {settings['workload']}: {len(run.tasks)} prompts x "
        f"{settings['num_new_tokens']} tokens, "
        f"{run.num_rounds} alternating rounds; medians with 95 % intervals."
    )
    if run.status:
        section.text(run.status, "warning")
    found = run.summary or {}
    _warn(section, found, run.header)
    if not run.num_rounds:
        section.text("No round is whole, so there is nothing to show.", "warning")
        _origin(section, run.header)
        return section
    systems = found.get("systems") or summary.summarise(run)
    section.parts += blocks.figures(name, systems, inflated(settings))
    blocks.rows(section, "All tasks", {system: each["pooled"] for system, each in systems.items()})
    blocks.limits(section, systems)
    categories = list(run.categories)
    for category in categories if len(categories) > 1 else ():
        chosen = {system: each["categories"][category] for system, each in systems.items()}
        blocks.rows(section, f"Task {category}", chosen, is_folded=True)
    section.table(
        "What did not go as asked",
        ("system", "generations that fell back", "sessions that began anew"),
        [
            (system, str(each["num_degraded"]), str(each["num_resyncs"]))
            for system, each in systems.items()
            if each["num_degraded"] or each["num_resyncs"]
        ],
    )
    if run.is_whole:
        blocks.differences(section, found["differences"], found["num_ties"])
    else:
        section.text("Differences are listed once the run is whole.")
    _origin(section, run.header)
    return section


def of_sweep(sweep: SweepFile, name: str) -> Section:
    """Return the section of a sweep; one that is not whole shows the points that have a whole round."""
    settings = sweep.header["settings"]
    section = Section(f"{sweep.path.name}: sweep{inflated(settings)}")
    link = {"target": "the target's link", "draft": "the draft's link", "both": "each of the two links"}[
        settings["link"]
    ]
    section.text(
        f"{_models(settings)}, {settings['dtype']}, {settings['threads']} threads of each worker, one pair of workers, "
        f"{settings['num_prompts']} prompts x {settings['num_new_tokens']} tokens, {sweep.num_rounds} rounds over all "
        f"points; round trips are added to {link}. Tokens per second are those of all sessions together."
    )
    if sweep.status:
        section.text(sweep.status, "warning")
    found = sweep.summary or {}
    _warn(section, found, sweep.header)
    points = found.get("points") or [
        sweep_run.derive(sweep, place) for place in range(min(len(sweep.blocks), len(sweep.points)))
    ]
    if not points:
        section.text("No round at any point is whole, so there is nothing to show.", "warning")
    section.parts += sweep_plots(name, points, inflated(settings))
    _point_table(section, points)
    names = [point_name(point) for point in points]
    for point, label in zip(points, names, strict=True):
        pooled = {system: each["pooled"] for system, each in point["systems"].items()}
        blocks.rows(section, label, pooled, is_folded=True)
    if sweep.is_whole:
        blocks.differences(section, found["differences"], found["num_ties"], names)
    _origin(section, sweep.header)
    return section


def point_name(point: Record) -> str:
    """Return the conditions of a point in words."""
    return f"+{point['rtt_ms']:g} ms, {point['concurrency']:g} at once, T {point['temperature']:g}"


def _point_table(section: Section, points: Sequence[Record]) -> None:
    columns = ("point", "mode", "tokens/s", "over plain", "mean length", "hit rate", "phi0", "phi1", "phi2", "r ms")
    listed: list[list[str]] = []
    for point in points:
        for mode, system in point["systems"].items():
            found, block = system["limits"], system["pooled"]
            acceptance = block.get("acceptance")
            length = acceptance["mean_acceptance_length"] if acceptance and acceptance["num_rounds"] else None
            listed.append(
                [
                    point_name(point),
                    mode,
                    spread(point["throughput"][mode], 0),
                    spread(point["speedup"].get(mode)),
                    number(length),
                    number(block.get("hit_rate")),
                    *(number(found[phi]["median"]) if found else number(None) for phi in ("phi0", "phi1", "phi2")),
                    number(found["inputs"]["r"] if found else None, 2, 1e3),
                ]
            )
    section.table("All points", columns, listed)


def sweep_plots(name: str, points: Sequence[Record], suffix: str) -> list[Plot]:
    """Return throughput over each axis that has several values, one plot per set of the other axes' values."""
    made: list[Plot] = []
    for axis in AXES:
        others = [other for other in AXES if other != axis]
        if len({point[axis] for point in points}) < 2:
            continue
        sets = list(product(*(sorted({point[other] for point in points}) for other in others)))
        for number_of, values in enumerate(sets):
            chosen = [p for p in points if tuple(p[other] for other in others) == values]
            fixed = (
                ", ".join(f"{_AXIS_NAMES[o]} {v:g}" for o, v in zip(others, values, strict=True))
                if len(sets) > 1
                else ""
            )
            modes = list(dict.fromkeys(mode for point in chosen for mode in point["throughput"]))
            series = {
                mode: [(p[axis], p["throughput"][mode]) for p in sorted(chosen, key=lambda p: p[axis])]
                for mode in modes
            }
            title = f"Tokens per second over {_AXIS_NAMES[axis]}{f' ({fixed})' if fixed else ''}{suffix}"
            file = f"{name}-{axis.replace('_', '-')}{f'-{number_of + 1}' if len(sets) > 1 else ''}"
            made.append(Plot(file, title, plots.lines(title, series, _AXIS_LABELS[axis], "tokens/s")))
    return made


def of_smoke(record: Record, path: Path, name: str) -> Section:
    """Return the section of a line of `smoke`."""
    section = Section(f"{path.name}: smoke")
    if not record["is_complete"]:
        section.text(f"Not whole: it was interrupted after {record['num_rounds']} rounds.", "warning")
    _warn(section, record, record)
    title = "Tokens per second, prompt included"
    section.parts.append(
        Plot(f"{name}-rates", title, plots.bars(title, {"tokens/s": record["tokens_per_s"]}, "tokens/s", digits=0))
    )
    section.table(
        "Bars",
        ("bar", "measure", "found", "wanted", "met"),
        [
            (
                bar["id"],
                bar["measure"],
                spread(bar["value"]) if isinstance(bar["value"], Mapping) else shown(bar["value"]),
                f"{bar['relation']} {shown(bar['bound'])}",
                shown(bar["is_met"]),
            )
            for bar in record["bars"]
        ],
    )
    section.facts("Settings", record["settings"])
    section.facts("Provenance", record["provenance"])
    return section


def of_tree(record: Record, path: Path, name: str) -> Section:
    """Return the section of a line of `sweep-tree`."""
    section = Section(f"{path.name}: tree shapes")
    if not record["is_complete"]:
        section.text("Not whole: it was interrupted.", "warning")
    _warn(section, record, record)
    groups: dict[str, dict[str, Record]] = {}
    for row in record["rows"]:
        shape = f"{row['nodes']}/{row['depth']}/{row['branching']}"
        groups.setdefault(f"T {row['temperature']:g}", {})[shape] = row["speedup"]
    title = "Speed-up over plain by tree shape: nodes/depth/branching"
    section.parts.append(Plot(f"{name}-shapes", title, plots.bars(title, groups, "times as fast", line=1.0)))
    section.table(
        "Shapes, best first, geometric mean over temperatures",
        ("shape", "speed-up"),
        [(each["shape"], number(each["speedup"])) for each in record["overall"]],
    )
    section.facts("Settings", record["settings"])
    section.facts("Provenance", record["provenance"])
    return section


def of_coupling(record: Record, path: Path, name: str) -> Section:
    """Return the section of one temperature of the coupling study."""
    temperature = record["temperature"]
    section = Section(f"{path.name}: coupled picks and their rivals at T {temperature:g}")
    settings = record["settings"]
    section.text(f"{_models(settings)}, {settings['num_prompts']} prompts, {record['num_positions']} positions.")
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
    section.facts("Settings", settings)
    section.facts("Provenance", record["provenance"])
    return section


def of_stage_sessions(record: Record, path: Path, name: str) -> Section:
    """Return the section of one line of `stage_sessions`."""
    settings = record["settings"]
    decoding = f"Lookup of {settings['nodes']} nodes" if settings["nodes"] else "Plain decoding"
    ways = list(next(iter(record["tokens_per_s"].values())))
    section = Section(f"{path.name}: {settings['sessions']} sessions on {settings['stages']} stages")
    section.text(
        f"{decoding}, {settings['tokens']} tokens a session, {settings['rounds']} alternating rounds; steps one after "
        "the other, or one under way per stage; tokens per second of all sessions together."
    )
    _warn(section, record, record)
    section.table(
        "Steps of different sessions, by round trip added to every link",
        ("round trip", *ways, "ratio"),
        [
            (rtt, *(spread(estimate(rates[way]).to_dict(), 0) for way in ways), spread(record["ratio"][rtt]))
            for rtt, rates in record["tokens_per_s"].items()
        ],
    )
    section.facts("Settings", settings)
    section.facts("Provenance", record["provenance"])
    return section


def of_profile(record: Record, path: Path, name: str) -> Section:
    """Return the section of a profile."""
    section = Section(f"{path.name}: where a round's time goes, mode {record['settings']['mode']}")
    section.text(
        f"{_models(record['settings'])}; {record['num_rounds']} rounds, median {record['round_ms']:.2f} ms; in process."
    )
    section.table("Parts of the time", ("part", "ms per round", "share"), profile_rows(record))
    section.table(
        "Exclusive time by function, with the profiler's own cost",
        ("function", "calls per round", "ms per round"),
        [(each["function"], number(each["calls"], 1), number(each["ms"], 3)) for each in record["functions"]],
        is_folded=True,
    )
    section.facts("Settings", record["settings"])
    section.facts("Provenance", record["provenance"])
    return section


def profile_rows(record: Record) -> list[tuple[str, str, str]]:
    """Return part, milliseconds per round and share."""
    return [(part, number(each["ms"], 3), f"{each['share']:.0%}") for part, each in record["parts"].items()]


def of_trace(path: Path, all_paths: Sequence[Path], name: str) -> Section:
    """Return the section of the first request in `path`, with what any of `all_paths` tells of it.

    Raises:
        InvalidRequest: it has no more than one round.
    """
    found: Timeline | None = trace.timeline(trace.read([path, *(each for each in all_paths if each != path)]))
    if found is None:
        raise InvalidRequest(f"The request in {path} has no second round; generate more tokens.", param="file")
    section = Section(f"{path.name}: a timeline of rounds")
    title = f"{path.name}: rounds of one request ({len(found.rounds)} in all, the middle ones shown)"
    section.parts.append(Plot(f"{name}-timeline", title, plots.rounds(title, found)))
    shares = found.shares()
    per_round = found.span_ms / len(found.rounds)
    section.table(
        "Shares of the time",
        ("lane", "share", "ms per round"),
        [(lane, f"{share:.0%}", number(share * per_round)) for lane, share in shares.items()],
    )
    return section
