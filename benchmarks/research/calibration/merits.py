"""Nodes with their estimates to figures of merit, with intervals, and their tables. Runs and knows no model.

Legend: N nodes, P prompts, R resamples, B bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from benchmarks.report import console as report
from benchmarks.research.resampling import BOOTSTRAP_SEED, CONFIDENCE, NUM_RESAMPLES

if TYPE_CHECKING:
    from rich.console import Console

Source = Literal["draft", "both", "lookup"]
"""Who proposed a node."""
Floats = NDArray[np.float64]
Record = dict[str, Any]
NUM_BINS = 10
CALIBRATED, SENT, OWN, FROZEN = "calibrated", "sent", "own", "frozen"
NAMES = {
    CALIBRATED: "calibrated estimate",
    SENT: "what the draft sent",
    OWN: "the draft's own probability",
    FROZEN: "the first half's table",
}
METRICS = ("auc", "ece", "brier")


class Node(NamedTuple):
    """A node that committed tokens decided; estimates are log-probabilities that it is right, given its parent is."""

    prompt: int
    """Its number among the prompts."""
    position: int
    token_id: int
    depth: int
    """Below the root at that moment, 1 for its children."""
    rank: int
    """Among the draft's children of its parent, 0 for the best; of lookup's nodes among all by the tree's estimate."""
    source: Source
    is_right: bool
    calibrated: float
    """The tree's, as it stood before the tokens were known."""
    sent: float | None
    """Estimate from the perturbed score gap, as it travels; None for lookup's nodes."""
    own: float | None
    """Probability from the draft's softmax without noise; None for lookup's nodes."""
    frozen: float | None
    """Estimate from the table as the first half of the prompts left it; None for their own nodes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Nodes as arrays; `resamples` [R, P] says how often each prompt was drawn, its first row has each once."""

    prompts: NDArray[np.int64]
    outcomes: Floats
    resamples: Floats

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Sample:
        """Return the outcomes and resamples of at least one node; the same nodes give the same resamples."""
        _, prompts = np.unique([node.prompt for node in nodes], return_inverse=True)
        num_prompts = int(prompts.max()) + 1
        drawn = np.random.default_rng(BOOTSTRAP_SEED).multinomial(
            num_prompts, np.full(num_prompts, 1 / num_prompts), size=NUM_RESAMPLES
        )
        resamples = np.vstack([np.ones(num_prompts), drawn]).astype(np.float64)
        return cls(prompts, np.array([float(node.is_right) for node in nodes]), resamples)

    @property
    def num_prompts(self) -> int:
        return self.resamples.shape[1]

    def sums(self, values: Floats, groups: NDArray[np.int64] | None = None) -> Floats:
        """Return the sums of `values` [N] by group in each resample, [R, number of groups]; one group if None."""
        places = groups if groups is not None else np.zeros(len(values), np.int64)
        by_prompt = np.zeros((self.num_prompts, int(places.max()) + 1))
        np.add.at(by_prompt, (self.prompts, places), values)
        return self.resamples @ by_prompt


