"""Random-weight pairs whose draft and target agree as often as asked.

The draft is random; the target's first layers compute what the draft computes, in as many of its columns as the draft
is wide (the columns beyond are zeros, which cost as much as other numbers). What the target's other layers add to the
residual stream is scaled by one factor: at 0 target and draft are one function, the larger it is the less they agree.
The factor is found by bisection: greedy top-1 agreement at every position of held-out token streams. The agreement on
the target's own greedy text is measured afterwards and written down beside it.

Random weights have none of a language's habits, so three are given to them. Attention is sharp, so that a token depends
on the whole context and the text does not run in circles, which lookup would profit from; logits have a standard
deviation of 8 nats, at which the likeliest token has about half of the mass (the random energy model below its
freezing temperature); and rows of the head shrink with the token id, so that the lowest 32,768 ids have nine tokens of
ten and the lowest 65,536 nearly all, as English prose has them with tokenizers of such vocabularies.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.research.made_folder import beside, publish, read_record
from benchmarks.research.real_shapes.shapes import PairShape
from benchmarks.research.real_shapes.tokenizer import write_tokenizer

RECORD = "real_shape.json"
VERSION = 2
"""Pairs of another version are made anew."""
SHARPNESS = 3.0
"""Standard deviation of the attention's scores, in nats."""
LOGIT_SCALE = 8.0
RAREST = 0.62
"""Length of the head's last row relative to its first."""
NUM_STREAMS, STREAM_TOKENS = 8, 192
NUM_STEPS = 8
"""Halvings of the factor's interval."""
_RESIDUAL = ("o_proj.weight", "down_proj.weight")
Weights = dict[str, Tensor]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MadePair:
    """The folders of a pair, and what was found of it."""

    target: str
    draft: str
    shape: str
    asked_agreement: float
    stream_agreement: float
    """Greedy top-1, on the streams that the factor was chosen on."""
    text_agreement: float
    """The same on the target's own greedy text."""
    coupled_agreement: float
    """Share of equal picks at T = 0.7 with top-p 0.9 and common noise, on that text."""
    factor: float
    seed: int
    version: int = VERSION


def made_pair(shape: PairShape, agreement: float, cache: Path, seed: int, tell: Tell, device: str = "cpu") -> MadePair:
    """Return the pair of a shape from the cache folder, made on `device` before if it is not there."""
    place = "" if device == "cpu" else "-gpu"  # whose random numbers are others
    folder = cache / f"{shape.name}-{agreement:g}-{seed}{place}"
    facts = read_record(folder, RECORD)
    if facts.get("version") == VERSION:
        return MadePair(**{**facts, "target": str(folder / "target"), "draft": str(folder / "draft")})
    if folder.exists():  # an older version, or a copy that was interrupted before folders were renamed
        shutil.rmtree(folder)
    with beside(folder) as scratch:
        made = _make(shape, agreement, scratch, seed, tell, device)
        publish(scratch, folder, RECORD, asdict(made))
    return made_pair(shape, agreement, cache, seed, tell, device)


@torch.inference_mode()
def _make(shape: PairShape, agreement: float, folder: Path, seed: int, tell: Tell, device: str) -> MadePair:
    generator = torch.Generator(device).manual_seed(seed)
    configs = {"draft": shape.draft_config(), "target": shape.config}
    weights = {role: _random_weights(config, generator) for role, config in configs.items()}
    _transplant(weights["draft"], weights["target"], shape)
    for role, config in configs.items():
        _write(folder / role, config, weights[role])
    tell(f"{shape.name}: weights are written; looking for the factor of an agreement of {agreement:g}")
    draft, target = (
        AutoModelForCausalLM.from_pretrained(folder / role, dtype=torch.bfloat16).to(torch.device(device))
        for role in configs
    )
    added = {name: weights["target"][name] for name in _added(weights["target"], shape)}
    frequent = shape.config["vocab_size"] // 8
    streams = torch.randint(frequent, (NUM_STREAMS, STREAM_TOKENS), generator=generator, device=device)
    factor, found = _bisect(target, draft, added, streams, agreement, tell)
    _scale(target, added, factor)
    target.generation_config.eos_token_id = None
    text = target.generate(streams[:, :16], max_new_tokens=STREAM_TOKENS, do_sample=False, pad_token_id=0)
    _write(folder / "target", shape.config, weights["target"] | {name: added[name] * factor for name in added})
    return MadePair(
        target="target",
        draft="draft",
        shape=shape.name,
        asked_agreement=agreement,
        stream_agreement=found,
        text_agreement=_agreement(target, draft, text),
        coupled_agreement=_coupled_agreement(target, draft, text),
        factor=factor,
        seed=seed,
    )


