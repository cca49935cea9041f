"""The probing forward: finds out, at load, how each layer calls attention, and refuses a model that we cannot serve.

transformers merely logs that a model bypasses the attention interface; here a model is served only if exactly one call
per layer was seen, every keyword is understood, and the logits equal those of transformers' own eager attention.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specsplit.core.errors import ModelDamaged, ModelUnsupported, OutOfMemory, SpecSplitError
from specsplit.model.attention.function import HANDED, NAME, LayerSpec
from specsplit.model.attention.masks import MaskFunction, MaskRule, evaluate_mask
from specsplit.model.files import one_line
from specsplit.model.head_shape import HeadShape
from specsplit.model.linear_calls import WithoutProducts
from specsplit.model.memory import is_exhausted
from specsplit.model.quantised import refuse_quantised
from specsplit.model.transformers_models import GradientCheckpointingLayer, PreTrainedModel

_UNDERSTOOD = {"scaling", "softcap", "s_aux"}
_HARMLESS = {
    "dropout",  # zero in eval mode
    "sliding_window",  # said by the mask rule already, in positions
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "logits_to_keep",
    "is_causal",
    "return_dict",
}
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_NUM_TOKENS = 12


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Each attention layer's parameters, and the kinds of masks among them (None = plainly causal)."""

    layers: tuple[LayerSpec, ...]
    masks: tuple[MaskFunction | None, ...]


def refuse_by_config(config: Any) -> None:
    """Refuse a model whose config already shows that it cannot be served.

    Raises:
        ModelUnsupported: encoder-decoder, quantised in a way that is not served, layers that cannot roll back, or
            frequencies without a longest context.
    """
    text = config.get_text_config()
    name = f"{config.model_type} models"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnsupported(f"{name} are encoder-decoders; SpecSplit serves decoder-only models.")
    refuse_quantised(config)
    odd = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if odd:
        raise ModelUnsupported(f"{name} have layers without a KV cache that rolls back ({', '.join(odd)}).")
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {kind.get("rope_type") for kind in rope.values() if isinstance(kind, dict)}
    if "dynamic" in kinds and getattr(text, "max_position_embeddings", None) is None:
        raise ModelUnsupported(
            f"This {config.model_type} model uses dynamic RoPE, whose frequencies change beyond "
            "max_position_embeddings, which its config.json does not give, so cached keys would become wrong; add it."
        )


class _Probe:
    """Stands in for SlotAttention during one forward: it computes nothing and records every call."""

    def __init__(self, model_type: str) -> None:
        self._model_type = model_type
        self.layers: dict[int, LayerSpec] = {}
        self.masks: list[MaskFunction | None] = []

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, keywords: dict[str, Any]) -> Tensor:
        """Record the call; the output's values do not matter, only that every layer is reached."""
        self._check_keywords(mask, keywords)
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.layers:
            self._refuse("calls attention more than once a layer")
        rule = None if mask.is_plain_causal else mask.function
        if rule not in self.masks:
            _check_is_causal(rule, self._model_type)
            self.masks.append(rule)
        scaling = keywords.get("scaling")
        spec = LayerSpec(
            scaling=q.shape[-1] ** -0.5 if scaling is None else float(scaling),
            softcap=keywords.get("softcap"),
            sinks=keywords.get("s_aux"),
            mask=self.masks.index(rule),
            group=q.shape[1] // k.shape[1],
            key_shape=HeadShape(k.shape[1], k.shape[3]),
            value_shape=HeadShape(v.shape[1], v.shape[3]),
        )
        self.layers[layer] = spec  # type: ignore[index]
        return v.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def _check_keywords(self, mask: Any, keywords: dict[str, Any]) -> None:
        unknown = sorted(
            name for name, value in keywords.items() if value is not None and name not in _UNDERSTOOD | _HARMLESS
        )
        if unknown:
            self._refuse(f"passes attention a keyword of unknown meaning ({', '.join(unknown)})")
        if not isinstance(mask, MaskRule):
            self._refuse("builds its attention mask by itself")
        if not mask.is_vectorised:
            self._refuse("has a mask rule that cannot be evaluated on tree positions")
        if keywords.get("is_causal") is False:
            self._refuse("has attention that is not causal")

    def _refuse(self, what: str) -> None:
        raise ModelUnsupported(f"This {self._model_type} model {what}, which SpecSplit cannot serve exactly.")


