"""Which weights of a model are rounded to fewer bits, to how many each, and the products with them.

The embedding is looked up and never multiplied, norms and biases are small, and a router decides by small differences:
they stay. So do experts that one call multiplies by group. With int4 the head, whose rounding shows in every logit, is
rounded to int8, and so are weights whose shape has no int4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from specsplit.core.errors import DeviceUnavailable
from specsplit.model.backends.int4_weights import has_int4_products, int4_product
from specsplit.model.backends.int8_weights import MOST_INPUTS, has_int8_products, int8_product
from specsplit.model.backends.product import Product
from specsplit.model.linear_calls import LinearCall
from specsplit.model.transformers_models import PreTrainedModel
from specsplit.model.weight_format import FEWEST_OUTPUTS, WeightFormat, group_size

_ROUTERS = {"gate", "router"}
"""Names of the modules that choose experts, in all families."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def require_rounded_products(form: WeightFormat, device: torch.device) -> None:
    """Refuse a device that has no products with weights of a format.

    Raises:
        DeviceUnavailable.
    """
    if device.type != "cpu":
        from specsplit.model.backends.device_products import require_device_products  # a GPU's, of no use elsewhere

        require_device_products(form, device)
    elif not has_int8_products() or (form == "int4" and not has_int4_products()):
        raise DeviceUnavailable(f"This processor has no products with {form} weights; use --dtype bf16 or fp32.")


class Rounding:
    """Chooses the format that each weight of a model is rounded to."""

    def __init__(self, form: WeightFormat, model: PreTrainedModel) -> None:
        self._form: WeightFormat = form
        config: Any = model.config.get_text_config()
        counts = {getattr(config, name, None) for name in _EXPERT_COUNTS}
        self._kept = {
            parameter.data_ptr()
            for name, parameter in model.named_parameters()
            if parameter.dim() == 2 and parameter.shape[0] in counts and not _ROUTERS.isdisjoint(name.split("."))
        }
        head: Any = model.get_output_embeddings()
        self._head = head.weight.data_ptr() if isinstance(head, torch.nn.Linear) else None

    def format_of(self, call: LinearCall) -> WeightFormat | None:
        """Return the format for the weight of a call, None if it stays as it is."""
        num_outputs, num_inputs = call.weight.shape[-2:]
        if call.offsets is not None or call.key in self._kept:
            return None
        if num_outputs < FEWEST_OUTPUTS or num_inputs > MOST_INPUTS:
            return None
        has_form = self._form == "int8" or (call.key != self._head and group_size(num_outputs, num_inputs) is not None)
        return self._form if has_form else "int8"


def rounded_product(form: WeightFormat, weight: Tensor, bias: Tensor | None) -> Product:
    """Return the product with a weight [N, K], which is rounded to the format."""
    return (int8_product if form == "int8" else int4_product)(weight, bias)


def split_by_format(
    groups: Sequence[Sequence[LinearCall]], rounding: Rounding | None
) -> Iterator[tuple[WeightFormat | None, Sequence[LinearCall]]]:
    """Split groups whose weights have several formats; yield each part and the format that it is rounded to."""
    for group in groups:
        if rounding is None:
            yield None, group
            continue
        parts: Iterator[tuple[WeightFormat | None, Iterator[LinearCall]]] = groupby(group, rounding.format_of)
        for form, part in parts:
            yield form, list(part)