def _random_weights(values: Mapping[str, Any], generator: torch.Generator) -> Weights:
    config = _config(values)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config).state_dict()
    width = config.hidden_size
    weights: Weights = {}
    for name, like in names.items():
        if name == "lm_head.weight":
            continue  # tied
        weight = torch.ones(like.shape, device=generator.device)
        if like.dim() == 2:
            weight = torch.randn(like.shape, generator=generator, device=generator.device).div_(
                math.sqrt(like.shape[1])
            )
        if name == "model.embed_tokens.weight":
            ranks = torch.arange(1, len(weight) + 1, device=generator.device).log() / math.log(len(weight))
            weight *= (1 - (1 - RAREST) * ranks**4)[:, None]
        elif name == "model.norm.weight":
            weight *= LOGIT_SCALE
        elif name.endswith("q_norm.weight") or ("q_proj" in name and config.model_type == "llama"):
            weight *= SHARPNESS
        weights[name] = weight.to(torch.bfloat16)
    assert weights["model.embed_tokens.weight"].shape[1] == width
    return weights


def _config(values: Mapping[str, Any]) -> Any:
    return AutoConfig.for_model(**values, dtype="bfloat16", bos_token_id=None, eos_token_id=values["vocab_size"] - 1)


def _transplant(draft: Weights, target: Weights, shape: PairShape) -> None:
    """Make the target's first layers, its embedding and its last norm compute what the draft's do."""
    # The columns beyond the draft's are zeros, so the mean of squares is smaller by the share of the draft's columns.
    narrowing = math.sqrt(shape.draft_width / shape.config["hidden_size"])
    for name, small in draft.items():
        large = target[name]
        if large.shape != small.shape:
            large.zero_()
        part = large[tuple(slice(size) for size in small.shape)]
        is_of_stream = name.endswith("layernorm.weight") or name == "model.norm.weight"
        part.copy_(small * narrowing if is_of_stream else small)


def _added(weights: Weights, shape: PairShape) -> list[str]:
    """Return the projections through which the layers that the draft lacks reach the residual stream."""
    kept = tuple(f"model.layers.{layer}." for layer in range(shape.draft_layers))
    return [name for name in weights if name.endswith(_RESIDUAL) and not name.startswith(kept)]


def _write(folder: Path, values: Mapping[str, Any], weights: Weights) -> None:
    folder.mkdir(exist_ok=True)
    _config(values).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[values["model_type"]]]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(folder, values["vocab_size"])


def _scale(target: Any, added: Weights, factor: float) -> None:
    for name, weight in added.items():
        target.get_parameter(name).copy_(weight * factor)


def _bisect(
    target: Any, draft: Any, added: Weights, streams: Tensor, agreement: float, tell: Tell
) -> tuple[float, float]:
    """Return the factor whose agreement is nearest to the one asked for, and that agreement."""
    low, high = 0.0, 1.0
    tried: list[tuple[float, float, float]] = []
    for _ in range(NUM_STEPS):
        factor = (low + high) / 2
        _scale(target, added, factor)
        found = _agreement(target, draft, streams)
        tell(f"factor {factor:.4f}: agreement {found:.3f}")
        tried.append((abs(found - agreement), factor, found))
        low, high = (factor, high) if found > agreement else (low, factor)
    _, factor, found = min(tried)
    return factor, found


def _agreement(target: Any, draft: Any, streams: Tensor) -> float:
    """Return the share of positions at which both models have the same best token."""
    equal = [model_pair_equal(target, draft, row) for row in streams]
    return torch.cat(equal).float().mean().item()


def model_pair_equal(target: Any, draft: Any, row: Tensor) -> Tensor:
    """Return at which positions of one stream [T] both models have the same best token, bool [T]."""
    best = [model(row[None]).logits[0].argmax(-1) for model in (target, draft)]
    return best[0] == best[1]


def _coupled_agreement(target: Any, draft: Any, streams: Tensor) -> float:
    """Return how often both models pick the same token at T = 0.7 with top-p 0.9 under the shared noise."""
    from specsplit.core.types import SamplingParams, SessionParams
    from specsplit.sampling.sampler import Sampler

    params = SessionParams(sampling=SamplingParams(temperature=0.7, top_p=0.9), seed=1)
    num_equal = num_all = 0
    for row in streams:
        sampler = Sampler(params, target.config.vocab_size, row.device)
        depths = range(len(row))
        picks = [sampler.picks(model(row[None]).logits[0].float(), (), depths, None) for model in (target, draft)]
        num_equal += sum(ours == theirs for ours, theirs in zip(*picks, strict=True))
        num_all += len(row)
    return num_equal / num_all
