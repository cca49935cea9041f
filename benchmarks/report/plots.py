"""The plots of a report: plain numbers in, matplotlib figures out, in a light and a dark palette.

Knows no results file. Colours are roles, so that one SVG serves both palettes of a page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsplit.core.errors import InvalidSettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from benchmarks.trace import Timeline

Spread = Mapping[str, Any]
"""median, low, high."""
WIDTH_IN = 8.0
_DPI = 144


@dataclass(frozen=True, slots=True)
class Palette:
    """What is drawn in which colour."""

    paper: str
    ink: str
    faint: str
    series: tuple[str, ...]


# Okabe and Ito's colours, which people of any colour vision tell apart; lighter ones on dark paper.
LIGHT = Palette(
    "#ffffff",
    "#1f2328",
    "#d0d7de",
    ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#56849c", "#7a5c3e", "#666666"),
)
DARK = Palette(
    "#0d1117",
    "#e6edf3",
    "#3d444d",
    ("#56b4e9", "#f0883e", "#2fc49a", "#d884c8", "#e3c04c", "#9ec5d8", "#c8a27c", "#a8a8a8"),
)
# Colours that nothing else has: replaced by variables of the page's style.
_ROLES = Palette("#fefe01", "#fefe02", "#fefe03", tuple(f"#fefe1{index}" for index in range(len(LIGHT.series))))
VARIABLES = {
    _ROLES.paper: "--paper",
    _ROLES.ink: "--ink",
    _ROLES.faint: "--faint",
    **{colour: f"--series-{index}" for index, colour in enumerate(_ROLES.series)},
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure that can be drawn in any palette."""

    name: str
    """Of its files; letters, digits and dashes."""
    title: str
    draw: Callable[[Palette], Figure]


@contextmanager
def _canvas(palette: Palette, title: str, height_in: float) -> Iterator[tuple[Figure, Axes]]:
    """Give empty axes in the palette's colours."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {
        "font.size": 10,
        "font.family": "sans-serif",
        "text.color": palette.ink,
        "axes.labelcolor": palette.ink,
        "axes.edgecolor": palette.faint,
        "axes.facecolor": palette.paper,
        "figure.facecolor": palette.paper,
        "xtick.color": palette.ink,
        "ytick.color": palette.ink,
        "grid.color": palette.faint,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=12)
        axes.set_axisbelow(True)
        yield figure, axes


def _legend(figure: Figure, axes: Axes) -> None:
    """Put the names of the series below the axes, where they hide nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        figure.legend(handles, labels, loc="outside lower left", ncols=min(len(labels), 5))


def _whiskers(values: Sequence[Spread]) -> list[list[float]]:
    return [
        [max(0.0, value["median"] - value["low"]) for value in values],
        [max(0.0, value["high"] - value["median"]) for value in values],
    ]


def bars(
    title: str,
    groups: Mapping[str, Mapping[str, Spread]],
    label: str,
    *,
    order: Sequence[str] = (),
    line: float | None = None,
    digits: int = 2,
) -> Callable[[Palette], Figure]:
    """Return horizontal bars with their intervals: a row per system, a colour per group; a reference at `line`."""

    def draw(palette: Palette) -> Figure:
        rows = list(order or dict.fromkeys(name for values in groups.values() for name in values))
        width = 0.8 / len(groups)
        with _canvas(palette, title, 1.3 + 0.26 * len(rows) * max(1.6, len(groups))) as (figure, axes):
            for index, (group, values) in enumerate(groups.items()):
                places = [rows.index(name) + (index - (len(groups) - 1) / 2) * width for name in values]
                spreads = list(values.values())
                colour = palette.series[index % len(palette.series)]
                medians = [value["median"] for value in spreads]
                axes.barh(places, medians, width * 0.9, color=colour, label=group)
                axes.errorbar(
                    medians, places, xerr=_whiskers(spreads), fmt="none", ecolor=palette.ink, elinewidth=1, capsize=2
                )
                for place, value in zip(places, spreads, strict=True):
                    axes.annotate(
                        f"{value['median']:.{digits}f}",
                        (max(value["median"], value["high"]), place),
                        (4, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=8,
                        color=palette.ink,
                    )
            if line is not None:
                axes.axvline(line, color=palette.ink, linewidth=0.8, linestyle="--")
            axes.set_yticks(range(len(rows)), rows)
            axes.invert_yaxis()
            axes.set_xlim(left=0)
            axes.margins(x=0.12)
            axes.set_xlabel(label)
            axes.grid(axis="x", linewidth=0.6)
            _legend(figure, axes)
            return figure

    return draw


def columns(
    title: str, series: Mapping[str, Sequence[float]], x_label: str, y_label: str
) -> Callable[[Palette], Figure]:
    """Return columns side by side; entry k of each series stands at k."""

    def draw(palette: Palette) -> Figure:
        width = 0.8 / len(series)
        longest = max(map(len, series.values()))
        with _canvas(palette, title, 3.4) as (figure, axes):
            for index, (name, values) in enumerate(series.items()):
                places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(values))]
                axes.bar(places, values, width * 0.92, color=palette.series[index % len(palette.series)], label=name)
            axes.set_xticks(range(longest))
            axes.set_ylim(bottom=0)
            axes.set_xlabel(x_label)
            axes.set_ylabel(y_label)
            axes.grid(axis="y", linewidth=0.6)
            _legend(figure, axes)
            return figure

    return draw


