"""SpecSplit in process: plain and pingpong through the orchestrator, over one loaded target, and its bare forward."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import torch

from benchmarks.systems import Sample, Task
from specsplit.assembly import Models, Progress, load_models, running
from specsplit.core.settings import DraftSettings, Settings, TargetSettings
from specsplit.model.plan import Entry
from specsplit.orchestrator.pipeline import Orchestrator
from specsplit.orchestrator.records import Request, Result, Speculation


class InProcess:
    """Both models and their engines, for the length of a `with` block; all systems it gives share them."""

    def __init__(self, threads: int, progress: Progress | None = None) -> None:
        settings = Settings(
            target=TargetSettings(dtype="fp32", threads=threads), draft=DraftSettings(dtype="fp32", threads=threads)
        )
        self.models: Models = load_models(settings, progress)
        self._loop = asyncio.Runner()
        self._engines = AsyncExitStack()

    def __enter__(self) -> InProcess:
        self._workers = self._loop.run(self._engines.enter_async_context(running(self.models)))
        return self

    def __exit__(self, *raised: object) -> None:
        self._loop.run(self._engines.aclose())
        self._loop.close()

    def plain(self) -> Ours:
        """Return plain decoding: the same rounds without a draft."""
        workers = self._workers
        speculation = Speculation(mode="plain")
        return Ours("plain", self._loop, Orchestrator(workers.verifier, None, workers.tokenizer, speculation))

    def pingpong(self, nodes: int, depth: int, branching: int, name: str = "pingpong") -> Ours:
        """Return speculative decoding with trees of that shape."""
        workers = self._workers
        speculation = Speculation(mode="pingpong", nodes=nodes, depth=depth, branching=branching)
        return Ours(name, self._loop, Orchestrator(workers.verifier, workers.drafter, workers.tokenizer, speculation))

    def bare_forward(self) -> BareForward:
        """Return the target's forward alone; no generation may be under way while it runs."""
        return BareForward(self.models)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.models.tokenizer.encode(text))

    def top2_margin(self, token_ids: Sequence[int]) -> float:
        """Return the difference between the target's best two logits after `token_ids`."""
        logits = self.models.target.runner.forward([Entry(0, 0, token_ids)])[0][-1]
        best, second = logits.topk(2).values.tolist()
        return best - second


class Ours:
    """One orchestrator as a system."""

    def __init__(self, name: str, loop: asyncio.Runner, orchestrator: Orchestrator) -> None:
        self.name = name
        self._loop, self._orchestrator = loop, orchestrator

    def generate(self, task: Task) -> Sample:
        request = Request(
            prompt_ids=task.prompt_ids,
            max_new_tokens=task.num_tokens,
            sampling=task.sampling,
            seed=task.seed,
            ignore_eos=True,
        )
        result, wall_s = self._loop.run(self._timed(request))
        return Sample(wall_s, result.token_ids, result.timings.decode_s, result)

    async def _timed(self, request: Request) -> tuple[Result, float]:
        start_s = time.perf_counter()
        result = await self._orchestrator.generate(request)
        return result, time.perf_counter() - start_s


class BareForward:
    """The target's one-token forwards at the same context lengths, nothing around them: the ceiling of decoding."""

    name = "bare forward"

    def __init__(self, models: Models) -> None:
        self._target = models.target

    @torch.inference_mode()
    def generate(self, task: Task) -> Sample:
        """Forward as often as decoding needs after the prompt; which token is fed makes no difference to the time."""
        runner, length, token_ids = self._target.runner, len(task.prompt_ids), task.prompt_ids[-1:]
        runner.forward([Entry(0, 0, task.prompt_ids)])
        start_s = time.perf_counter()
        for position in range(length, length + task.num_tokens - 1):
            runner.forward([Entry(0, position, token_ids)])
        elapsed_s = time.perf_counter() - start_s
        return Sample(elapsed_s, None, elapsed_s)