def auc(sample: Sample, scores: Floats) -> Floats:
    """Return per resample the probability that a right node scored above a wrong one, ties counted half; exact, [R].

    NaN where a resample has no right or no wrong node. A resample counts pairs of nodes by their prompts' pair.
    """
    is_right, num_prompts = sample.outcomes > 0, sample.num_prompts
    right, right_prompts = scores[is_right], sample.prompts[is_right]
    wins = np.zeros((num_prompts, num_prompts))
    for prompt in range(num_prompts):
        wrong = np.sort(scores[~is_right & (sample.prompts == prompt)])
        below = (np.searchsorted(wrong, right, "left") + np.searchsorted(wrong, right, "right")) / 2
        wins[:, prompt] = np.bincount(right_prompts, below, num_prompts)
    num_right = sample.sums(sample.outcomes)[:, 0]
    num_wrong = sample.sums(1 - sample.outcomes)[:, 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.einsum("rp,pq,rq->r", sample.resamples, wins, sample.resamples, optimize=True) / num_right / num_wrong


def brier(sample: Sample, probabilities: Floats) -> Floats:
    """Return per resample the mean squared distance of probability and outcome, [R]."""
    counts = sample.sums(np.ones(len(probabilities)))[:, 0]
    return sample.sums((probabilities - sample.outcomes) ** 2)[:, 0] / counts


def expected_calibration_error(sample: Sample, probabilities: Floats, num_bins: int = NUM_BINS) -> Floats:
    """Return per resample the mean distance of estimate and share right over `equal_bins`, weighted by count, [R].

    Noise in a bin only ever adds, so resamples lie above the value of the nodes themselves, which is too high as well.
    """
    bins = equal_bins(probabilities, num_bins)
    surplus = np.abs(sample.sums(probabilities - sample.outcomes, bins)).sum(1)
    return surplus / sample.sums(np.ones(len(probabilities)))[:, 0]


def equal_bins(values: Floats, num_bins: int = NUM_BINS) -> NDArray[np.int64]:
    """Return each value's bin, from 0 without gaps, [N]: of equal count as far as equal values stay together."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    middles = np.cumsum(counts) - (counts + 1) / 2
    wanted = np.floor(middles * num_bins / len(values)).astype(np.int64)
    return np.unique(wanted, return_inverse=True)[1][places]


def reliability(probabilities: Floats, outcomes: Floats, num_bins: int = NUM_BINS) -> list[Record]:
    """Return the bins of a reliability diagram: mean estimate beside the share that was right, with its interval."""
    bins = equal_bins(probabilities, num_bins)
    found: list[Record] = []
    for number in range(int(bins.max()) + 1):
        inside = bins == number
        count, num_right = int(inside.sum()), int(outcomes[inside].sum())
        low, high = wilson(num_right, count)
        predicted = float(probabilities[inside].mean())
        found.append(
            {
                "count": count,
                "predicted": _rounded(predicted),
                "observed": _rounded(num_right / count),
                "low": _rounded(low),
                "high": _rounded(high),
            }
        )
    return found


def wilson(num_true: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, its trials taken as independent.

    Source: Wilson, Probable inference, the law of succession, and statistical inference (1927).
    """
    found = binomtest(num_true, count).proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return found.low, found.high


def summary(nodes: Sequence[Node]) -> Record:
    """Return all that is reported of nodes of one kind of run, in JSON types; there must be one of the draft's."""
    drafted = [node for node in nodes if node.source != "lookup"]
    later = [node for node in drafted if node.frozen is not None]
    groups: dict[str, Callable[[Node], str]] = {
        "source": lambda node: node.source,
        "rank": lambda node: f"{min(node.rank, 3)}{'+' * (node.rank >= 3)}",
        "depth": lambda node: str(node.depth),
    }
    return {
        "drafted": judged(drafted, (CALIBRATED, SENT, OWN)),
        "second_half": judged(later, (CALIBRATED, FROZEN, SENT, OWN)) if later else None,
        "groups": {
            name: grouped(nodes if name == "source" else drafted, key) for name, key in groups.items()
        },
    }  # fmt: skip


def judged(nodes: Sequence[Node], names: Sequence[str]) -> Record:
    """Return the metrics of several estimates of the same nodes, the first compared with each of the others."""
    sample = Sample.of(nodes)
    metrics: dict[str, dict[str, Floats]] = {}
    estimates: Record = {}
    for name in names:
        log_probs = np.array([getattr(node, name) for node in nodes], np.float64)
        probabilities = np.exp(log_probs)
        metrics[name] = {
            "auc": auc(sample, log_probs),
            "ece": expected_calibration_error(sample, probabilities),
            "brier": brier(sample, probabilities),
        }
        estimates[name] = {metric: interval(values) for metric, values in metrics[name].items()}
        estimates[name]["bins"] = reliability(probabilities, sample.outcomes)
    return {
        "num_nodes": len(nodes),
        "num_prompts": sample.num_prompts,
        "share_right": _rounded(float(sample.outcomes.mean())),
        "estimates": estimates,
        "differences": {
            name: {metric: interval(metrics[names[0]][metric] - metrics[name][metric]) for metric in METRICS}
            for name in names[1:]
        },
    }


def interval(values: Floats) -> Record | None:
    """Return the first of [R] values with the percentile interval of the others; None where it is not defined."""
    if math.isnan(values[0]):
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(values[1:], [tail, 1 - tail])
    return {"value": _rounded(float(values[0])), "low": _rounded(float(low)), "high": _rounded(float(high))}


def grouped(nodes: Sequence[Node], key: Callable[[Node], str]) -> list[Record]:
    """Return, per value of `key`, how many nodes there are and were right, and each estimate's mean and AUC."""
    members: dict[str, list[Node]] = {}
    for node in nodes:
        members.setdefault(key(node), []).append(node)
    return [
        {
            "value": value,
            "num_nodes": len(inside),
            "share_right": _rounded(sum(node.is_right for node in inside) / len(inside)),
            **{name: _mean(inside, name) for name in (CALIBRATED, SENT, OWN)},
            "auc": {name: _auc(inside, name) for name in (CALIBRATED, SENT, OWN)},
        }
        for value, inside in sorted(members.items())
    ]


def _mean(nodes: Sequence[Node], name: str) -> float | None:
    known = [math.exp(value) for node in nodes if (value := getattr(node, name)) is not None]
    return _rounded(sum(known) / len(known)) if known else None


def _auc(nodes: Sequence[Node], name: str) -> float | None:
    known = [(value, node.is_right) for node in nodes if (value := getattr(node, name)) is not None]
    outcomes = [is_right for _, is_right in known]
    if len(set(outcomes)) < 2:
        return None  # an AUC needs right and wrong nodes
    # Imported late: the harness lists this study among its commands, and runs without the packages of research.
    from sklearn.metrics import roc_auc_score

    return _rounded(float(roc_auc_score(outcomes, [value for value, _ in known])))


def _rounded(value: float) -> float:
    return round(value, 6)


def title_of(record: Mapping[str, Any]) -> str:
    """Return which run a record is of."""
    temperature = record["temperature"]
    return f"{record['mode']}, {'all temperatures' if temperature is None else f'T {temperature:g}'}"


def show(console: Console, record: Record) -> None:
    """Print one record: the metrics over all nodes of the draft, and over those of the second half of the prompts."""
    for part, what in (("drafted", "all prompts"), ("second_half", "second half")):
        found = record[part]
        if found is None:
            continue
        title = (
            f"{title_of(record)}, {what}: {found['num_nodes']} nodes of the draft, {found['share_right']:.1%} of them "
            "right"
        )
        listed = report.table(title, "estimate", "AUC", "calibration error", "Brier score")
        for name, metrics in found["estimates"].items():
            listed.add_row(NAMES[name], *(shown(metrics[metric]) for metric in METRICS))
        console.print(listed)


def shown(value: Record | None) -> str:
    """Return a value with its interval as tables show it."""
    return "–" if value is None else f"{value['value']:.4f}  ({value['low']:.4f} to {value['high']:.4f})"
