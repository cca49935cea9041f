"""SpecSplit in process: plain decoding and pingpong through the orchestrator, over one loaded pair."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from benchmarks.bars import PLAIN
from benchmarks.peers.factories import Shape
from benchmarks.systems import Sample, Task
from specsplit.assembly import load_models, running
from specsplit.core.settings import DraftSettings, Settings, TargetSettings
from specsplit.engine.session import MAX_STEP_TOKENS
from specsplit.model.plan import Entry
from specsplit.orchestrator.pipeline import Orchestrator
from specsplit.orchestrator.records import Patience, Request, Result, Speculation


class InProcess:
    """Both models and their engines, for the length of a `with` block; the systems share them."""

    def __init__(self, threads: int, shapes: Sequence[tuple[str, Shape]]) -> None:
        settings = Settings(
            target=TargetSettings(dtype="fp32", threads=threads), draft=DraftSettings(dtype="fp32", threads=threads)
        )
        self._models = load_models(settings)
        self._shapes = shapes
        self._loop = asyncio.Runner()
        self._engines = AsyncExitStack()

    def __enter__(self) -> InProcess:
        workers = self._loop.run(self._engines.enter_async_context(running(self._models)))
        target, draft, tokenizer = workers.verifier, workers.drafter, workers.tokenizer
        plain = Speculation(mode="plain")
        self.systems = [Ours(PLAIN, self._loop, Orchestrator(target, None, tokenizer, plain))]
        for name, shape in self._shapes:
            trees = Speculation(mode="pingpong", nodes=shape.nodes, depth=shape.depth, branching=shape.branching)
            patience = Patience(draft_s=math.inf)  # as in assembly
            orchestrator = Orchestrator(target, draft, tokenizer, trees, patience=patience)
            self.systems.append(Ours(name, self._loop, orchestrator))
        return self

    def __exit__(self, *raised: object) -> None:
        self._loop.run(self._engines.aclose())
        self._loop.close()

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids that every system gets for `text`."""
        return tuple(self._models.tokenizer.encode(text))

    def prefill_chunk_tokens(self) -> int:
        """Return how many tokens of a prompt go into one forward."""
        return MAX_STEP_TOKENS

    def top2_margin(self, token_ids: Sequence[int]) -> float:
        """Return the difference between the target's best two logits after `token_ids`."""
        logits = self._models.target.runner.forward([Entry(0, 0, token_ids)])[0][-1]
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
