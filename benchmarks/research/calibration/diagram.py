"""The reliability diagram of estimates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.report.plots import Palette, canvas, legend, marks, whiskers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def reliability(title: str, series: Mapping[str, Sequence[Mapping[str, float]]]) -> Callable[[Palette], Figure]:
    """Return the share that was right over the mean estimate, a point per bin, beside where the two are equal."""

    def draw(palette: Palette) -> Figure:
        with canvas(palette, title, 5.6) as (figure, axes):
            axes.plot([0, 1], [0, 1], color=palette.ink, linewidth=0.8, linestyle="--", label="estimate = share")
            for index, (name, bins) in enumerate(series.items()):
                shares = [{"median": each["observed"], "low": each["low"], "high": each["high"]} for each in bins]
                axes.errorbar(
                    [each["predicted"] for each in bins],
                    [each["observed"] for each in bins],
                    yerr=whiskers(shares),
                    capsize=2,
                    elinewidth=0.9,
                    label=name,
                    **marks(palette, index),
                )
            axes.set_xlim(-0.02, 1.02)
            axes.set_ylim(-0.02, 1.02)
            axes.set_aspect("equal")
            axes.set_xlabel("estimate, mean of a bin")
            axes.set_ylabel("share of the bin that was right")
            axes.grid(linewidth=0.6)
            legend(figure, axes)
            return figure

    return draw
