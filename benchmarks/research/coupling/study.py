"""The evidence of docs/adr/0001: how often coupled picks and other schemes accept on a real pair, and what they emit.

Offline, one level of a tree at a time; no round is run and nothing is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from benchmarks import workloads
from benchmarks.environment import provenance
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.options import parse_floats
from specsplit.core.defaults import EMBEDDED
from specsplit.model.extra import require_worker_extra

if TYPE_CHECKING:
    import torch

    from benchmarks.research.coupling.measure import ChiSquare, LoadedPair, Position, Scheme

DEFAULT_PROMPTS = 50
DEFAULT_NEW_TOKENS = 48
DEFAULT_STRIDE = 4
DEFAULT_DRAWS = 128
_SEEDS_PER_RUN = 1 << 32
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class StudySettings:
    """Settings of the study: schemes, models and sizes."""

    target: str = EMBEDDED
    draft: str = EMBEDDED
    temperatures: tuple[float, ...] = (0.6, 1.0)
    num_prompts: int = DEFAULT_PROMPTS
    num_new_tokens: int = DEFAULT_NEW_TOKENS
    stride: int = DEFAULT_STRIDE
    num_draws: int = DEFAULT_DRAWS
    seed: int = 0
    threads: int = 1

    def to_dict(self) -> dict[str, object]:
        """Return the settings in JSON types."""
        return {
            "target": self.target,
            "draft": self.draft,
            "dtype": "fp32",
            "num_prompts": self.num_prompts,
            "num_new_tokens": self.num_new_tokens,
            "stride": self.stride,
            "num_draws": self.num_draws,
            "seed": self.seed,
            "threads": self.threads,
        }


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over positions and its two standard errors."""

    value: float
    draws_error: float
    """Error from the finite number of draws at these positions; 0 if the expectation is exact."""
    prompts_error: float
    """Error from the finite number of prompts; positions of one prompt are not independent."""
    by_prompt: tuple[float, ...]

    def to_dict(self) -> dict[str, object]:
        """Return the fields in JSON types."""
        return {
            "mean": self.value,
            "standard_error_of_draws": self.draws_error,
            "standard_error_over_prompts": self.prompts_error,
            "by_prompt": [round(value, 6) for value in self.by_prompt],
        }


@dataclass(slots=True)
class Sums:
    """Adds up values of positions, prompt by prompt."""

    by_prompt: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    variance: float = 0.0

    def add(self, prompt: int, value: float, variance: float = 0.0) -> None:
        """Add a position's value; `variance` is that of the value as an estimate."""
        self.by_prompt.setdefault(prompt, []).append(value)
        self.variance += variance

    def mean(self) -> Mean:
        """Return the mean over all positions; each prompt weighs as many as it has."""
        counts = [len(values) for values in self.by_prompt.values()]
        sums = [sum(values) for values in self.by_prompt.values()]
        total, num_prompts = sum(counts), len(counts)
        value = sum(sums) / total
        # A ratio of sums over prompts: its error is that of the prompts' residuals.
        squares = sum((part - value * count) ** 2 for part, count in zip(sums, counts, strict=True))
        over_prompts = math.sqrt(squares * num_prompts / (num_prompts - 1)) / total if num_prompts > 1 else math.inf
        means = tuple(part / count for part, count in zip(sums, counts, strict=True))
        return Mean(value, math.sqrt(self.variance) / total, over_prompts, means)


@dataclass(slots=True)
class Tally:
    """All that is added up at one temperature."""

    acceptance: dict[Scheme, Sums] = field(default_factory=dict["Scheme", Sums])
    chi_square: dict[Scheme, ChiSquare] = field(default_factory=dict["Scheme", "ChiSquare"])
    measured: dict[int, Sums] = field(default_factory=dict[int, Sums])
    """Acceptance of coupled picks with the noise that serves, by candidates; `acceptance` has exact values for 1, 2."""
    differences: dict[Scheme, Sums] = field(default_factory=dict["Scheme", Sums])
    """Coupled picks minus the scheme, with as many candidates."""
    bounds: dict[str, Sums] = field(default_factory=dict[str, Sums])
    bias: dict[int, Sums] = field(default_factory=dict[int, Sums])
    """Total variation of what `independent tests` emit from the target's law, by candidates."""
    num_outside_bounds: int = 0


