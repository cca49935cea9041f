"""A Llama's weights inside a larger Llama of the same function; the check of that, and the time of its verify.

Knows no sizes to aim at and no command line: `inflate` chooses and tells.
"""

from __future__ import annotations

import copy
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from benchmarks import workloads
from specsplit.core.errors import ModelUnsupported
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.files import load_config, load_tokenizer, load_weights
from specsplit.model.loader import load_model
from specsplit.model.source import resolve

MEASURED_ROWS = 256
NUM_CHECKED_PROMPTS = 4
NUM_CHECKED_TOKENS = 128
NUM_WARM_UPS = 3
NUM_TIMED = 15
_COMPANIONS = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint of the Llama family; its weights are not read yet."""

    path: Path
    name: str
    config: Any

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def intermediate_size(self) -> int:
        return self.config.intermediate_size

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding, and of the head where it has its own."""
        return (1 if self.config.tie_word_embeddings else 2) * self.config.vocab_size * self.config.hidden_size

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's four projections."""
        heads = self.config.num_attention_heads + self.config.num_key_value_heads
        return 2 * self.config.hidden_size * self.config.head_dim * heads

    @property
    def mlp_parameters_per_width(self) -> int:
        return 3 * self.config.hidden_size


@dataclass(frozen=True, slots=True)
class Difference:
    """How far the copy's logits are from the source's, both in fp32."""

    largest: float
    scale: float
    """The largest logit."""


@dataclass(frozen=True, slots=True)
class Written:
    """Content of a model's folder."""

    num_parameters: int
    weight_bytes: int
    difference: Difference


def open_source(source: str) -> Source:
    """Return the checkpoint that "embedded", a folder or a hub id names.

    Raises:
        ModelUnsupported: not of the Llama family.
        ModelNotFound, ModelDamaged: it cannot be read.
    """
    path, name = resolve(source, "target")
    config = load_config(path, name)
    if config.model_type != "llama":
        raise ModelUnsupported(f"Only models of the Llama family can be inflated; {name} is of {config.model_type}'s.")
    return Source(Path(path), name, config)


def original_places(num_original: int, num_extra: int) -> list[int]:
    """Return where the original layers stand among all of them: in order, with the extra ones spread evenly."""
    total = num_original + num_extra
    return [(2 * layer + 1) * total // (2 * num_original) for layer in range(num_original)]


@torch.no_grad()
def write(source: Source, folder: Path, extra_layers: int, intermediate_size: int, seed: int) -> Written:
    """Write the larger checkpoint into `folder`, an empty one, and compare its logits with the source's."""
    before = _load(source.path, source.config)
    config = copy.deepcopy(source.config)
    config.num_hidden_layers += extra_layers
    config.intermediate_size = intermediate_size
    config.inflated_from = source.name  # an ordinary checkpoint that says what it is
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        after = LlamaForCausalLM(copy.deepcopy(config)).to(before.dtype).eval().requires_grad_(False)
    _transplant(before, after, original_places(source.num_layers, extra_layers))
    after.save_pretrained(folder)
    for file in (file for pattern in _COMPANIONS for file in source.path.glob(pattern)):
        shutil.copyfile(file, folder / file.name)
    if before.generation_config is not None:
        before.generation_config.save_pretrained(folder)
    return Written(
        num_parameters=sum(parameter.numel() for parameter in after.parameters()),
        weight_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        difference=_difference(before, _load(folder, config), check_prompts(source)),
    )


def _load(path: Path, config: Any) -> Any:
    """Return the model in the checkpoint's own dtype."""
    return load_weights(str(path), str(path), copy.deepcopy(config), "auto", torch.device("cpu"))


def _transplant(before: Any, after: Any, places: Sequence[int]) -> None:
    """Put the original weights where they belong, and zeros where what was added would reach the residual stream."""
    for place, layer in enumerate(after.model.layers):
        silence(layer.mlp.down_proj)
        if place not in places:
            silence(layer.self_attn.o_proj)
    for layer, place in zip(before.model.layers, places, strict=True):
        _copy_into(layer, after.model.layers[place])
    for part in ("model.embed_tokens", "model.norm", "lm_head"):
        _copy_into(before.get_submodule(part), after.get_submodule(part))


def silence(projection: nn.Module) -> None:
    for parameter in projection.parameters():
        parameter.zero_()


def _copy_into(smaller: nn.Module, larger: nn.Module) -> None:
    """Copy every parameter into the first rows and columns of its namesake."""
    for name, weight in smaller.named_parameters():
        larger.get_parameter(name)[tuple(slice(size) for size in weight.shape)].copy_(weight)


def check_prompts(source: Source) -> list[list[int]]:
    """Return a row of unrelated tokens and, where the model has a tokenizer, beginnings of code."""
    vocab_size: int = source.config.vocab_size
    prompts = [[(7919 * place + 3) % vocab_size for place in range(NUM_CHECKED_TOKENS)]]
    tokenizer, _ = load_tokenizer(str(source.path), source.name, source.config)
    if tokenizer is not None:
        texts = workloads.read_prompts(workloads.CODE_PROMPTS, NUM_CHECKED_PROMPTS - 1)
        prompts += [tokenizer.encode(prompt.text)[:NUM_CHECKED_TOKENS] for prompt in texts]
    return [token_ids for token_ids in prompts if token_ids and max(token_ids) < vocab_size]


def _difference(before: Any, after: Any, prompts: Sequence[Sequence[int]]) -> Difference:
    before, after = before.float(), after.float()

    def logits(model: Any, token_ids: Sequence[int]) -> Tensor:
        return model(torch.tensor([token_ids]), use_cache=False).logits

    pairs = [(logits(before, token_ids), logits(after, token_ids)) for token_ids in prompts]
    return Difference(
        largest=max((found - expected).abs().max().item() for expected, found in pairs),
        scale=max(expected.abs().max().item() for expected, _ in pairs),
    )


def verify_ms(folder: Path, threads: int) -> float:
    """Return the median time of a forward of one token over 256 rows, in fp32, through the package's own runner."""
    runner = load_model(str(folder), role="target", dtype="fp32", default_context=2 * MEASURED_ROWS).runner
    token_ids = [(31 * place + 5) % runner.vocab_size for place in range(MEASURED_ROWS)]
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runner.forward([SequenceInput(0, 0, token_ids)])
        times: list[float] = []
        for number in range(NUM_WARM_UPS + NUM_TIMED):
            start_s = time.perf_counter()
            runner.forward([SequenceInput(0, MEASURED_ROWS, [number % runner.vocab_size])])
            times.append(1e3 * (time.perf_counter() - start_s))
    finally:
        torch.set_num_threads(threads_before)
    return statistics.median(times[NUM_WARM_UPS:])
