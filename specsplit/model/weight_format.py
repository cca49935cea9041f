"""The formats of fewer bits that weights are rounded to: which, in how many bytes, and how a model so rounded is named.

Knows no torch: a plan of stages counts with it.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

import hashlib
from typing import Literal

WeightFormat = Literal["int8", "int4"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("int8", "int4")
BITS: dict[WeightFormat, int] = {"int8": 8, "int4": 4}
FEWEST_OUTPUTS = 16
"""A weight of fewer outputs keeps its format: it takes next to nothing, and decides much (a gate of an expert)."""
INT8_BLOCK = 512
"""Inputs of a weight in int8 are filled up to a multiple of it by FBGEMM's layout, and by no kernel of our own."""
INT8_ROW_BYTES = 12
"""Bytes of an output's scale, zero point and sum of weights."""
_KERNEL_OUTPUTS = 32
"""Outputs are filled up to a multiple of it by the kernels of our own."""
_SCALE_BYTES = 4
_GROUPS = (64, 32)
"""Inputs that share a scale in int4, the first number that divides them."""
_INT4_ALIGNMENT = 16
_GROUP_BYTES = 4
"""Bytes of a group's scale and offset."""
_HASH_DIGITS = 16
_VERSIONS = {"int8": 1, "int4": 1}
"""Changes with the numbers that weights are rounded to."""


def weight_format(dtype: str | None) -> WeightFormat | None:
    """Return the format that a setting asks weights to be rounded to; None if it names one that is computed in."""
    return dtype if dtype in WEIGHT_FORMATS else None


def group_size(num_outputs: int, num_inputs: int) -> int | None:
    """Return the inputs that share a scale of a weight [N, K] in int4; None if its shape has no int4."""
    if num_outputs % _INT4_ALIGNMENT:
        return None
    return next((size for size in _GROUPS if num_inputs % size == 0), None)


def kernel_bytes(form: WeightFormat, num_outputs: int, num_inputs: int) -> int:
    """Return the bytes that a weight [N, K] takes in a format in the layout of the kernels of our own for a CPU."""
    outputs = -(-num_outputs // _KERNEL_OUTPUTS) * _KERNEL_OUTPUTS
    group = group_size(num_outputs, num_inputs) if form == "int4" else None
    if group is not None:
        return outputs * (num_inputs // 2 + num_inputs // group * _GROUP_BYTES)
    return outputs * num_inputs + num_outputs * _SCALE_BYTES


def rounded_bytes(form: WeightFormat, num_outputs: int, num_inputs: int) -> int:
    """Return the bytes that a weight [N, K] takes in a format in torch's layout, mostly more than in another.

    A weight whose shape has no int4 is rounded to int8.
    """
    group = group_size(num_outputs, num_inputs) if form == "int4" else None
    if group is not None:
        return num_outputs * (num_inputs // 2 + num_inputs // group * _GROUP_BYTES)
    return num_outputs * (-(-num_inputs // INT8_BLOCK) * INT8_BLOCK + INT8_ROW_BYTES)


def rounded_hash(weights_hash: str, form: WeightFormat | None) -> str:
    """Return the hash of a model's weights once they are rounded: it is another model."""
    if form is None or not weights_hash:
        return weights_hash
    return hashlib.sha256(f"{weights_hash} {form} {_VERSIONS[form]}".encode()).hexdigest()[:_HASH_DIGITS]
