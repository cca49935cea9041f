"""The schedule of a streaming target: how many nodes are worth their rows, and whether to wait for nodes at all.

The target's own measurements in, the cost model's rules applied. Knows no stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specsplit.core.types import Timings
from specsplit.speculation.constants import PACE_MEMORY, ROW_COST
from specsplit.speculation.step_times import RunningMedian, StepTimes, rows_s
from specsplit.target.held_tree import HeldTree


@dataclass(slots=True)
class _Miss:
    """A commit below which no node of the client was held, and the nodes that came for it later."""

    committed_s: float
    path_log_probs: list[float] = field(default_factory=list[float])
    best: tuple[float, float, float, int] | None = None
    """The best moment to begin a verify at: its tokens per second, seconds after the commit, E[A], nodes."""


class StreamScheduler:
    """Decides for one stream what to verify, and when; `step_times` are the target's forwards by rows, if measured.

    Times are those of the stream's clock. At most `max_nodes` are verified at once.
    """

    def __init__(self, step_times: Sequence[tuple[int, float]], max_nodes: int, fork_s: float = 0.0) -> None:
        self._verify = StepTimes.from_start(step_times, fork_s) if step_times else None
        self._max_nodes = max_nodes
        self._tokens_per_s = 0.0
        self._misses: dict[int, _Miss] = {}
        """The misses that are not settled, by the commit's position."""
        self._response_s = RunningMedian(0.0)
        self._expected = self._num_nodes = 0.0
        """Means over the answers to misses: E[A], and nodes."""

    def observe(self, timings: Timings, num_tokens: int, elapsed_s: float, num_forks: int = 0) -> None:
        """Count a step that committed `num_tokens`: its forward and picks, and the seconds since the last commit.

        What further branches of its tree take is no part of its rows'.
        """
        device_s = (timings.device_ms + timings.sampling_ms) / 1e3
        if num_forks and self._verify is not None:
            device_s = rows_s(device_s, num_forks * self._verify.fork_s)
        rows = max(timings.step_rows, timings.num_tokens)  # those of all sessions in the step: the time is theirs, too
        if timings.num_forwards == 1 and rows > 0 and device_s > 0:
            if self._verify is None:
                self._verify = StepTimes.from_one_row(device_s / (1 + ROW_COST * (rows - 1)))
            # What a shared step takes more is for its sessions; if it takes less, so many rows alone would, too.
            if timings.batch_size == 1 or device_s < self._verify.seconds(rows):
                self._verify.observe(rows, device_s)
        if elapsed_s > 0:
            self._tokens_per_s = _mean(self._tokens_per_s, num_tokens / elapsed_s)

    def miss(self, position: int, now_s: float) -> None:
        """Record that no node of the client is held below the commit that ends at `position`."""
        self._misses[position] = _Miss(now_s)

    def answer(self, position: int, now_s: float, path_log_probs: Sequence[float]) -> None:
        """Record nodes that hang on the commit that ends at `position`: the answer to a miss, be it late.

        The answers to earlier misses are complete now, and count: when it would have been best to begin, and with what.
        """
        for earlier in [at for at in self._misses if at < position]:
            self._settle(self._misses.pop(earlier))
        miss = self._misses.get(position)
        if miss is None or not path_log_probs or self._verify is None:
            return
        miss.path_log_probs = sorted([*miss.path_log_probs, *path_log_probs], reverse=True)[: self._max_nodes]
        num_nodes, expected = len(miss.path_log_probs), _expected(miss.path_log_probs)
        after_s = now_s - miss.committed_s
        rate = expected / (after_s + self._verify.seconds(num_nodes + 1))
        if miss.best is None or rate > miss.best[0]:
            miss.best = rate, after_s, expected, num_nodes

    def _settle(self, miss: _Miss) -> None:
        if miss.best is not None:
            _, after_s, expected, num_nodes = miss.best
            self._response_s.observe(after_s)
            self._expected, self._num_nodes = _mean(self._expected, expected), _mean(self._num_nodes, num_nodes)

    def observe_vain_wait(self) -> None:
        """Count a wait in which no node came: a draft that has become slow answers no miss at all.

        The text goes on before it does, and its call is cut.
        """
        self._expected = _mean(self._expected, 1.0)

    def choose(self, tree: HeldTree, ranked: Sequence[int]) -> Sequence[int]:
        """Return those of the nodes, the likeliest first, to verify now."""
        return ranked if self._verify is None else tree.worth_verifying(ranked, self._verify, self._rate)

    def count(self, path_log_probs: Sequence[float]) -> int:
        """Return how many nodes, the likeliest first, to verify now."""
        if self._verify is None:
            return len(path_log_probs)
        return self._verify.count_worth_verifying(path_log_probs, self._rate)

    @property
    def _rate(self) -> float:
        """The stream's tokens per second; before the first step what plain decoding has at least."""
        assert self._verify is not None, "asked only then"
        return self._tokens_per_s or 1 / self._verify.seconds(1)

    def wait_s(self, path_log_probs: Sequence[float], waited_s: float, room: float = math.inf) -> float:
        """Return how much longer to wait for nodes, `waited_s` after the last commit; 0 where a step now is better.

        `path_log_probs` are of the nodes that may go now, the likeliest first; `room` are the levels of nodes that the
        text has room for.
        """
        if self._verify is None or not self._expected or room <= 0:
            return 0.0
        path_log_probs = path_log_probs[: self.count(path_log_probs)]  # what a step now would verify
        # Compare a step now with one when the usual answer is here: E[A], less what the stream has in so much time.
        left_s, num_nodes = self._response_s.value - waited_s, round(self._num_nodes)
        if left_s <= 0:  # they are late; how much longer it takes nobody knows
            return 0.0 if path_log_probs else max(0.0, left_s + self._response_s.value)
        more = min(self._expected, 1 + room) - _expected(path_log_probs)
        more_s = left_s + self._verify.seconds(num_nodes + 1) - self._verify.seconds(len(path_log_probs) + 1)
        return left_s if more > self._rate * more_s else 0.0


def _expected(path_log_probs: Sequence[float]) -> float:
    return 1 + sum(map(math.exp, path_log_probs))


def _mean(mean: float, value: float) -> float:
    return mean + (value - mean) * (1 - PACE_MEMORY) if mean else value