@contextmanager
def trying(model: PreTrainedModel) -> Generator[None]:
    """Translate what the code of a model raises in a first forward into our error tree."""
    try:
        yield
    except SpecSplitError:
        raise
    except Exception as error:
        kind = type(model).__name__
        if is_exhausted(error):
            smaller = "a smaller model or --dtype bf16" if model.dtype == torch.float32 else "a smaller model"
            raise OutOfMemory(f"The memory ran out in the first forward of this {kind}; use {smaller}.") from error
        passes_none = isinstance(error, TypeError | KeyError)
        what = "does not pass attention keywords through" if passes_none else "fails in its first forward"
        raise ModelUnsupported(f"{kind} {what}; SpecSplit cannot serve it ({one_line(error)}).") from error


@torch.inference_mode()
def probe(
    model: PreTrainedModel, forward: Callable[..., object] | None = None, layers: range | None = None
) -> ProbeResult:
    """Run one forward and return the parameters of the layers (by default all); leaves the model on our attention.

    `forward` stands in for the model where it has no embedding; it is called with the model's own keywords.

    Raises:
        ModelUnsupported: a layer bypasses the interface, passes a keyword of unknown meaning, or fails.
        OutOfMemory.
    """
    model.set_attn_implementation(NAME)
    seen = _Probe(model.config.model_type)
    tokens = torch.arange(_NUM_TOKENS, device=model.device)[None]

    def run() -> None:
        (forward or model)(
            input_ids=tokens,
            position_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            use_cache=False,
            logits_to_keep=tokens[0],  # as in serving: for a number Gemma 4 cuts the step, masks included
            layer_attention=seen,
        )

    with trying(model), WithoutProducts():
        try:
            run()
        except KeyError as error:
            if error.args != (HANDED,):
                raise
            _hand_over(model)
            run()
    # Every layer once: a layer that was not seen keeps no KV, one that was seen twice would overwrite its own.
    layers = range(model.config.get_text_config().num_hidden_layers) if layers is None else layers
    if not seen.layers or sorted(seen.layers) != list(layers):
        raise ModelUnsupported(
            f"{type(model).__name__} does not send every layer through transformers' attention interface "
            f"({len(seen.layers)} of {len(layers)} layers), so SpecSplit cannot keep its KV cache."
        )
    return ProbeResult(tuple(seen.layers[layer] for layer in layers), tuple(seen.masks))


def _hand_over(model: PreTrainedModel) -> None:
    """Let layers that get our keyword and do not pass it to their attention (StableLM, Nemotron) hand it over there."""

    def hand_over(layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        for module in layer.children():
            if hasattr(module, "layer_idx"):
                setattr(module, HANDED, keywords.get(HANDED))

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(hand_over, with_kwargs=True)


def _check_is_causal(mask: MaskFunction | None, model_type: str) -> None:
    positions = torch.arange(64)
    if mask is not None and evaluate_mask(mask, positions, positions).triu(1).any():
        raise ModelUnsupported(f"This {model_type} model looks at later tokens; SpecSplit serves causal models.")


@torch.inference_mode()
def eager_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Return logits [T, V] of transformers' own eager attention, the truth for ours.

    Raises:
        ModelUnsupported, OutOfMemory: the model's own code fails.
    """
    model.set_attn_implementation("eager")
    try:
        with trying(model):
            tokens = torch.tensor([token_ids], device=model.device)
            logits = model(input_ids=tokens, use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(NAME)
    return logits


def check_against_eager(ours: Tensor, truth: Tensor, model_name: str) -> None:
    """Refuse a model whose logits are not finite, or differ from those of transformers.

    Raises:
        ModelDamaged: NaN or infinite logits.
        ModelUnsupported: our attention gives other logits.
    """
    if not torch.isfinite(truth).all():
        raise ModelDamaged(f"{model_name} computes NaN or infinite logits; its weights are damaged.")
    errors = (ours.float() - truth.float()).abs().amax(-1) / truth.float().abs().max().clamp(min=1)
    if truth.dtype == torch.float32:
        error, tolerance = errors.max(), 1e-3
    else:
        # Rounding sends a token with near-equal experts to another one now and then, so the median token counts.
        error, tolerance = errors.median(), 5e-2
    if not error <= tolerance:
        raise ModelUnsupported(
            f"{model_name} gives other logits with SpecSplit's attention than with transformers' own "
            f"(relative error {error:.1e}); it is not served."
        )
