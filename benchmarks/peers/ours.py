"""SpecSplit in process: one loaded pair, and the modes of the orchestrator over it as systems."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Self

from benchmarks.limits import Costs
from benchmarks.load.clients import Load, Outcome
from benchmarks.load.settings import LoadSettings
from benchmarks.peers import costs
from benchmarks.settings import Pair, ServedMode
from benchmarks.systems import Sample, Task
from specsplit.assembly.models import load_models
from specsplit.assembly.opening import open_workers
from specsplit.assembly.workers import Workers
from specsplit.core.sections import OrchestratorSettings
from specsplit.core.settings import DraftSettings, Settings, TargetSettings, override
from specsplit.core.types import SamplingParams, SessionParams
from specsplit.engine import event_loop
from specsplit.engine.prompt_budget import MAX_STEP_ROWS
from specsplit.model.attention.metadata import SequenceInput
from specsplit.orchestrator.request import Request, Result
from specsplit.sampling.sampler import Sampler


class OnLoop(ABC):
    """An event loop and everything that `_open` puts into `_scope`, for the length of a `with` block."""

    systems: Sequence[Ours] = ()

    def __init__(self) -> None:
        self._loop = event_loop.runner()
        self._scope = AsyncExitStack()

    @abstractmethod
    async def _open(self) -> None:
        """Start the workers and set `systems`; whatever has to be closed goes into `_scope`."""

    def __enter__(self) -> Self:
        try:
            self._loop.run(self._open())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._loop.run(self._scope.aclose())
        self._loop.close()


class InProcess(OnLoop):
    """Both models and their engines; the systems share them."""

    def __init__(self, threads: int, modes: Sequence[ServedMode], pair: Pair, sessions: int = 1) -> None:
        super().__init__()
        self._settings = _settings(threads, modes, pair, sessions)
        self._models = load_models(self._settings)
        self._modes = modes

    async def _open(self) -> None:
        self._workers = await self._scope.enter_async_context(open_workers(self._settings, self._models))
        self.systems = [Ours(mode, self._loop, self._workers) for mode in self._modes]

    def encode(self, text: str, is_chat: bool = False) -> tuple[int, ...]:
        """Return the ids that every system gets for `text`, or for a chat with that one message."""
        tokenizer = self._models.tokenizer
        return tuple(
            tokenizer.encode_messages([{"role": "user", "content": text}]) if is_chat else tokenizer.encode(text)
        )

    def prefill_chunk_tokens(self) -> int:
        """Return how many tokens of a prompt go into one forward."""
        return MAX_STEP_ROWS

    def context(self) -> int:
        """Return how many tokens, prompt included, a task may have."""
        return self._models.target.context

    def models(self) -> dict[str, dict[str, object]]:
        """Return the identity of each model, in JSON types."""
        loaded = {"target": self._models.target, "draft": self._models.draft}
        return {
            role: {
                "name": model.name,
                "weights_hash": model.weights_hash,
                "vocab_hash": model.identity.vocab_hash,
                "num_parameters": sum(weights.numel() for weights in model.runner.model.parameters()),
                "weight_bytes": model.weight_bytes,
                "dtype": model.dtype,
                "device": str(model.runner.device),
            }
            for role, model in loaded.items()
            if model is not None
        }

    def top2_margin(self, token_ids: Sequence[int], sampling: SamplingParams | None = None, seed: int = 0) -> float:
        """Return the difference between the target's best two scores after `token_ids`, greedy by default."""
        model = self._models.target
        logits = model.runner.forward([SequenceInput(0, 0, token_ids)])[0][-1:]
        params = SessionParams(sampling=sampling or SamplingParams(), seed=seed)
        scores = Sampler(params, model.vocab_size, logits.device).scores(logits, token_ids, [0], [[]])
        best, second = scores[0].topk(2).values.tolist()
        return best - second

    def costs(self, context_tokens: int) -> Costs:
        """Return what a verify and a draft level cost behind `context_tokens` tokens; nothing travels here."""
        return self._loop.run(costs.measure(self._workers, context_tokens, travels=False))


def _settings(threads: int, modes: Sequence[ServedMode], pair: Pair, sessions: int) -> Settings:
    """Return the settings that load what the modes need; if all are one, it has its engines as it likes them."""
    loading = {"dtype": pair.dtype, "device": pair.device, "threads": threads, "sessions": sessions}
    # Every run begins with its prompt's forwards, as those of the systems beside it do.
    loading["prefix_reuse"] = "off"
    is_one = len({each.mode for each in modes}) == 1 and not modes[0].is_beside_draft
    mode = modes[0].mode if is_one else "auto"
    nodes = max((mode.shape.nodes or 1 for mode in modes), default=1)
    return Settings(
        target=TargetSettings.model_validate({"model": pair.target, **loading}),
        draft=DraftSettings.model_validate({"model": pair.draft, **loading}),
        orchestrator=override(OrchestratorSettings(), mode=mode, nodes=nodes),
    )


class Ours:
    """A mode over some workers as a system.

    Raises:
        InvalidSettings: there is no such mode.
    """

    def __init__(self, mode: ServedMode, loop: asyncio.Runner, workers: Workers) -> None:
        self.name = mode.name
        self._loop, self._orchestrator = loop, workers.orchestrator(mode.settings())

    def generate(self, task: Task) -> Sample:
        return self._loop.run(self.timed(request_of(task)))

    async def timed(self, request: Request, note: Callable[[int], None] | None = None) -> Sample:
        """Do the request; `note` hears of each arrival how many tokens there are by then."""
        arrivals: list[tuple[float, int]] = []
        num_tokens = 0
        result: Result | None = None
        start_s = time.perf_counter()
        async with aclosing(self._orchestrator.stream(request)) as chunks:
            async for chunk in chunks:
                arrivals.append((time.perf_counter() - start_s, len(chunk.token_ids)))
                result = chunk.result
                num_tokens += len(chunk.token_ids)
                if note is not None:
                    note(num_tokens)
        wall_s = time.perf_counter() - start_s
        assert result is not None, "the last chunk carries the result"
        timings = result.timings
        arrived_s, count = arrivals[-1]  # it was handed over after the sessions were closed
        arrivals[-1] = (min(arrived_s, timings.ttft_s + timings.decode_s), count)
        return Sample(wall_s, result.token_ids, timings.decode_s, result, tuple(arrivals))


def request_of(task: Task) -> Request:
    """Return what the orchestrator is asked for."""
    return Request(
        prompt_ids=task.prompt_ids,
        max_new_tokens=task.num_tokens,
        sampling=task.sampling,
        seed=task.seed,
        ignore_eos=True,
    )


class LoadedEngines(InProcess):
    """One mode over engines in this process; requests beyond its slots wait for their turn, as in a Pipeline."""

    def __init__(self, mode: ServedMode, settings: LoadSettings) -> None:
        super().__init__(settings.threads, (mode,), settings.pair, settings.sessions)
        self._turns = asyncio.Semaphore(settings.sessions)

    def drive(self, load: Load, tasks: Sequence[Task]) -> list[Outcome]:
        """Put the load on the mode until every request has ended."""
        return self._loop.run(load.run(self._send, tasks))

    async def _send(self, task: Task) -> Sample:
        async with self._turns:
            return await self.systems[0].timed(request_of(task))
