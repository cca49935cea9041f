"""`compare`: changes between two runs beyond noise, every time divided by a reference measured beside it.

Pure functions over results files. Rounds are resampled, all metrics together, so the intervals hold simultaneously: two
runs of one program show no change at all in 95 of 100 comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean
from typing import Any, Literal

import numpy
from numpy.typing import NDArray
from scipy import stats

from benchmarks import metrics
from benchmarks.environment import is_clean
from benchmarks.metrics import decode_s_per_token, wall_s_per_token
from benchmarks.registry import BARE, PLAIN
from benchmarks.research.resampling import BOOTSTRAP_SEED
from benchmarks.results_file import ResultsFile, Run
from benchmarks.statistics import quantile
from benchmarks.systems import RunSample
from specsplit.core.errors import InvalidRequest

NUM_RESAMPLES = 1000
MIN_ROUNDS = 3
"""Fewer say nothing of their spread."""
CONFIDENCE = 0.975
"""For all rows of a comparison together; 95 of 100 comparisons of one program with itself have to stay silent."""
_POWER = 0.9
TRIMMED = 0.2
"""The share of rounds at each end that does not count: disturbed ones."""
_EXACT = 1e-9
Verdict = Literal["better", "worse", "changed", "unchanged", "unknown"]
Row = Sequence[RunSample]
Array = NDArray[numpy.float64]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number per round; of a time, the metric is its inverse, so that more is better."""

    name: str
    more_is_better: bool | None
    """None where neither is."""
    per_task: Callable[[RunSample], float | None] | None = None
    """Seconds of one run, to be divided by the reference's for the same task."""
    per_round: Callable[[Row], float | None] | None = None
    is_time: bool = False
    """Whether `per_round` is seconds, to be divided by the reference's."""


def _inter_token_p95(samples: Row) -> float | None:
    found = metrics.inter_token_s(samples)
    return found["p95"] if found is not None else None


def _overhead(samples: Row) -> float | None:
    values = [metrics.overhead_ms(told) / 1e3 for told in metrics.told_of(samples) if told.num_rounds]
    return fmean(values) if values and min(values) > 0 else None


def _accepted(field_name: str) -> Callable[[Row], float | None]:
    def value(samples: Row) -> float | None:
        found = metrics.acceptance(told.speculative_decoding for told in metrics.told_of(samples))
        return getattr(found, field_name) if found.num_rounds else None

    return value


METRICS = (
    Metric("tokens_per_s", True, per_task=wall_s_per_token),
    Metric("decode_tokens_per_s", True, per_task=decode_s_per_token),
    Metric("ttft_s", False, per_task=lambda sample: sample.ttft_s),
    Metric("inter_token_p95_s", False, per_round=_inter_token_p95, is_time=True),
    Metric("overhead_s_per_round", False, per_round=_overhead, is_time=True),
    Metric("target_busy_fraction", None, per_round=metrics.target_busy_fraction),
    Metric("tokens_per_round", True, per_round=metrics.tokens_per_round),
    Metric("path_acceptance_rate", True, per_round=_accepted("path_acceptance_rate")),
    Metric("node_acceptance_rate", True, per_round=_accepted("node_acceptance_rate")),
    Metric("bytes_per_token", False, per_round=metrics.bytes_per_token),
)


@dataclass(frozen=True, slots=True)
class Change:
    """One metric of one system in both runs; `ratio` is the second over the first, with its simultaneous interval."""

    system: str
    metric: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    verdict: Verdict
    detectable: float | None
    """The change that would have been found in 9 of 10 comparisons, as a fraction; None where there is no noise."""

    def to_dict(self) -> dict[str, object]:
        """Return the fields in JSON types."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The changes, and the system that times are divided by."""

    reference: str
    changes: list[Change]
    notes: list[str]
    settings: list[str]
    """Differences between the settings, prompts and models of the two; empty unless forced."""
    num_rounds: tuple[int, int]
    confidence: float = CONFIDENCE

    @property
    def changed(self) -> list[Change]:
        return [change for change in self.changes if change.verdict in ("better", "worse", "changed")]

    def to_dict(self) -> dict[str, object]:
        """Return the comparison in JSON types."""
        return {
            "kind": "comparison",
            "reference": self.reference,
            "confidence": self.confidence,
            "num_rounds": list(self.num_rounds),
            "different_settings": self.settings,
            "notes": self.notes,
            "changes": [change.to_dict() for change in self.changes],
        }


