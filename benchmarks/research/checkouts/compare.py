"""Tokens per second of this checkout over those of another, measured alternately on the embedded pair.

A round starts fresh processes of both sides, so that the luck of one process (addresses, hash seeds) is not taken for
a difference, and alternates prompt by prompt, so that a slow phase of the machine meets both sides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.environment import provenance, require_bench_extra
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.checkouts.sides import KINDS, Answer, Side, check, commit_of
from benchmarks.workloads import CODE_PROMPTS, Prompt, read_prompts

HERE = Path(__file__).parents[3]
MEDIAN_BAR, LOWEST_BAR = 0.98, 0.94


@dataclass(frozen=True, slots=True)
class CheckoutSettings:
    """Settings of the comparison."""

    base: Path
    kinds: tuple[str, ...]
    num_rounds: int
    num_prompts: int
    num_repeats: int
    num_new_tokens: int
    threads: int


@dataclass(slots=True)
class KindFound:
    """Results of one kind, one entry per round."""

    new_tokens_per_s: list[float] = field(default_factory=list[float])
    base_tokens_per_s: list[float] = field(default_factory=list[float])
    num_text_differences: int = 0
    num_forward_differences: int = 0
    """Prompts for which the target's forwards were not as many; `auto` chooses by times, so it may differ."""

    @property
    def ratios(self) -> list[float]:
        return [new / base for new, base in zip(self.new_tokens_per_s, self.base_tokens_per_s, strict=True)]

    @property
    def is_met(self) -> bool:
        return median(self.ratios) >= MEDIAN_BAR and min(self.ratios) >= LOWEST_BAR

    def to_dict(self) -> dict[str, object]:
        """Return the figures in JSON types."""
        ratios = self.ratios
        return {
            **asdict(self),
            "ratios": ratios,
            "median": median(ratios),
            "lowest": min(ratios),
            "is_met": self.is_met,
        }


def run(settings: CheckoutSettings, tick: Callable[[str], None]) -> dict[str, KindFound]:
    """Measure every kind for all rounds.

    Raises:
        ResourceError: the base is no checkout, or a process has ended.
    """
    base = check(settings.base)
    prompts = read_prompts(CODE_PROMPTS, settings.num_prompts)
    config = json.loads((HERE / "specsplit/model/embedded/target/config.json").read_text(encoding="utf-8"))
    found: dict[str, KindFound] = {kind: KindFound() for kind in settings.kinds}
    for number in range(settings.num_rounds):
        for kind, figures in found.items():
            with ExitStack() as scope:
                # All processes are started before any is waited for: their imports run at the same time.
                new, old = (
                    scope.enter_context(Side(checkout, kind, settings.threads, config["num_hidden_layers"]))
                    for checkout in (HERE, base)
                )
                _measure(new, old, prompts, number, settings, figures)
            tick(kind)
    return found


def _measure(
    new: Side, old: Side, prompts: Sequence[Prompt], number: int, settings: CheckoutSettings, figures: KindFound
) -> None:
    """Generate alternately for one round, after one prompt that warms both sides up."""
    num_tokens = settings.num_new_tokens
    for side in (new, old):
        side.open()
        side.generate(prompts[0].text, num_tokens)
    seconds = {new: 0.0, old: 0.0}
    for prompt in prompts:
        answers: dict[Side, list[Answer]] = {new: [], old: []}
        for repeat in range(settings.num_repeats):
            for side in (new, old) if (number + repeat) % 2 else (old, new):
                answers[side].append(side.generate(prompt.text, num_tokens))
        for side, given in answers.items():
            # The median leaves out single runs that something else on the machine disturbed.
            seconds[side] += median(answer.wall_s for answer in given)
        pairs = list(zip(answers[new], answers[old], strict=True))
        figures.num_text_differences += any(a.token_ids != b.token_ids for a, b in pairs)
        figures.num_forward_differences += any(a.target_forwards != b.target_forwards for a, b in pairs)
    figures.new_tokens_per_s.append(len(prompts) * num_tokens / seconds[new])
    figures.base_tokens_per_s.append(len(prompts) * num_tokens / seconds[old])


def show(console: Console, found: dict[str, KindFound]) -> None:
    """Print the median and the lowest ratio of every kind."""
    listed = report.table("Tokens/s of this checkout over the base", "kind", "base", "median", "lowest", "texts", "bar")
    for kind, figures in found.items():
        ratios, base = figures.ratios, median(figures.base_tokens_per_s)
        texts = "same" if not figures.num_text_differences else f"{figures.num_text_differences} differ"
        verdict = "met" if figures.is_met else "MISSED"
        listed.add_row(kind, f"{base:.0f}", f"{median(ratios):.3f}", f"{min(ratios):.3f}", texts, verdict)
    console.print(listed)


def to_record(settings: CheckoutSettings, found: dict[str, KindFound]) -> dict[str, object]:
    """Return the JSON line."""
    return {
        "benchmark": "checkouts",
        "provenance": provenance(),
        "settings": {**asdict(settings), "base": commit_of(settings.base)},
        "bounds": {"median": MEDIAN_BAR, "lowest": LOWEST_BAR},
        "kinds": {kind: figures.to_dict() for kind, figures in found.items()},
    }


@app.command()
def checkouts(
    base: Annotated[Path, typer.Option(help="Folder of the checkout to compare this one with.", file_okay=False)],
    kinds: Annotated[str, typer.Option(help="Separated by commas.")] = "plain,pingpong,auto,loopback auto,two stages",
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each side.")] = 7,
    prompts: Annotated[int, typer.Option(min=1, help="How many of data/code_prompts.jsonl.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of a prompt in a measurement; their median counts.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 96,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each model.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)] = None,
) -> None:
    """Compare the speed of this checkout with another's, in alternating processes."""
    report.check_output(output)
    require_bench_extra()
    chosen = tuple(name.strip() for name in kinds.split(",") if name.strip())
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        raise typer.BadParameter(f"There is no kind {unknown[0]!r}; there are {', '.join(KINDS)}.")
    settings = CheckoutSettings(base, chosen, rounds, prompts, repeats, new_tokens, threads)
    console = report.new_console()
    with report.Progress(console).running("checkouts", rounds * len(chosen)) as tick:
        found = run(settings, tick)
    show(console, found)
    report.emit(to_record(settings, found), output)