def study(settings: StudySettings, pair: LoadedPair, temperature: float, tick: Callable[[str], None]) -> Tally:
    """Run every scheme at every position at one temperature."""
    import torch

    from benchmarks.research.coupling import measure

    prompts = workloads.read_prompts(workloads.CODE_PROMPTS, settings.num_prompts)
    generator = torch.Generator().manual_seed(settings.seed)
    first_seed = settings.seed * _SEEDS_PER_RUN
    assert pair.target.tokenizer is not None
    tally = Tally()
    for number, prompt in enumerate(prompts):
        prompt_ids = pair.target.tokenizer.encode(prompt.text)
        seeds = range(first_seed + number * settings.num_draws, first_seed + (number + 1) * settings.num_draws)
        for position in measure.positions(
            pair, prompt_ids, temperature, settings.num_new_tokens, settings.stride, first_seed + number
        ):
            _add_position(tally, number, position, temperature, seeds, generator)
        tick(f"T = {temperature:g}, {prompt.id}")
    return tally


def _add_position(
    tally: Tally, prompt: int, position: Position, temperature: float, seeds: range, generator: torch.Generator
) -> None:
    from benchmarks.research.coupling import measure
    from benchmarks.research.coupling.rejection_schemes import independent_tests_law, variation

    target, draft = (measure.law(logits, temperature) for logits in (position.target, position.draft))
    found, exact = measure.draws(position, temperature, seeds, generator), measure.coupled_acceptance(target, draft)
    for k in measure.CANDIDATES:
        coupled = found[measure.COUPLED, k]
        tally.measured.setdefault(k, Sums()).add(prompt, *_estimated(coupled.acceptance))
        if k in exact:
            found[measure.COUPLED, k] = replace(
                coupled, acceptance=coupled.acceptance.new_full((len(seeds),), exact[k])
            )
    for scheme, draws in found.items():
        tally.acceptance.setdefault(scheme, Sums()).add(prompt, *_estimated(draws.acceptance))
        tally.chi_square.setdefault(scheme, measure.ChiSquare()).add(draws.emitted, target)
        if scheme[0] != measure.COUPLED:
            paired = found[measure.COUPLED, scheme[1]].acceptance - draws.acceptance
            tally.differences.setdefault(scheme, Sums()).add(prompt, *_estimated(paired))
    distance = variation(target, draft)
    low, high = (1 - distance) / (1 + distance), 1 - distance
    for name, value in (("variation", distance), ("lower", low), ("upper", high)):
        tally.bounds.setdefault(name, Sums()).add(prompt, value)
    tally.num_outside_bounds += not low - _ROUNDING <= exact[1] <= high + _ROUNDING
    for k in measure.TREES:
        bias = variation(independent_tests_law(target, draft, k), target)
        tally.bias.setdefault(k, Sums()).add(prompt, bias)


def _estimated(draws: torch.Tensor) -> tuple[float, float]:
    """Return the mean of a position's draws and the variance of that mean."""
    return draws.mean().item(), draws.var().item() / len(draws)


def to_record(settings: StudySettings, pair: LoadedPair, temperature: float, tally: Tally) -> dict[str, object]:
    """Return one temperature's result in JSON types."""
    from benchmarks.research.coupling.measure import INDEPENDENT

    bounds = {name: sums.mean() for name, sums in tally.bounds.items()}
    measured = tally.measured[1].mean()
    slack = 4 * measured.draws_error
    prompts = workloads.read_prompts(workloads.CODE_PROMPTS, settings.num_prompts)
    return {
        "benchmark": "coupling_study",
        "provenance": provenance(),
        "settings": settings.to_dict(),
        "temperature": temperature,
        "pair": {
            "target_weights_hash": pair.target.weights_hash,
            "draft_weights_hash": pair.draft.weights_hash,
            "vocab_size": pair.target.vocab_size,
        },
        "prompts": {"ids": [prompt.id for prompt in prompts], "sha256": workloads.fingerprint(prompts)},
        "num_positions": sum(len(values) for values in tally.bounds["lower"].by_prompt.values()),
        "bounds": {
            **{name: mean.to_dict() for name, mean in bounds.items()},
            "num_positions_outside": tally.num_outside_bounds,
            "measured_lies_between": bounds["lower"].value - slack <= measured.value <= bounds["upper"].value + slack,
        },
        "schemes": [_scheme_record(tally, scheme) for scheme in tally.acceptance],
        "bias": [
            {"scheme": INDEPENDENT, "candidates": k, "total_variation": sums.mean().to_dict()}
            for k, sums in tally.bias.items()
        ],
    }