def compare(before: ResultsFile, after: ResultsFile, *, is_forced: bool = False) -> Comparison:
    """Return the changes from one run to the other.

    Raises:
        InvalidRequest: the runs are of different settings, prompts or models and it is not forced, share no system to
            hold the others against, or have no whole round.
    """
    for run in (before, after):
        if not run.num_rounds:
            raise InvalidRequest(f"{run.path} has no whole round.", param="file")
    differing = different_settings(before, after)
    if differing and not is_forced:
        raise InvalidRequest(
            f"The two runs differ in more than the program: {'; '.join(differing)}. Compare all the same with --force.",
            param="file",
        )
    first_run, second_run = before.run(), after.run()
    if first_run.tasks != second_run.tasks:
        raise InvalidRequest("The two runs have different prompts, which cannot be compared.", param="file")
    reference = _reference(first_run, second_run)
    shared = [name for name in first_run.samples if name in second_run.samples]
    series = {
        (name, metric): (first, second)
        for name in shared
        for metric in METRICS
        if (first := _series(first_run, name, reference, metric))
        and (second := _series(second_run, name, reference, metric))
    }
    return Comparison(
        reference=reference,
        changes=_changes(series),
        notes=_notes(before, after, reference),
        settings=differing,
        num_rounds=(before.num_rounds, after.num_rounds),
    )


_HARMLESS = ("systems", "num_rounds", "target_address", "draft_address", "target", "draft")
"""Settings that do not keep two runs from being compared; models are compared by their weights."""


def different_settings(before: ResultsFile, after: ResultsFile) -> list[str]:
    """Return a phrase for each setting, the prompts and each model that differ."""
    first, second = before.header, after.header
    names = [name for name in (first["settings"] | second["settings"]) if name not in _HARMLESS]
    pairs = [(name, first["settings"].get(name), second["settings"].get(name)) for name in names]
    pairs.append(("prompts", _prompts(first), _prompts(second)))
    roles = (
        first["models"].keys() | second["models"].keys() if _speculates(before) and _speculates(after) else ["target"]
    )
    pairs += [(role, _model(first, role), _model(second, role)) for role in sorted(roles)]
    return [f"{name}: {old} and {new}" for name, old, new in pairs if old != new]


def _prompts(header: Mapping[str, Any]) -> str:
    return f"{header['prompts']['sha256']} ({len(header['prompts']['tasks'])})"


def _speculates(run: ResultsFile) -> bool:
    return "draft" in run.header["models"]


def _model(header: Mapping[str, Any], role: str) -> str:
    model = header["models"].get(role)
    return "none" if model is None else f"{model['name']} {model['weights_hash']} {model['dtype']} on {model['device']}"


def _reference(before: Run, after: Run) -> str:
    for name in (BARE, PLAIN):
        if name in before.samples and name in after.samples:
            return name
    raise InvalidRequest(f"Neither {BARE} nor {PLAIN} was measured in both runs; one of them has to be.", param="file")


def _notes(before: ResultsFile, after: ResultsFile, reference: str) -> list[str]:
    notes = [run.status for run in (before, after) if not run.is_whole]
    origins = [run.header["provenance"] for run in (before, after)]
    notes.append(f"Commits: {origins[0]['commit']}, then {origins[1]['commit']}.")
    for run, origin in zip((before, after), origins, strict=True):
        if not is_clean(origin):
            notes.append(f"{run.path} was measured with changes that are in no commit.")
    if reference == PLAIN:
        notes.append(f"{PLAIN} itself is the reference, so a change of its own speed shows as one of all others.")
    for name in ("cpu", "cores", "system"):
        old, new = (origin["machine"][name] for origin in origins)
        if old != new:
            notes.append(
                f"Another machine: {name} was {old}, then {new}; ratios travel better than they should be trusted."
            )
    for run, other in ((before, after), (after, before)):
        missing = [name for name in run.header["systems"] if name not in other.header["systems"]]
        if missing:
            notes.append(f"Only in {run.path}: {', '.join(missing)}.")
    if min(before.num_rounds, after.num_rounds) < MIN_ROUNDS:
        notes.append(f"Fewer than {MIN_ROUNDS} whole rounds say nothing of noise; only what has none is judged.")
    return notes


def _series(run: Run, name: str, reference: str, metric: Metric) -> list[float] | None:
    """Return the logarithm of a metric in each round, a time over the reference's; None where it is not known."""
    rounds, beside = run.samples[name], run.samples[reference]
    is_against_itself = name == reference and (metric.per_task is not None or metric.is_time)
    if is_against_itself:
        return None
    found: list[float] = []
    for samples, references in zip(rounds, beside, strict=True):
        value = _value(samples, references, metric)
        if value is None:
            return None
        found.append(value)
    return found


