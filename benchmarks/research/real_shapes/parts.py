"""Where the time of a round goes, by part: functions are wrapped with a clock, and each counts its own time alone.

The clocks take part of a microsecond a call; no part is called often enough for that to matter.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.systems import Task
from specsplit.draft import engine as draft_engine
from specsplit.model.kv_cache import KVCache
from specsplit.orchestrator.sources.speculator import Speculator
from specsplit.sampling import best, processors, sampler
from specsplit.sampling.sparse_noise import SparseNoise
from specsplit.speculation.round_plan import RoundPlanner
from specsplit.speculation.statistics import SpeculationStats

Parts = dict[str, float]
"""Milliseconds a round by part; `beside` is the share of the round that is no forward."""
FORWARDS = ("target forward", "draft forward")
PREFILL = "prefill"
_FEW_TOKENS = 64
"""A forward of more tokens than that is a prompt's."""
_WRAPPED: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("noise", SparseNoise, ("high", "all", "one", "hashes")),
    ("noise", best, ("gumbel",)),
    ("scores and picks", sampler, ("best_of_logits", "best_of_rows", "picked_ids")),
    ("scores and picks", draft_engine, ("candidate_estimates", "estimates_of")),
    ("top-p", processors, ("cut",)),
    ("top-p", best, ("kept_near", "kept_ids", "cut_row")),
    ("plan", RoundPlanner, ("plan_round",)),
    ("plan", SpeculationStats, ("observe_tree", "observe_round", "observe_lookup", "observe_propose")),
    ("plan", Speculator, ("best", "look_up", "make_input", "take")),
    ("copies", KVCache, ("move_rows",)),
    ("draft tree", draft_engine.Grower, ("_expand", "_proposal", "_align", "_frontier", "_sequence_input")),
)


class _Clock:
    """Exclusive times of nested calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._nested = [0.0]

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            self._nested.append(0.0)
            start_s = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                elapsed_s = time.perf_counter() - start_s
                self.seconds[part] += elapsed_s - self._nested.pop()
                self._nested[-1] += elapsed_s

        return timed

    def around_forward(self, part: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` timed as `part`, and as a prefill if it takes in a prompt."""
        decoding, prefilling = self.around(part, forward), self.around(PREFILL, forward)

        def timed(sequences: Any) -> Any:
            num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
            return (prefilling if num_tokens > _FEW_TOKENS else decoding)(sequences)

        return timed

    @contextmanager
    def wrapping(self, part: str, owner: Any, name: str) -> Generator[None]:
        function = owner.__dict__[name]
        setattr(owner, name, self.around(part, function))
        try:
            yield
        finally:
            setattr(owner, name, function)


def timed_parts(system: Any, task: Task, models: Any) -> Parts:
    """Return where the time of one generation goes, per round; the prompt's forwards are left out."""
    clock = _Clock()
    with ExitStack() as scope:
        for part, owner, names in _WRAPPED:
            for name in names:
                scope.enter_context(clock.wrapping(part, owner, name))
        for part, model in zip(FORWARDS, (models.target, models.draft), strict=True):
            if model is not None:
                runner = model.runner
                runner.forward = clock.around_forward(part, runner.forward)
                scope.callback(delattr, runner, "forward")
        sample = system.generate(task)
    result = sample.result
    assert result is not None, "our own systems tell all"
    rounds = max(1, result.num_rounds)
    wall_s = sample.wall_s - clock.seconds.pop(PREFILL, 0.0)
    parts = {part: seconds * 1e3 / rounds for part, seconds in clock.seconds.items()}
    round_ms = wall_s * 1e3 / rounds
    in_forwards = sum(parts.get(part, 0.0) for part in FORWARDS)
    parts["rest"] = round_ms - sum(parts.values())
    return {**parts, "round": round_ms, "beside": 1 - in_forwards / round_ms}
