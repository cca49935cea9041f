"""How a streaming target uses its time: how many nodes are worth their rows, and whether to wait for nodes at all.

The target's own measurements in, the cost model's rules applied. Knows no tree and no stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specsplit.core.cost_model import RunningMedian, StepTimes, is_worth_waiting, worth_verifying
from specsplit.core.types import Timings

_GRID = (1, 2, 3, 5, 9, 17, 33)
_MEMORY = 0.9
_MOST_WAIT = 2.0
"""Nodes are waited for at most this many times as long as they usually take."""


class Pace:
    """One stream's pace; `step_times` are the target's forwards by rows as measured at its start, if they were."""

    def __init__(self, step_times: Sequence[tuple[int, float]]) -> None:
        self._verify = StepTimes(dict(step_times)) if step_times else None
        self._tokens_per_s = 0.0
        self._response_s = RunningMedian()
        self._expected = self._num_nodes = 0.0
        """Of proposals that answered a commit below which nothing was held: E[A], and nodes."""

    def observe(self, timings: Timings, num_tokens: int, elapsed_s: float) -> None:
        """Count a step that committed `num_tokens`: its forward, and the seconds since the last commit."""
        device_s = timings.device_ms / 1e3
        if timings.num_forwards == 1 and timings.num_tokens > 0 and device_s > 0:
            if self._verify is None:
                self._verify = StepTimes(dict.fromkeys(_GRID, device_s))
            self._verify.observe(timings.num_tokens, device_s)
        if elapsed_s > 0:
            self._tokens_per_s = _mean(self._tokens_per_s, num_tokens / elapsed_s)

    def observe_response(self, seconds: float, path_log_probs: Sequence[float]) -> None:
        """Count how long after a commit nodes came that hang on it, and how probable they are; late ones count too."""
        self._response_s.observe(seconds)
        self._expected = _mean(self._expected, 1 + sum(map(math.exp, path_log_probs)))
        self._num_nodes = _mean(self._num_nodes, len(path_log_probs))

    def count(self, path_log_probs: Sequence[float]) -> int:
        """Return how many nodes, the likeliest first, to verify now."""
        if self._verify is None:
            return len(path_log_probs)
        return worth_verifying(path_log_probs, self._tokens_per_s, self._verify)

    def wait_s(self) -> float:
        """Return how long after a commit to wait for nodes that hang on it, 0 where a step without any is better."""
        if self._verify is None or not self._expected:
            return 0.0
        response_s = self._response_s.value
        is_worth_it = is_worth_waiting(response_s, self._expected, round(self._num_nodes), self._verify)
        return _MOST_WAIT * response_s if is_worth_it else 0.0


def _mean(mean: float, value: float) -> float:
    return mean + (value - mean) * (1 - _MEMORY) if mean else value
