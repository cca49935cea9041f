"""What the transformers peers share: loading a checkpoint as its users do, and timing one `generate`."""

from __future__ import annotations

import time
from importlib.resources import files
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.systems import Sample, Task
from specsplit.core.defaults import EMBEDDED


def load(role: str, source: str = EMBEDDED) -> PreTrainedModel:
    """Return an own fp32 instance that runs past end-of-sequence tokens, as all systems do here.

    Without an end-of-sequence id nothing has to be suppressed, so no logits processor stands in its way.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # assisted generation warns about its own inner call
    path = str(files("specsplit.model") / "embedded" / role) if source == EMBEDDED else source
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, use_safetensors=True)
    model.eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class TransformersSystem:
    """Greedy `generate` with some options."""

    def __init__(self, name: str, model: PreTrainedModel, threads: int, **options: Any) -> None:
        self.name = name
        self._model: Any = model
        self._threads, self._options = threads, options

    @torch.inference_mode()
    def generate(self, task: Task) -> Sample:
        """Do the task; only greedy ones, since transformers draws other random numbers than we do."""
        assert task.sampling.is_greedy, "transformers is compared on greedy decoding only"
        torch.set_num_threads(self._threads)
        prompt = torch.tensor([task.prompt_ids])
        start_s = time.perf_counter()
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            use_cache=True,
            max_new_tokens=task.num_tokens,
            **self._options,
        )
        token_ids = tuple(output[0, len(task.prompt_ids) :].tolist())
        wall_s = time.perf_counter() - start_s
        assert len(token_ids) == task.num_tokens, f"{self.name} made {len(token_ids)} tokens, not {task.num_tokens}"
        return Sample(wall_s, token_ids)