def by_depth(title: str, series: Mapping[str, Sequence[float | None]]) -> Callable[[Palette], Figure]:
    """Return the conditional acceptance over depth, counted from 1."""

    def draw(palette: Palette) -> Figure:
        with _canvas(palette, title, 3.4) as (figure, axes):
            deepest = max(map(len, series.values()))
            for index, (name, rates) in enumerate(series.items()):
                points = [(depth, rate) for depth, rate in enumerate(rates, 1) if rate is not None]
                axes.plot(
                    [depth for depth, _ in points],
                    [rate for _, rate in points],
                    **_marks(palette, index),
                    label=name,
                )
            axes.set_xticks(range(1, deepest + 1))
            axes.set_ylim(0, 1.04)
            axes.set_xlabel("depth")
            axes.set_ylabel("accepted, of what was reached")
            axes.grid(axis="y", linewidth=0.6)
            _legend(figure, axes)
            return figure

    return draw


def _marks(palette: Palette, index: int) -> dict[str, Any]:
    return {
        "color": palette.series[index % len(palette.series)],
        "marker": "osD^vPX*"[index % 8],
        "markersize": 5,
        "linewidth": 1.6,
    }


def lines(
    title: str, series: Mapping[str, Sequence[tuple[float, Spread]]], x_label: str, y_label: str
) -> Callable[[Palette], Figure]:
    """Return medians over x with their intervals."""

    def draw(palette: Palette) -> Figure:
        with _canvas(palette, title, 3.8) as (figure, axes):
            for index, (name, points) in enumerate(series.items()):
                values = [value for _, value in points]
                axes.errorbar(
                    [x for x, _ in points],
                    [value["median"] for value in values],
                    yerr=_whiskers(values),
                    capsize=3,
                    elinewidth=1,
                    label=name,
                    **_marks(palette, index),
                )
            axes.set_xticks(sorted({x for points in series.values() for x, _ in points}))
            axes.set_ylim(bottom=0)
            axes.set_xlabel(x_label)
            axes.set_ylabel(y_label)
            axes.grid(axis="y", linewidth=0.6)
            _legend(figure, axes)
            return figure

    return draw


def reliability(title: str, series: Mapping[str, Sequence[Mapping[str, float]]]) -> Callable[[Palette], Figure]:
    """Return the share that was right over the mean estimate, a point per bin, beside where the two are equal."""

    def draw(palette: Palette) -> Figure:
        with _canvas(palette, title, 5.6) as (figure, axes):
            axes.plot([0, 1], [0, 1], color=palette.ink, linewidth=0.8, linestyle="--", label="estimate = share")
            for index, (name, bins) in enumerate(series.items()):
                shares = [{"median": each["observed"], "low": each["low"], "high": each["high"]} for each in bins]
                axes.errorbar(
                    [each["predicted"] for each in bins],
                    [each["observed"] for each in bins],
                    yerr=_whiskers(shares),
                    capsize=2,
                    elinewidth=0.9,
                    label=name,
                    **_marks(palette, index),
                )
            axes.set_xlim(-0.02, 1.02)
            axes.set_ylim(-0.02, 1.02)
            axes.set_aspect("equal")
            axes.set_xlabel("estimate, mean of a bin")
            axes.set_ylabel("share of the bin that was right")
            axes.grid(linewidth=0.6)
            _legend(figure, axes)
            return figure

    return draw


def rounds(title: str, timeline: Timeline, num_rounds: int = 8) -> Callable[[Palette], Figure]:
    """Return who did what in the middle `num_rounds` of a generation, a lane each; what is pale is idle."""
    from benchmarks.trace import minus, overlap

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
        with _canvas(palette, title, 3.3) as (figure, axes):
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
            _legend(figure, axes)
            return figure

    return draw


def inline_svg(plot: Plot) -> str:
    """Return the plot as an SVG element whose colours are variables of the page that holds it."""
    text = _saved(plot.draw(_ROLES), "svg", _ROLES).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    # Ids are unique in a page only with the plot's name before them.
    text = re.sub(r'\bid="', f'id="{plot.name}-', text)
    text = re.sub(r"url\(#", f"url(#{plot.name}-", text)
    text = re.sub(r'href="#', f'href="#{plot.name}-', text)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"', r'<svg \1width="100%"', text, count=1)
    text = re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg ", f'<svg role="img" aria-label="{_escaped(plot.title)}" ', 1)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def _saved(figure: Figure, form: str, palette: Palette) -> bytes:
    import matplotlib as mpl

    out = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "specsplit"}):
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        figure.savefig(out, format=form, dpi=_DPI, facecolor=palette.paper, metadata=metadata)
    return out.getvalue()


def write(plots: Sequence[Plot], folder: Path, tick: Callable[[str], None]) -> list[Path]:
    """Write each plot as PNG and SVG, light and dark.

    Raises:
        InvalidSettings: the folder or a file in it cannot be written.
    """
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for plot in plots:
            for suffix, palette in (("", LIGHT), ("-dark", DARK)):
                figure = plot.draw(palette)
                for form in ("png", "svg"):
                    path = folder / f"{plot.name}{suffix}.{form}"
                    path.write_bytes(_saved(figure, form, palette))
                    written.append(path)
            tick(plot.name)
    except OSError as error:
        raise InvalidSettings(f"The plots cannot be written to {folder} ({error.strerror}); check --plots.") from error
    return written
