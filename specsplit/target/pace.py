"""How a streaming target uses its time: how many nodes are worth their rows, and whether to wait for nodes at all.

The target's own measurements in, the cost model's rules applied. Knows no tree and no stream.
"""

from __future__ import annotations

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
        self._response = RunningMedian()
        self._has_response = False
        self._gain = self._num_nodes = 0.0
        """Tokens accepted, and nodes, of a verify with nodes."""

    def observe(self, timings: Timings, num_nodes: int, num_accepted: int, elapsed_s: float) -> None:
        """Count a step: its forward, and the seconds since the last commit, waiting included."""
        device_s = timings.device_ms / 1e3
        if timings.num_forwards == 1 and timings.num_tokens > 0 and device_s > 0:
            if self._verify is None:
                self._verify = StepTimes(dict.fromkeys(_GRID, device_s))
            self._verify.observe(timings.num_tokens, device_s)
        if elapsed_s > 0:
            rate = (1 + num_accepted) / elapsed_s
            self._tokens_per_s = _mean(self._tokens_per_s, rate)
        if num_nodes:
            self._gain, self._num_nodes = _mean(self._gain, num_accepted), _mean(self._num_nodes, num_nodes)

    def observe_response(self, seconds: float) -> None:
        """Count how long after a commit nodes came that hang on it."""
        self._has_response = True
        self._response.observe(seconds)

    def count(self, path_log_probs: Sequence[float]) -> int:
        """Return how many nodes, the likeliest first, to verify now."""
        if self._verify is None:
            return len(path_log_probs)
        return worth_verifying(path_log_probs, self._tokens_per_s, self._verify)

    def wait_s(self) -> float:
        """Return how long after a commit to wait for nodes that hang on it, 0 where a step without any is better."""
        if self._verify is None or not self._has_response or not self._num_nodes:
            return 0.0
        response_s = self._response.value
        is_worth_it = is_worth_waiting(response_s, 1 + self._gain, round(self._num_nodes), self._verify)
        return _MOST_WAIT * response_s if is_worth_it else 0.0


def _mean(mean: float, value: float) -> float:
    return mean + (value - mean) * (1 - _MEMORY) if mean else value
