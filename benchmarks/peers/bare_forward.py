"""The target's one-token forward with nothing around it: the ceiling of decoding without speculation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.settings import Pair
from benchmarks.systems import Sample, Task
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import load_model


def load(name: str, threads: int, pair: Pair) -> BareForward:
    """Return the system, its target loaded."""
    torch.set_num_threads(threads)  # what an engine does in its own thread
    target = load_model(pair.target, role="target", dtype=pair.dtype, device=pair.device, threads=threads)
    return BareForward(name, target.runner)


@dataclass(frozen=True, slots=True)
class BareForward:
    """One-token forwards at the context lengths that decoding has, by the thread that loaded the model."""

    name: str
    runner: Any

    @torch.inference_mode()
    def generate(self, task: Task) -> Sample:
        """Forward as often as decoding needs after the prompt; which token is fed makes no difference to the time."""
        runner, length, token_ids = self.runner, len(task.prompt_ids), task.prompt_ids[-1:]
        runner.forward([SequenceInput(0, 0, task.prompt_ids)])
        start_s = time.perf_counter()
        for position in range(length, length + task.num_tokens - 1):
            runner.forward([SequenceInput(0, position, token_ids)])
        elapsed_s = time.perf_counter() - start_s
        return Sample(elapsed_s, None, elapsed_s)
