"""The bars that need a network or a second core, from results files of `sweep`: P5, P6, P7, and `auto` at every point.

Every ratio pairs what one round measured: rounds are outermost in a sweep, so a drift of the machine meets both sides.
Times are those of decoding, from the first token to the last.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import registry, results_file
from benchmarks.environment import require_clean
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.cells import bounds_of
from benchmarks.results_file import SWEEP, ResultsFile
from benchmarks.statistics import Bar, Estimate, estimate, median, paired_speedup
from benchmarks.sweep_run import derive

AUTO, STREAM, OVERLAP, PINGPONG = "auto", "stream", "overlap", "pingpong"
LOWEST_OF_AUTO = 0.90
FAR_MS = 10
"""The round trip of P6."""
Rows = list[list[float]]


def decode_times(found: ResultsFile, point: int) -> dict[str, Rows]:
    """Return by mode the seconds of decoding, [rounds][tasks], of a point with one session at once."""
    samples = found.run(point).samples
    return {
        mode: [[sample.decode_s or sample.wall_s for sample in row] for row in rows] for mode, rows in samples.items()
    }


def best_of(times: dict[str, Rows]) -> str:
    """Return the fastest fixed mode."""
    fixed = [mode for mode in times if mode != AUTO]
    return min(fixed, key=lambda mode: median([sum(row) for row in times[mode]]))


def bars_of(found: ResultsFile) -> list[Bar]:
    """Return every bar that this sweep can check."""
    told = found.header["settings"]
    is_useless = "useless" in str(told["draft"])
    by_rtt: dict[float, tuple[int, dict[str, Rows]]] = {}
    bars: list[Bar] = []
    for place, point in enumerate(found.points):
        if point["concurrency"] != 1 or place >= len(found.blocks):
            continue
        times = decode_times(found, place)
        if point["temperature"] == 0:
            by_rtt[point["rtt_ms"]] = place, times
        bars += _auto_bars(times, f"{point['rtt_ms']:g} ms, T {point['temperature']:g}", is_useless=is_useless)
    if is_useless:
        return bars
    return [*_overlap_bars(found, by_rtt), *_streaming_bars(by_rtt), *bars]


def _auto_bars(times: dict[str, Rows], where: str, *, is_useless: bool) -> list[Bar]:
    if AUTO not in times:
        return []
    bars: list[Bar] = []
    for against in dict.fromkeys((registry.PLAIN, best_of(times))):
        ratio = paired_speedup(times[against], times[AUTO])
        name = "P7" if is_useless and against == registry.PLAIN else "auto"
        draft = ", useless draft" if is_useless else ""
        note = f"{len(ratio.samples)} rounds"
        bars.append(Bar(name, f"auto / {against}, {where}{draft}", ratio, ">=", 0.95, note, LOWEST_OF_AUTO))
    return bars


def _overlap_bars(found: ResultsFile, by_rtt: dict[float, tuple[int, dict[str, Rows]]]) -> list[Bar]:
    if 0 not in by_rtt or OVERLAP not in by_rtt[0][1]:
        return []
    limits = derive(found, by_rtt[0][0])["systems"][OVERLAP]["limits"]
    if not limits:
        return []
    value = limits["phi1"]
    return [
        Bar("P5", "phi1, overlap on loopback", Estimate(value["median"], value["low"], value["high"], ()), ">=", 0.85)
    ]


def _streaming_bars(by_rtt: dict[float, tuple[int, dict[str, Rows]]]) -> list[Bar]:
    if not {0, FAR_MS} <= set(by_rtt) or STREAM not in by_rtt[FAR_MS][1]:
        return []
    near, far = by_rtt[0][1], by_rtt[FAR_MS][1]
    best = best_of(near)
    bars = [
        Bar("P6", f"stream at {FAR_MS} ms / {best} at 0 ms", paired_speedup(near[best], far[STREAM]), ">=", 0.85,
            "the best of all modes at 0 ms"),
    ]  # fmt: skip
    if PINGPONG in far:
        ratio = paired_speedup(far[PINGPONG], far[STREAM])
        bars.append(Bar("P6", f"stream / pingpong at {FAR_MS} ms", ratio, ">=", 1.15))
    return bars


def rates(found: ResultsFile) -> list[dict[str, Any]]:
    """Return tokens per second of decoding, by point and mode."""
    rows: list[dict[str, Any]] = []
    for place, point in enumerate(found.points):
        if point["concurrency"] == 1 and place < len(found.blocks):
            tokens = found.run(place).samples
            times = decode_times(found, place)
            rows += [
                {
                    **point,
                    "mode": mode,
                    "tokens_per_s": estimate(
                        [
                            sum(sample.num_tokens - 1 for sample in row) / sum(seconds)
                            for row, seconds in zip(tokens[mode], times[mode], strict=True)
                        ]
                    ).to_dict(),
                }
                for mode in times
            ]
    return rows


@app.command("network-bars")
def network_bars(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Results files of sweep.")],
    uncommitted: Annotated[
        bool, typer.Option("--uncommitted", help="Check what was measured without a commit.")
    ] = False,
) -> None:
    """Check the bars that sweeps can check, and print them; one JSON line last."""
    console = report.new_console()
    told: list[dict[str, object]] = []
    for path in files:
        found = results_file.read(path, SWEEP)
        if not uncommitted:
            require_clean(path, [found.header["provenance"]])
        bars = bars_of(found)
        listed = report.table(str(path), "bar", "measure", "value", "bound", "met", "note")
        for bar in bars:
            value = f"{bar.value.median:.2f} [{bar.value.low:.2f}, {bar.value.high:.2f}]"
            listed.add_row(
                bar.id, bar.measure, value, bounds_of(bar.relation, bar.bound, bar.lowest), _yes(bar.is_met), bar.note
            )
        console.print(listed)
        _show_rates(rates(found), console)
        told.append({"file": str(path), "bars": [bar.to_dict() for bar in bars], "rates": rates(found)})
    sys.stdout.write(json.dumps({"benchmark": "network-bars", "files": told}) + "\n")


def _show_rates(rows: Sequence[dict[str, Any]], console: Any) -> None:
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    listed = report.table("Tokens per second of decoding", "round trip", "T", *modes)
    for key in dict.fromkeys((row["rtt_ms"], row["temperature"]) for row in rows):
        here = {row["mode"]: row["tokens_per_s"] for row in rows if (row["rtt_ms"], row["temperature"]) == key}
        cells = [f"{here[mode]['median']:.1f}" if mode in here else "-" for mode in modes]
        listed.add_row(f"{key[0]:g} ms", f"{key[1]:g}", *cells)
    console.print(listed)


def _yes(is_met: bool) -> str:
    return "yes" if is_met else "NO"
