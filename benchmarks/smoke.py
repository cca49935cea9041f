"""`smoke`: the systems of the bars on the embedded pair, on prompts that nothing was tuned to.

Checks the bars that need one machine only: P1, P2, P3, P4, P8, P9, each in every cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import cells, measuring
from benchmarks.cells import Cell, wall_times
from benchmarks.metrics import overhead_ms, told_of
from benchmarks.registry import BARE, GENERATE, PLAIN
from benchmarks.report.console import Progress
from benchmarks.results_file import Run
from benchmarks.run import Bench, RunSettings
from benchmarks.statistics import Bar, estimate, median, paired_speedup

AUTO, AUTO_ALONE, PINGPONG, SERVICES = "auto", "auto-no-lookup", "pingpong-no-lookup", "pingpong-no-lookup@loopback"
ASSISTED, LOOKUP = ("assisted",), ("lookup-4", "lookup-10")
SYSTEMS = (PLAIN, AUTO, AUTO_ALONE, PINGPONG, SERVICES, BARE, GENERATE, *ASSISTED, *LOOKUP)
TEMPERATURES = (0.0, 1.0)
LOWEST_OF_AUTO = 0.93
Record = dict[str, Any]


def run(settings: RunSettings, threads: Sequence[int], progress: Progress, tell: measuring.Tell) -> Record | None:
    """Load, measure, derive; None if the run was interrupted before its first cell was whole.

    Raises:
        SpecSplitError: a model cannot be loaded, or the settings do not fit it.
    """
    found = cells.measure(settings, threads, TEMPERATURES, progress, tell, _inspect)
    if found is None:
        return None
    bars = [bar.to_dict() for cell in found.cells for bar in check_bars(cell)]
    return {"benchmark": "smoke", **found.to_dict(), "bars": bars}


def _inspect(loaded: Bench) -> Record:
    """Return a round's bytes by link and direction, and the seconds of bare gRPC exchanges of as many."""
    services = loaded.children[SERVICES]
    wire_bytes = services.ask("wire_bytes", loaded.tasks[0].prompt_ids)
    return {"wire_bytes": wire_bytes, "exchange_s": services.ask("exchange_s", wire_bytes)}


def check_bars(cell: Cell) -> list[Bar]:
    """Return every bar that a cell of SYSTEMS can check."""
    is_greedy = cell.temperature == 0
    best = {ways: max(ways, key=lambda name: cell.rates()[name].median) for ways in (ASSISTED, LOOKUP)}
    alone = max((AUTO_ALONE, PINGPONG), key=lambda name: cell.ratio(name, PLAIN).median)
    speeds = [
        ("P1", PLAIN, GENERATE, 1.1, ""),
        ("P2", alone, PLAIN, 1.3 if is_greedy else 1.15, "without lookup; the better one"),
        ("P3", AUTO, best[ASSISTED], 1.5, ""),
        ("P3", AUTO, best[LOOKUP], 1.15, "the better one"),
    ]
    samples, where = cell.run.samples, f", {cell.name}"
    decode_s = [[sample.decode_s or sample.wall_s for sample in row] for row in samples[PLAIN]]
    bare = paired_speedup(wall_times(samples[BARE]), decode_s)
    return [
        *(
            Bar(name, f"{system} / {baseline}{where}", cell.ratio(system, baseline), ">=", bound, note)
            for name, system, baseline, bound, note in speeds
        ),
        auto_bar(cell),
        Bar("P1", f"plain / bare forward{where}", bare, ">=", 0.93, "the bar of deeper targets"),
        *_overhead_bars(cell, where),
        *(
            Bar("P8", f"bytes a round, {link}{where}", estimate([value]), "<=", 400, "32 nodes; all TCP payload")
            for link, value in cell.facts["wire_bytes"].items()
        ),
        Bar(
            "P9", f"target forwards a round{where}", estimate(forwards_per_round(cell.run, PINGPONG)), "==", 1,
            "the prompt's left out",
        ),
    ]  # fmt: skip


def auto_bar(cell: Cell, place: str = "") -> Bar:
    """Return the bar of `auto` over plain decoding at a place; above T = 0 the lowest round has a bound too."""
    measure, ratio = f"{AUTO}{place} / {PLAIN}{place}, {cell.name}", cell.ratio(AUTO + place, PLAIN + place)
    if cell.temperature == 0:
        return Bar("P2", measure, ratio, ">=", 1.6)
    note = f"lowest {ratio.low:.2f}, to be >= {LOWEST_OF_AUTO}"
    return Bar("P2", measure, ratio, ">=", 1.0, note, LOWEST_OF_AUTO)


def _overhead_bars(cell: Cell, where: str) -> list[Bar]:
    """Return what a round costs beside the forwards: as a share of it in process, over bare exchanges on loopback."""
    rows = {name: [told_of(row) for row in cell.run.samples[name]] for name in (PINGPONG, SERVICES)}
    shares = [
        sum(overhead_ms(told) * told.num_rounds for told in row) / sum(told.timings.decode_s * 1e3 for told in row)
        for row in rows[PINGPONG]
    ]
    exchange_s = cell.facts["exchange_s"]
    overheads = [median([overhead_ms(told) for told in row]) for row in rows[SERVICES]]
    note = f"{median(overheads):.2f} ms over {exchange_s * 1e3:.2f} ms, a bare gRPC exchange of the same bytes"
    ratios = estimate([overhead / (exchange_s * 1e3) for overhead in overheads])
    return [
        Bar("P4", f"share of a round beside the forwards{where}", estimate(shares), "<=", 0.1),
        Bar("P4", f"the same over bare exchanges, loopback{where}", ratios, "<=", 3, note),
    ]


def forwards_per_round(run: Run, system: str) -> list[float]:
    """Return each generation's target forwards per round, without the prompt's: one per chunk of it begun."""
    chunk = run.header["prefill_chunk_tokens"]
    lengths = {task["id"]: task["num_prompt_tokens"] for task in run.header["prompts"]["tasks"]}
    samples = [sample for row in run.samples[system] for sample in row]
    pairs = [(each.told, -(-lengths[each.task] // chunk)) for each in samples if each.told is not None]
    return [(told.target_forwards - num_chunks) / told.num_rounds for told, num_chunks in pairs]
