"""Sections of the page for profiles and traces, their tables and the plot of a timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.report.console import show_tables
from benchmarks.report.plots import Palette, Plot, canvas, legend
from benchmarks.report.tables import Record, Section, Table, inflated, models_of, number
from benchmarks.research.rounds import trace
from benchmarks.research.rounds.trace import Timeline, minus, overlap
from specsplit.core.errors import InvalidRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def of_profile(record: Record, path: Path, name: str) -> Section:
    """Return the section of a profile."""
    section = Section(f"{path.name}: time of a round by part, mode {record['settings']['mode']}")
    section.text(
        f"{models_of(record['settings'])}; {record['num_rounds']} rounds, median "
        f"{record['round_ms']:.2f} ms; in process."
    )
    section.add(profile_tables(record))
    section.origin(record)
    return section


def profile_tables(record: Record) -> list[Table]:
    """Return the parts of a round, and the functions that take most of it."""
    parts = [(part, number(each["ms"], 3), f"{each['share']:.0%}") for part, each in record["parts"].items()]
    functions = [(each["function"], number(each["calls"], 1), number(each["ms"], 3)) for each in record["functions"]]
    return [
        Table("Parts of the time", ("part", "ms per round", "share"), parts),
        Table(
            "Exclusive time by function, with the profiler's own cost",
            ("function", "calls per round", "ms per round"),
            functions,
            is_folded=True,
        ),
    ]


def of_trace(path: Path, all_paths: Sequence[Path], name: str) -> Section:
    """Return the section of the first request in `path`, with the spans that any of `all_paths` adds to it.

    Raises:
        InvalidRequest: it has no more than one round.
    """
    found: Timeline | None = trace.timeline(trace.read([path, *(each for each in all_paths if each != path)]))
    if found is None:
        raise InvalidRequest(f"The request in {path} has no second round; generate more tokens.", param="file")
    section = Section(f"{path.name}: a timeline of rounds")
    title = f"{path.name}: rounds of one request ({len(found.rounds)} in all, the middle ones shown)"
    section.add([Plot(f"{name}-timeline", title, rounds(title, found))])
    shares = found.shares()
    per_round = found.span_ms / len(found.rounds)
    section.table(
        "Shares of the time",
        ("lane", "share", "ms per round"),
        [(lane, f"{share:.0%}", number(share * per_round)) for lane, share in shares.items()],
    )
    return section


def show_profile(console: Console, record: Record) -> None:
    """Print the parts of a round, the packages and the functions that take most of it."""
    settings = record["settings"]
    console.print(
        f"target {settings['target']}{inflated(settings)}, mode {settings['mode']}: {record['num_rounds']} rounds, "
        f"median {record['round_ms']:.2f} ms, {record['tokens_per_s']:.0f} tokens/s with spans on",
        markup=False,
    )
    parts, functions = profile_tables(record)
    packages = [(name, f"{time_ms:.3f}") for name, time_ms in record["packages"].items() if time_ms >= 0.001]
    title = "Exclusive time of the event loop's thread, profiler's cost included"
    shown = Table(functions.title, functions.columns, functions.rows)
    show_tables(console, [parts, Table(title, ("package", "ms per round"), packages), shown])


def rounds(title: str, timeline: Timeline, num_rounds: int = 8) -> Callable[[Palette], Figure]:
    """Return who did what in the middle `num_rounds` of a generation, a lane each; what is pale is idle."""

    def draw(palette: Palette) -> Figure:
        first = max(0, (len(timeline.rounds) - num_rounds) // 2)
        shown = timeline.rounds[first : first + num_rounds]
        window = [(shown[0][0], shown[-1][1])]
        wire = palette.series[2]
        lanes = {
            "target": ("verify", timeline.verify, palette.series[0]),
            "wire to target": ("wire, queues, hand-over", timeline.to_target, wire),
            "draft": ("draft", timeline.draft, palette.series[1]),
            "wire to draft": (None, timeline.to_draft, wire),
        }
        with canvas(palette, title, 3.3) as (figure, axes):
            for row, (verb, lane, colour) in enumerate(lanes.values()):
                for busy, shade, label in ((False, palette.faint, None if row else "idle"), (True, colour, verb)):
                    pieces = overlap(window, lane) if busy else minus(window, lane)
                    spans = [(start - window[0][0], end - start) for start, end in pieces]
                    axes.broken_barh(
                        spans, (row - 0.3, 0.6), facecolor=shade, linewidth=0, alpha=1 if busy else 0.45, label=label
                    )
            for number, (start, _) in enumerate(shown):
                at = start - window[0][0]
                axes.axvline(at, color=palette.ink, linewidth=0.7, linestyle=":")
                axes.annotate(
                    f"{first + number + 1}",
                    (at, -0.62),
                    (3, 0),
                    textcoords="offset points",
                    fontsize=8,
                    color=palette.ink,
                )
            axes.set_yticks(range(len(lanes)), list(lanes))
            axes.set_ylim(len(lanes) - 0.5, -0.8)
            axes.set_xlim(0, window[0][1] - window[0][0])
            axes.set_xlabel("ms; dotted lines begin a round, with its number")
            legend(figure, axes)
            return figure

    return draw