def _scheme_record(tally: Tally, scheme: Scheme) -> dict[str, object]:
    test = tally.chi_square[scheme]
    record: dict[str, object] = {
        "scheme": scheme[0],
        "candidates": scheme[1],
        "acceptance": tally.acceptance[scheme].mean().to_dict(),
        "chi_square": {
            "statistic": test.statistic,
            "degrees": test.degrees,
            "standard_deviations": test.z,
            "p_value": test.p_value,
        },
    }
    if scheme not in tally.differences:
        record["measured"] = tally.measured[scheme[1]].mean().to_dict()
    else:
        record["coupled_minus_this"] = tally.differences[scheme].mean().to_dict()
    return record


def show(console: Console, temperature: float, tally: Tally) -> None:
    """Print one temperature's table."""
    num_positions = sum(len(values) for values in tally.bounds["lower"].by_prompt.values())
    table = report.table(
        f"T = {temperature:g}: acceptance of one level, {num_positions} positions (± standard error over prompts)",
        "scheme",
        "candidates",
        "accepted",
        "coupled minus this",
        "chi-square / degrees",
        "p",
    )
    for scheme in sorted(tally.acceptance, key=lambda scheme: scheme[1]):
        test, difference = tally.chi_square[scheme], tally.differences.get(scheme)
        table.add_row(
            scheme[0],
            str(scheme[1]),
            _shown(tally.acceptance[scheme].mean()),
            _shown(difference.mean(), "+") if difference else "",
            f"{test.statistic:.0f} / {test.degrees}",
            f"{test.p_value:.2g}",
        )
    console.print(table)
    means = {name: sums.mean().value for name, sums in tally.bounds.items()}
    exact = next(sums.mean().value for scheme, sums in tally.acceptance.items() if scheme not in tally.differences)
    console.print(
        f"One coupled candidate: {means['lower']:.4f} = (1-TV)/(1+TV) <= {exact:.4f} <= 1-TV = {means['upper']:.4f}; "
        f"outside these bounds at {tally.num_outside_bounds} positions. TV {means['variation']:.4f}."
    )
    for k, sums in tally.measured.items():
        measured = sums.mean()
        console.print(f"{k} coupled with our noise: {measured.value:.4f} ± {measured.draws_error:.4f} (of draws).")
    for k, sums in tally.bias.items():
        console.print(f"Independent tests of {k} candidates emit a law that is {sums.mean().value:.4f} (TV) off.")


def _shown(mean: Mean, sign: str = "") -> str:
    return f"{mean.value:{sign}.4f} ± {mean.prompts_error:.4f}"


@app.command("coupling")
def coupling_study(
    target: Annotated[str, typer.Option(help="embedded, a folder or a hub id.")] = EMBEDDED,
    draft: Annotated[str, typer.Option(help="embedded, a folder or a hub id.")] = EMBEDDED,
    temperatures: Annotated[str, typer.Option(help="Values separated by commas.")] = "0.6,1",
    prompts: Annotated[int, typer.Option(min=2, help="How many of data/code_prompts.jsonl.")] = DEFAULT_PROMPTS,
    new_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = DEFAULT_NEW_TOKENS,
    stride: Annotated[int, typer.Option(min=1, help="Every so many of them are looked at.")] = DEFAULT_STRIDE,
    draws: Annotated[int, typer.Option(min=2, help="Seeds per position.")] = DEFAULT_DRAWS,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 31) - 1, help="Another one draws all anew.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Append the JSON lines to this file.", dir_okay=False)] = None,
) -> None:
    """Compare the acceptance of coupled picks with other schemes; one JSON line per temperature."""
    values = _temperatures(temperatures)
    report.check_output(output)
    require_worker_extra()
    from benchmarks.research.coupling.measure import load_pair

    console = report.new_console()
    settings = StudySettings(target, draft, values, prompts, new_tokens, stride, draws, seed, threads)
    pair = load_pair(target, draft, threads)
    with report.Progress(console).running("measuring", len(values) * prompts) as tick:
        for temperature in values:
            tally = study(settings, pair, temperature, tick)
            show(console, temperature, tally)
            report.emit(to_record(settings, pair, temperature, tally), output)


def _temperatures(text: str) -> tuple[float, ...]:
    values = parse_floats(text)
    if not all(0.05 <= value <= 10 for value in values):
        raise typer.BadParameter("temperatures must be between 0.05 and 10; at 0 there is nothing to draw")
    return values
