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
from xml.sax.saxutils import escape

from benchmarks.statistics import range_of
from specsplit.core.errors import InvalidSettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Spread = Mapping[str, Any]
"""median, low, high."""
WIDTH_IN = 8.0
_DPI = 144


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of a drawing by their roles."""

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
    """The name of its files; letters, digits and dashes."""
    title: str
    draw: Callable[[Palette], Figure]


@contextmanager
def canvas(palette: Palette, title: str, height_in: float) -> Iterator[tuple[Figure, Axes]]:
    """Give empty axes in the palette's colours."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[str, Any] = {"font.size": 10, "font.family": "sans-serif"}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), palette.ink)
    style |= dict.fromkeys(("axes.edgecolor", "grid.color"), palette.faint)
    style |= dict.fromkeys(("axes.facecolor", "figure.facecolor"), palette.paper)
    style |= dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)
    with mpl.rc_context(style):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=12)
        axes.set_axisbelow(True)
        yield figure, axes


def legend(figure: Figure, axes: Axes) -> None:
    """Put the names of the series below the axes, where they hide nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        figure.legend(handles, labels, loc="outside lower left", ncols=min(len(labels), 5))


def upright(figure: Figure, axes: Axes, x_label: str, y_label: str) -> Figure:
    """Finish a figure whose values rise from zero."""
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", linewidth=0.6)
    legend(figure, axes)
    return figure


def whiskers(values: Sequence[Spread]) -> list[list[float]]:
    """Return the ways from each median down and up to the end of its range."""
    return [
        [value["median"] - range_of(value)[0] for value in values],
        [range_of(value)[1] - value["median"] for value in values],
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
    """Return horizontal bars with their ranges: a row per system, a colour per group; a reference at `line`."""

    def draw(palette: Palette) -> Figure:
        rows = list(order or dict.fromkeys(name for values in groups.values() for name in values))
        width = 0.8 / len(groups)
        with canvas(palette, title, 1.3 + 0.26 * len(rows) * max(1.6, len(groups))) as (figure, axes):
            for index, (group, values) in enumerate(groups.items()):
                places = [rows.index(name) + (index - (len(groups) - 1) / 2) * width for name in values]
                spreads = list(values.values())
                colour = palette.series[index % len(palette.series)]
                medians = [value["median"] for value in spreads]
                axes.barh(places, medians, width * 0.9, color=colour, label=group)
                axes.errorbar(
                    medians, places, xerr=whiskers(spreads), fmt="none", ecolor=palette.ink, elinewidth=1, capsize=2
                )
                for place, value in zip(places, spreads, strict=True):
                    axes.annotate(
                        f"{value['median']:.{digits}f}",
                        (range_of(value)[1], place),
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
            legend(figure, axes)
            return figure

    return draw


def columns(
    title: str, series: Mapping[str, Sequence[float]], x_label: str, y_label: str
) -> Callable[[Palette], Figure]:
    """Return columns side by side; entry k of each series stands at k."""

    def draw(palette: Palette) -> Figure:
        width = 0.8 / len(series)
        longest = max(map(len, series.values()))
        with canvas(palette, title, 3.4) as (figure, axes):
            for index, (name, values) in enumerate(series.items()):
                places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(values))]
                axes.bar(places, values, width * 0.92, color=palette.series[index % len(palette.series)], label=name)
            axes.set_xticks(range(longest))
            return upright(figure, axes, x_label, y_label)

    return draw


def by_depth(title: str, series: Mapping[str, Sequence[float | None]]) -> Callable[[Palette], Figure]:
    """Return the conditional acceptance over depth, counted from 1."""
    points = {
        name: [(depth, {"median": rate, "samples": [rate]}) for depth, rate in enumerate(rates, 1) if rate is not None]
        for name, rates in series.items()
    }
    return lines(title, points, "depth", "accepted, of the rounds that got there")


def marks(palette: Palette, index: int) -> dict[str, Any]:
    colour = palette.series[index % len(palette.series)]
    return {"color": colour, "marker": "osD^vPX*"[index % 8], "markersize": 5, "linewidth": 1.6}


def lines(
    title: str, series: Mapping[str, Sequence[tuple[float, Spread]]], x_label: str, y_label: str
) -> Callable[[Palette], Figure]:
    """Return medians over x with their ranges."""

    def draw(palette: Palette) -> Figure:
        with canvas(palette, title, 3.8) as (figure, axes):
            for index, (name, points) in enumerate(series.items()):
                values = [value for _, value in points]
                axes.errorbar(
                    [x for x, _ in points],
                    [value["median"] for value in values],
                    yerr=whiskers(values),
                    capsize=3,
                    elinewidth=1,
                    label=name,
                    **marks(palette, index),
                )
            axes.set_xticks(sorted({x for points in series.values() for x, _ in points}))
            return upright(figure, axes, x_label, y_label)

    return draw


def inline_svg(plot: Plot) -> str:
    """Return the plot as an SVG element whose colours are variables of the page that holds it."""
    text = _saved(plot.draw(_ROLES), "svg", _ROLES).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    # Ids are unique in a page only with the plot's name before them.
    text = re.sub(r'\bid="|url\(#|href="#', rf"\g<0>{plot.name}-", text)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"', r'<svg \1width="100%"', text, count=1)
    text = re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", text, count=1)
    label = escape(plot.title, {'"': "&quot;"})
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


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
