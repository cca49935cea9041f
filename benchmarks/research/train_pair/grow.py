"""Steps from a trained pair to another shape: a larger target that computes the same, a draft with a narrower MLP.

What a growth adds is silent at first and learns at once: outputs are zero, inputs are random. Knows no files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from benchmarks.research.train_pair.model import Shape, new_model
from specsplit.core.errors import InvalidSettings

RIDGE = 1e-4
"""Added to the diagonal of the units' second moments, as a fraction of its mean."""


def grown(trained: LlamaForCausalLM, shape: Shape, seed: int) -> LlamaForCausalLM:
    """Return a model of a larger shape with the same logits, up to rounding (Net2Net, Chen et al. 2016).

    The residual stream is padded with zeros. Its mean square falls by the ratio of the widths, which the weights of
    the norms and their epsilon make up for.

    Raises:
        InvalidSettings: the shape is smaller somewhere, or its heads cannot be grouped as the old ones are.
    """
    before = Shape.of(trained.config)
    _require_larger(before, shape)
    ratio = before.hidden / shape.hidden
    model = new_model(shape, trained.config.vocab_size, seed, trained.config.rms_norm_eps * ratio)
    rows = _rows_of_old_heads(before, shape)
    places = [number * shape.num_layers // before.num_layers for number in range(before.num_layers)]
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, : before.hidden] = trained.model.embed_tokens.weight
        _fill_norm(model.model.norm.weight, trained.model.norm.weight, math.sqrt(ratio))
        for place, layer in zip(places, trained.model.layers, strict=True):
            _fill_layer(model.model.layers[place], layer, rows, math.sqrt(ratio))
    return model


def _require_larger(before: Shape, after: Shape) -> None:
    sizes = ("num_layers", "hidden", "mlp", "num_heads", "num_kv_heads")
    smaller = [name for name in sizes if getattr(after, name) < getattr(before, name)]
    if smaller:
        raise InvalidSettings(f"A model grows only: {', '.join(smaller)} would be less than in {before}.")
    if after.head_dim != before.head_dim or after.group < before.group:
        raise InvalidSettings(
            f"Heads stay {before.head_dim} wide, at least {before.group} of them to a pair of keys and values; "
            f"{after} has {after.head_dim} and {after.group}."
        )


def _rows_of_old_heads(before: Shape, after: Shape) -> Tensor:
    """Return the rows of the new query projection where the old heads go, beside the keys that they belong to."""
    heads = [head // before.group * after.group + head % before.group for head in range(before.num_heads)]
    return torch.cat([torch.arange(head * before.head_dim, (head + 1) * before.head_dim) for head in heads])


def _fill_norm(new: Tensor, old: Tensor, scale: float) -> None:
    new.fill_(scale)
    new[: len(old)] = old * scale


def _fill_layer(new: nn.Module, old: nn.Module, rows: Tensor, scale: float) -> None:
    _fill_norm(new.input_layernorm.weight, old.input_layernorm.weight, scale)
    _fill_norm(new.post_attention_layernorm.weight, old.post_attention_layernorm.weight, scale)
    attention, mlp = old.self_attn, old.mlp
    width = attention.q_proj.in_features
    new.self_attn.q_proj.weight[rows, :width] = attention.q_proj.weight
    new.self_attn.o_proj.weight[:width, rows] = attention.o_proj.weight
    for name in ("k_proj", "v_proj"):
        weight = getattr(attention, name).weight
        getattr(new.self_attn, name).weight[: len(weight), :width] = weight
    units = mlp.gate_proj.out_features
    for name in ("gate_proj", "up_proj"):
        getattr(new.mlp, name).weight[:units, :width] = getattr(mlp, name).weight
    new.mlp.down_proj.weight[:width, :units] = mlp.down_proj.weight


def narrowed(trained: LlamaForCausalLM, mlp: int, token_ids: Tensor) -> LlamaForCausalLM:
    """Return the model with `mlp` units in each MLP: those that the others replace worst on token_ids [B, T].

    Raises:
        InvalidSettings: that is more than there are.
    """
    before = Shape.of(trained.config)
    if mlp > before.mlp:
        raise InvalidSettings(f"The draft's MLP has {before.mlp} units; it can become narrower, not {mlp} wide.")
    moments = _unit_moments(trained, token_ids)
    model = new_model(before.with_mlp(mlp), trained.config.vocab_size, 0, trained.config.rms_norm_eps)
    values = trained.state_dict()
    for number, (layer, moment) in enumerate(zip(trained.model.layers, moments, strict=True)):
        kept, down = narrowed_output(layer.mlp.down_proj.weight.detach(), moment, mlp)
        name = f"model.layers.{number}.mlp"
        values[f"{name}.down_proj.weight"] = down
        for part in ("gate_proj", "up_proj"):
            values[f"{name}.{part}.weight"] = values[f"{name}.{part}.weight"][kept]
    model.load_state_dict(values)
    return model


def _unit_moments(model: LlamaForCausalLM, token_ids: Tensor) -> Sequence[Tensor]:
    """Return for each layer the second moments [mlp, mlp] of its MLP's units."""
    moments = [torch.zeros(layer.mlp.down_proj.in_features, layer.mlp.down_proj.in_features, dtype=torch.float64)
               for layer in model.model.layers]  # fmt: skip

    def watch(moment: Tensor) -> nn.Module:
        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            units = inputs[0].flatten(0, -2)
            moment.add_(units.t() @ units)

        return add

    hooks = [
        layer.mlp.down_proj.register_forward_pre_hook(watch(moment))
        for layer, moment in zip(model.model.layers, moments, strict=True)
    ]
    with torch.no_grad():
        for row in token_ids:
            model.model(row[None])
    for hook in hooks:
        hook.remove()
    return moments


def narrowed_output(weight: Tensor, moment: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return which `count` units stay, ascending, and the output weights [W, count] that make up best for the others.

    One unit after the other goes, the one whose going costs least in mean square once all others have been refitted
    (optimal brain surgeon, Hassibi and Stork 1993). weight [W, units], moment [units, units].
    """
    weight = weight.double()
    inverse = torch.linalg.inv(moment + RIDGE * moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype))
    is_kept = torch.ones(len(moment), dtype=torch.bool)
    for _ in range(len(moment) - count):
        cost = weight.square().sum(0) / inverse.diagonal()
        unit = int(cost.masked_fill(~is_kept, torch.inf).argmin())
        row, column = inverse[unit] / inverse[unit, unit], inverse[:, unit].clone()
        weight = torch.addr(weight, weight[:, unit], row, alpha=-1)
        inverse.addr_(column, row, alpha=-1)
        is_kept[unit] = False
        inverse[unit, unit] = 1.0  # already gone: the row and column are zero, and only the division needs a number
    kept = is_kept.nonzero().flatten()
    return kept, weight[:, kept].float()