def _value(samples: Row, references: Row, metric: Metric) -> float | None:
    """Return one round's value: for a time, the mean over tasks of log(time / reference's time)."""
    scale = [_log(decode_s_per_token(reference) or wall_s_per_token(reference)) for reference in references]
    if metric.per_task is not None:
        times = [_log(metric.per_task(sample)) for sample in samples]
        pairs = [(a, b) for a, b in zip(times, scale, strict=True) if a is not None and b is not None]
        if len(pairs) < len(times):
            return None
        value = fmean(a - b for a, b in pairs)
        return -value if metric.more_is_better else value
    assert metric.per_round is not None
    value = _log(metric.per_round(samples))
    if value is None or not metric.is_time:
        return value
    return value - fmean(each for each in scale if each is not None)


def _log(value: float | None) -> float | None:
    return math.log(value) if value is not None and value > 0 else None


Key = tuple[str, Metric]


def _changes(series: Mapping[Key, tuple[list[float], list[float]]]) -> list[Change]:
    """Judge all metrics together, so that many of them do not make one look changed."""
    if not series:
        return []
    errors, draws = _resampled(series)
    critical = _critical(draws)
    return [_change(key, *values, errors[key], critical) for key, values in series.items()]


@dataclass(frozen=True, slots=True)
class _Error:
    """Standard error of one difference, corrected for few rounds, and its degrees of freedom."""

    total: float
    degrees: float


def _resampled(series: Mapping[Key, tuple[list[float], list[float]]]) -> tuple[dict[Key, _Error], Array]:
    """Resample the rounds of each run, the same ones for all metrics.

    Returns the errors, and the centred differences in units of their errors, [noisy metrics, resamples].
    """
    generator = numpy.random.default_rng(BOOTSTRAP_SEED)
    squares, differences, lengths = [], 0.0, []
    for side in (0, 1):
        values = numpy.array([pair[side] for pair in series.values()])
        length = values.shape[1]
        drawn = numpy.sort(values[:, generator.integers(length, size=(NUM_RESAMPLES, length))], axis=-1)
        cut = int(length * TRIMMED)
        means = drawn[:, :, cut : length - cut].mean(axis=-1)
        squares.append(means.var(axis=1, ddof=1))
        lengths.append(length)
        differences = means - means.mean(axis=1, keepdims=True) - differences
    raw = numpy.sqrt(sum(squares))
    # A resample of n values varies by (n - 1) / n of what n new ones would.
    parts = [square * length / max(1, length - 1) for square, length in zip(squares, lengths, strict=True)]
    spread = sum(part**2 / max(1, length - 1) for part, length in zip(parts, lengths, strict=True))
    errors: dict[Key, _Error] = {}
    for row, key in enumerate(series):
        total, uncertainty = float(sum(parts)[row]), float(spread[row])
        degrees = max(1.0, total**2 / uncertainty) if uncertainty > 0 else 1.0
        errors[key] = _Error(math.sqrt(total), degrees)
    is_noisy = raw > _EXACT
    return errors, numpy.abs(differences[is_noisy]) / raw[is_noisy, None]


def _critical(draws: Array) -> float:
    """Return the quantile of one standard error below which the largest of all stays in CONFIDENCE of the draws."""
    return NormalDist().cdf(quantile(draws.max(axis=0).tolist(), CONFIDENCE)) if len(draws) else 0.5


def _change(key: Key, before: list[float], after: list[float], error: _Error, critical: float) -> Change:
    system, metric = key
    first, second = (float(stats.trim_mean(values, TRIMMED)) for values in (before, after))
    moved = second - first
    detectable, has_rounds = None, min(len(before), len(after)) >= MIN_ROUNDS
    if error.total <= _EXACT:
        reach = _EXACT
        is_known = has_rounds or not (metric.is_time or metric.per_task)
    else:
        factor = float(stats.t.ppf(critical, error.degrees))
        reach, is_known = factor * error.total, has_rounds
        detectable = math.exp((factor + NormalDist().inv_cdf(_POWER)) * error.total) - 1
    return Change(
        system=system,
        metric=metric.name,
        before=math.exp(first),
        after=math.exp(second),
        ratio=math.exp(moved),
        low=math.exp(moved - reach),
        high=math.exp(moved + reach),
        verdict=_verdict(moved, reach, metric.more_is_better) if is_known else "unknown",
        detectable=detectable,
    )


def _verdict(moved: float, reach: float, more_is_better: bool | None) -> Verdict:
    if abs(moved) <= reach:
        return "unchanged"
    if more_is_better is None:
        return "changed"
    return "better" if (moved > 0) == more_is_better else "worse"
