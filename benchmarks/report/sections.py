"""One section of the page per file: runs and sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from benchmarks import summary, sweep_run
from benchmarks.environment import is_clean
from benchmarks.report import plots, systems
from benchmarks.report.console import BUSY_SHARE
from benchmarks.report.plots import Plot
from benchmarks.report.tables import Record, Section, Table, inflated, models_of, number, spread, threads_of
from benchmarks.results_file import ResultsFile
from benchmarks.sweep_grid import AXES

_AXIS_LABELS = {"rtt_ms": "round trip added, ms", "concurrency": "sessions at once", "temperature": "temperature"}
_AXIS_NAMES = {"rtt_ms": "round trip", "concurrency": "sessions at once", "temperature": "temperature"}
_THREADS_OF_OLDER = "the two workers of a MODE@loopback share them, one each at least"
_LINKS = {"target": "the target's link", "draft": "the draft's link", "both": "each of the two links"}


def warn(section: Section, found: Record, header: Record) -> None:
    """Say what weakens the numbers: neighbours, uncommitted changes, systems skipped and prompts left out."""
    share = found.get("neighbours_share")
    if share is not None and share > BUSY_SHARE:
        section.warn(f"Others used {share:.0%} of the processors meanwhile; repeat this on a quiet machine.")
    if not is_clean(header["provenance"]):
        section.warn("Measured with changes that are in no commit.")
    for name, why in (header.get("skipped") or {}).items():
        section.warn(f"Skipped {name}: {why}")
    for name, facts in (header.get("systems") or {}).items():
        for line in summary.reservations(name, facts):
            section.warn(line)
    for task in header.get("left_out") or ():
        section.warn(f"Left out {task}: it does not fit the context with its new tokens.")


def warn_if_short(section: Section, name: str, made: int, asked: int) -> None:
    """Say that a system made fewer tokens than it was asked for, so that it took less time."""
    if made < asked:
        section.warn(f"{name}: {made} tokens were made of {asked} that were asked for.")


def of_run(file: ResultsFile, name: str) -> Section:
    """Return the section of a run; one that is not whole shows its whole rounds."""
    settings, run = file.header["settings"], file.run()
    section = Section(f"{file.path.name}: run{inflated(settings)}")
    section.text(
        f"{models_of(settings)}, {settings['dtype']}, temperature {settings['temperature']:g}, "
        f"{threads_of(file.header, _THREADS_OF_OLDER)}, {settings['workload']}: {len(run.tasks)} prompts x "
        f"{settings['num_new_tokens']} tokens, {run.num_rounds} alternating rounds; medians with the rounds' range."
    )
    if file.status:
        section.warn(file.status)
    found = file.summary or {}
    warn(section, found, file.header)
    for system, rounds in run.samples.items():
        made = [sample.num_tokens for row in rounds for sample in row]
        warn_if_short(section, system, sum(made), len(made) * settings["num_new_tokens"])
    if run.num_rounds:
        by_system = found.get("systems") or summary.summarise(run)
        section.add(systems.figures(name, by_system, inflated(settings)))
        section.add(run_tables(by_system))
        _agreement(section, file, ())
    else:
        section.warn("No round is whole, so there is nothing to show.")
    section.origin(file.header)
    return section


def run_tables(by_system: Mapping[str, Record]) -> list[Table]:
    """Return the tables of a run: all tasks together, the limits, then each task, folded."""
    listed = systems.tables("All tasks", {name: each["pooled"] for name, each in by_system.items()})
    listed.append(systems.limits(by_system))
    categories = list(next(iter(by_system.values()))["categories"])
    for category in categories if len(categories) > 1 else ():
        chosen = {name: each["categories"][category] for name, each in by_system.items()}
        listed += systems.tables(f"Task {category}", chosen, is_folded=True)
    mishaps = [
        (name, str(each["num_degraded"]), str(each["num_resyncs"]))
        for name, each in by_system.items()
        if each["num_degraded"] or each["num_resyncs"]
    ]
    columns = ("system", "generations that fell back", "sessions that began anew")
    return [*listed, Table("Generations that did not go as asked", columns, mishaps)]


def _agreement(section: Section, file: ResultsFile, points: Sequence[str]) -> None:
    if file.summary is None:
        section.text("Differences are listed once the file is whole.")
        return
    num_compared = sum(summary.num_compared(file.run(place)) for place in file.measured_points)  # older files lack it
    section.text(systems.agreement({**file.summary, "num_compared": num_compared}))
    section.add([systems.differences(file.summary, points)])


def of_sweep(file: ResultsFile, name: str) -> Section:
    """Return the section of a sweep; one that is not whole shows the points that have a whole round."""
    settings = file.header["settings"]
    section = Section(f"{file.path.name}: sweep{inflated(settings)}")
    section.text(
        f"{models_of(settings)}, {settings['dtype']}, {settings['threads']} threads of each worker, one "
        f"pair of workers, {settings['num_prompts']} prompts x {settings['num_new_tokens']} tokens, {file.num_rounds} "
        f"rounds over all points; round trips are added to {_LINKS[settings['link']]}. Tokens per second are those of "
        "all sessions together."
    )
    if file.status:
        section.warn(file.status)
    found = file.summary or {}
    warn(section, found, file.header)
    points = found.get("points") or [sweep_run.derive(file, place) for place in file.measured_points]
    if not points:
        section.warn("No round at any point is whole, so there is nothing to show.")
    section.add(sweep_plots(name, points, inflated(settings)))
    section.add([point_table(points)])
    names = [point_name(point) for point in points]
    for point, label in zip(points, names, strict=True):
        pooled = {system: each["pooled"] for system, each in point["systems"].items()}
        section.add(systems.tables(label, pooled, is_folded=True))
    _agreement(section, file, names)
    section.origin(file.header)
    return section


def point_name(point: Record) -> str:
    """Return the conditions of a point in words."""
    return f"+{point['rtt_ms']:g} ms, {point['concurrency']:g} at once, T {point['temperature']:g}"


def point_table(points: Sequence[Record]) -> Table:
    """Return a line per point and mode."""
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
                    *(number(found[phi]["median"] if found else None) for phi in ("phi0", "phi1", "phi2")),
                    number(found["inputs"]["r"] if found else None, 2, 1e3),
                ]
            )
    limits = [system["limits"] for point in points for system in point["systems"].values()]
    return Table(f"All points{systems.too_low(limits)}", columns, listed)


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
            fixed = ", ".join(f"{_AXIS_NAMES[o]} {v:g}" for o, v in zip(others, values, strict=True))
            modes = list(dict.fromkeys(mode for point in chosen for mode in point["throughput"]))
            series = {
                mode: [(p[axis], p["throughput"][mode]) for p in sorted(chosen, key=lambda p: p[axis])]
                for mode in modes
            }
            title = f"Tokens per second over {_AXIS_NAMES[axis]}{f' ({fixed})' if len(sets) > 1 else ''}{suffix}"
            file = f"{name}-{axis.replace('_', '-')}{f'-{number_of + 1}' if len(sets) > 1 else ''}"
            made.append(Plot(file, title, plots.lines(title, series, _AXIS_LABELS[axis], "tokens/s")))
    return made
