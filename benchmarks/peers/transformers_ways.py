"""transformers on the same models: plain `generate`, assisted generation, prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from benchmarks.load.clients import ClosedLoop, Outcome, of_sample
from benchmarks.settings import Pair
from benchmarks.systems import Sample, Task
from specsplit.core.defaults import EMBEDDED
from specsplit.core.errors import InvalidRequest
from specsplit.model.loader import DTYPES

NUM_CONSTANT_TOKENS = 4


def load(name: str, threads: int, pair: Pair) -> TransformersSystem:
    """Return the way of that name, with its own instance of the target."""
    return TransformersSystem(name, load_model("target", pair), threads, WAYS[name](pair))


def load_model(role: str, pair: Pair) -> PreTrainedModel:
    """Return an own instance that runs past end-of-sequence tokens, as all systems do here.

    It keeps nothing of the checkpoint's generation defaults, such as a penalty, which no other system here follows.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # assisted generation warns about its own inner call
    source = pair.target if role == "target" else pair.draft
    assert source is not None, "the registry asks for a draft if a system needs one"
    if pair.dtype not in DTYPES:
        raise InvalidRequest(f"transformers has no {pair.dtype} here; name systems of ours, or another --dtype.")
    path = str(files("specsplit.model") / "embedded" / role) if source == EMBEDDED else source
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[pair.dtype], use_safetensors=True)
    model.to(pair.device).eval().requires_grad_(False)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def _assisted_constant(pair: Pair) -> dict[str, Any]:
    draft = load_model("draft", pair)  # its own: the options live in the draft's generation config
    draft.generation_config.num_assistant_tokens = NUM_CONSTANT_TOKENS
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0
    return {"assistant_model": draft}


WAYS: dict[str, Callable[[Pair], dict[str, Any]]] = {
    "generate": lambda pair: {},
    "assisted": lambda pair: {"assistant_model": load_model("draft", pair)},
    "assisted-constant": _assisted_constant,
    "lookup-4": lambda pair: {"prompt_lookup_num_tokens": 4},
    "lookup-10": lambda pair: {"prompt_lookup_num_tokens": 10},
}
"""Options of `generate`, by the name of the way."""


class _Arrivals(BaseStreamer):
    """Notes when tokens come out; the first thing put is the prompt."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self.seen: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append((time.perf_counter() - self._start_s, value.numel()))

    def end(self) -> None:
        pass


class TransformersSystem:
    """`generate` with some options; with a temperature it draws other random numbers than we do."""

    def __init__(self, name: str, model: PreTrainedModel, threads: int, options: Mapping[str, Any]) -> None:
        self.name = name
        self._model: Any = model
        self._threads, self._options = threads, options

    @torch.inference_mode()
    def generate(self, task: Task) -> Sample:
        """Do the task and time it."""
        torch.set_num_threads(self._threads)
        torch.manual_seed(task.seed)
        prompt = torch.tensor([task.prompt_ids], device=self._model.device)
        start_s = time.perf_counter()
        arrivals = _Arrivals(start_s)
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            use_cache=True,
            max_new_tokens=task.num_tokens,
            streamer=arrivals,
            **_sampling(task),
            **self._options,
        )
        token_ids = tuple(output[0, len(task.prompt_ids) :].tolist())
        wall_s = time.perf_counter() - start_s
        assert len(token_ids) == task.num_tokens, f"{self.name} made {len(token_ids)} tokens, not {task.num_tokens}"
        seen = tuple(arrivals.seen[1:])
        return Sample(wall_s, token_ids, seen[-1][0] - seen[0][0], arrivals=seen)


def _sampling(task: Task) -> dict[str, Any]:
    sampling = task.sampling
    if sampling.is_greedy:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}


class BatchedGenerate:
    """`generate` on batches of as many requests as there are clients: no scheduler and no round cost anything.

    A batch begins when the one before has ended, is padded on the left, and runs to the end of its longest text.
    """

    def __init__(self, name: str, threads: int, pair: Pair) -> None:
        self.name = name
        self._model = load_model("target", pair)
        self._threads = threads

    def drive(self, load: ClosedLoop, tasks: Sequence[Task]) -> list[Outcome]:
        """Do the tasks in batches, and return each text up to its own length."""
        torch.set_num_threads(self._threads)
        began_s = time.perf_counter()
        outcomes: list[Outcome] = []
        due_s = [0.0] * load.clients
        for first in range(0, len(tasks), load.clients):
            start_s = time.perf_counter() - began_s
            samples = self._batch(tasks[first : first + load.clients])
            batch = [of_sample(each, first + row, due_s[row], start_s - due_s[row]) for row, each in enumerate(samples)]
            # As in ClosedLoop: the client whose text ends first sends the next request then, and waits for its batch.
            due_s = sorted(each.due_s + each.e2e_s for each in batch)
            outcomes += batch
        return outcomes

    @torch.inference_mode()
    def _batch(self, tasks: Sequence[Task]) -> list[Sample]:
        torch.manual_seed(tasks[0].seed)
        longest = max(len(task.prompt_ids) for task in tasks)
        padding = [longest - len(task.prompt_ids) for task in tasks]
        arrivals = _Arrivals(time.perf_counter())
        prompts = [[0] * pad + list(task.prompt_ids) for pad, task in zip(padding, tasks, strict=True)]
        masks = [[0] * pad + [1] * (longest - pad) for pad in padding]
        output = self._model.generate(
            torch.tensor(prompts, device=self._model.device),
            attention_mask=torch.tensor(masks, device=self._model.device),
            use_cache=True,
            max_new_tokens=max(task.num_tokens for task in tasks),
            streamer=arrivals,
            **_sampling(tasks[0]),
        )
        times_s = [at_s for at_s, _ in arrivals.seen[1:]]  # the first thing put is the prompts
        return [
            Sample(
                times_s[task.num_tokens - 1],
                tuple(row[longest : longest + task.num_tokens]),
                arrivals=tuple((at_s, 1) for at_s in times_s[: task.num_tokens]),
            )
            for task, row in zip(tasks, output.tolist(), strict=True)
        ]
