"""Linear layers in packed layouts: a few rows cost what one costs, and a row has the same bits among many.

The layout is oneDNN's, FBGEMM's for weights that fp16 holds exactly (half_weights.py), or our own for bf16 where the
processor multiplies pairs (pair_products.py). OneDNN's products have at most `width`
inputs; longer ones are cut along the inputs and added in order, since beyond some width oneDNN's order of sums follows
the number of rows (docs/adr/0015). Weights that are rounded have layouts and orders of their own (rounded_weights.py).
The model's own copy of a weight goes as soon as its pack is there.

Legend: N outputs, K inputs, R rows, X experts.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specsplit.core.errors import DeviceUnavailable
from specsplit.model.backends.byte_products import takes_codes
from specsplit.model.backends.half_weights import half_product
from specsplit.model.backends.pair_products import pair_product, takes_pairs
from specsplit.model.backends.product import Product
from specsplit.model.backends.rounded_weights import Rounding, rounded_product, split_by_format
from specsplit.model.linear_calls import JoinedCalls, LinearCall, in_groups, joined, watched
from specsplit.model.mapped_file import MappedFiles, addresses
from specsplit.model.memory import is_exhausted, return_freed
from specsplit.model.threads import side_by_side
from specsplit.model.weight_format import BITS, WeightFormat, kernel_bytes, rounded_bytes

_HINT = 8
"""Rows for which a layout is chosen; with a hint of one row its bits differ from those of more."""
_ALIGNMENT = 16
_MUCH = 256 << 20
"""Bytes of weights after whose end the C library is asked for what it keeps of them."""
# TorchScript cannot spell the empty Scalar?[] of this operator, its IR can; a recording then holds the call.
_IR = """
graph(%input : Tensor, %weight : Tensor, %bias : Tensor?):
  %attr : str = prim::Constant[value="none"]()
  %algorithm : str = prim::Constant[value=""]()
  %scalars : Scalar?[] = prim::ListConstruct()
  %output : Tensor = mkldnn::_linear_pointwise(%input, %weight, %bias, %attr, %scalars, %algorithm)
  return (%output)
"""
_ir: Any = torch._C  # pyright: ignore[reportPrivateUsage]
packed_product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _ir._create_function_from_graph(
    "packed_product", _ir.parse_ir(_IR)
)
"""Returns [..., N] for an input [..., K], a pack and a bias [N]."""


def pack(weight: Tensor) -> Tensor:
    """Return a weight [N, K] in oneDNN's layout.

    Raises:
        RuntimeError: this machine or torch has none for the dtype.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _HINT)


def part_width(num_inputs: int, width: int) -> int:
    """Return the inputs of each part of a product, as equal as they can be and a multiple of the vectors' length."""
    parts = -(-num_inputs // width)
    return -(-num_inputs // (parts * _ALIGNMENT)) * _ALIGNMENT if parts > 1 else num_inputs


def _product(x: Tensor, packs: list[Tensor], width: int, bias: Tensor | None) -> Tensor:
    """Return the product as the sum of its parts, in order and in fp32.

    More than 16 rows are filled up to one of eight numbers between two powers of two. OneDNN makes code for each number
    of rows, and code that came and went between the tensors of forwards left the heap in pieces (docs/log.md).
    """
    num_rows, unit = x.size(-2), 1
    while num_rows > 16 * unit:
        unit *= 2
    fill = (unit - num_rows % unit) % unit
    if fill > 0:
        return _sum_of_parts(F.pad(x, [0, 0, 0, fill]), packs, width, bias).narrow(-2, 0, num_rows)
    return _sum_of_parts(x, packs, width, bias)


def _sum_of_parts(x: Tensor, packs: list[Tensor], width: int, bias: Tensor | None) -> Tensor:
    """Return the product as the sum of its parts, in order and in fp32."""
    if len(packs) == 1:
        return packed_product(x, packs[0], bias)
    parts = x.split(width, dim=-1)
    total = packed_product(parts[0].contiguous(), packs[0], None).float()
    for index in range(1, len(packs)):
        total += packed_product(parts[index].contiguous(), packs[index], None)
    if bias is not None:
        total += bias
    return total.to(x.dtype)


def _own_sum(x: Tensor, products: Sequence[Product], width: int) -> Tensor:
    """Return the sum of the products with the parts of the inputs, in order."""
    if len(products) == 1:
        return products[0](x)
    parts = x.split(width, dim=-1)
    total = products[0](parts[0])
    for part, of_part in zip(parts[1:], products[1:], strict=True):
        total += of_part(part)
    return total


def _grouped_product(x: Tensor, packs: list[Tensor], width: int, offsets: Tensor) -> Tensor:
    """Return the product of rows that are sorted by expert; `offsets` [X] are the ends of each expert's rows.

    An expert's rows are filled up to a multiple of four, as for any product of few outputs.
    """
    ends: list[int] = offsets.to(torch.int64).tolist()
    num_parts = len(packs) // len(ends)
    outputs: list[Tensor] = []
    start = 0
    for expert, end in enumerate(ends):
        if end > start:
            rows = F.pad(x.narrow(0, start, end - start), [0, 0, 0, (4 - (end - start) % 4) % 4])
            own = packs[expert * num_parts : (expert + 1) * num_parts]
            outputs.append(product(rows, own, width, None).narrow(0, 0, end - start))
        start = end
    return torch.cat(outputs, dim=0)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, not gone: docs/adr/0002
    product: Callable[[Tensor, list[Tensor], int, Tensor | None], Tensor] = torch.jit.script(_product)
    grouped_product: Callable[[Tensor, list[Tensor], int, Tensor], Tensor] = torch.jit.script(_grouped_product)


class ProductKind(NamedTuple):
    """All that the order of a product's sums follows from, on one machine."""

    num_outputs: int
    num_inputs: int
    weight_bits: int


@dataclass(frozen=True, slots=True)
class _Packed:
    """One product as it is computed: the weights of one call, or of several that read the same input."""

    members: Sequence[int]
    """The weights' keys."""
    sizes: Sequence[int]
    """Outputs of each member."""
    bias: Tensor | None
    width: int
    packs: slice
    """Its packs among all; none if it has products of its own."""
    own: Sequence[Product] = ()
    """The products with each part of the inputs if the weights are held in fewer bits; the first one adds the bias."""


@dataclass(frozen=True, slots=True)
class _Made:
    """The result of packing one group of weights, before it has its place among all."""

    packed: _Packed
    packs: Sequence[Tensor]
    products: Sequence[tuple[ProductKind, Product]]
    num_bytes: int = 0
    """Bytes of the weights if they were rounded."""


class PackedLinears:
    """The packed weights of one model.

    Its products are found by running `forward` once; those parameters of `model` that it multiplies with are packed,
    and the model's own copies go. A weight that is looked up in as well (a tied embedding) stays. `rounding` says which
    weights are rounded first, and to what.

    Raises:
        RuntimeError: this machine or torch cannot pack weights of the dtype, and the model is as it was; or the memory
            ran out, and it is of no use any more (`is_exhausted` says which).
        DeviceUnavailable: only some of the weights could be packed.
    """

    def __init__(
        self, forward: Callable[[], object], model: nn.Module, width: int, rounding: Rounding | None = None
    ) -> None:
        owners = {parameter.data_ptr(): parameter for parameter in model.parameters() if parameter.numel() > 0}
        looked_up = {module.weight.data_ptr() for module in model.modules() if isinstance(module, nn.Embedding)}
        self.packs: list[Tensor] = []
        """A recording takes them as arguments: it can hold no tensor of this layout."""
        self.by_kind: dict[ProductKind, Product] = {}
        """One product of each kind, cut as it is."""
        self.bytes_by_format: Counter[WeightFormat] = Counter()
        """Bytes of the weights that were rounded."""
        self.saved_bytes = 0
        """Bytes that rounded weights take less than the model's own; a copy that stays beside one counts against it."""
        self._width = width
        self._products: dict[int, _Packed] = {}
        files = MappedFiles()
        # A part of a weight is left alone: other parts may be used elsewhere.
        calls = [call for call in watched(forward) if call.weight.numel() == _size(owners.get(call.key))]
        for dtype in {call.weight.dtype for call in calls}:
            pack(torch.zeros(_ALIGNMENT, _ALIGNMENT, dtype=dtype))  # what cannot be packed shows before a copy goes
        work = list(split_by_format(in_groups(calls), rounding))
        members = [[owners[call.key] for call in group] for _, group in work]
        mode = torch.is_inference_mode_enabled()

        def make(index: int) -> _Made:
            form, group = work[index]
            with torch.inference_mode(mode):
                return self._packed(group) if form is None else _rounded(group, form)

        # The largest first: if the head came last, all other threads would wait for the one that packs it.
        order = sorted(range(len(work)), key=lambda index: sum(map(_size, members[index])), reverse=True)
        made: dict[int, _Made] = {}
        num_bytes = 0
        try:
            for place, one in side_by_side(make, order):
                index = order[place]
                made[index] = one
                files.let_pages_go([addresses(member) for member in members[index]])
                num_bytes += self._let_go(members[index], looked_up, is_rounded=work[index][0] is not None)
                if num_bytes >= _MUCH:
                    return_freed()  # packs are made by other threads, whose memory the C library keeps apart
                    num_bytes = 0
        except RuntimeError as error:
            if not made or is_exhausted(error):
                raise
            # The model's own copies of the first ones are gone, so it cannot be computed without packs either.
            raise DeviceUnavailable(
                "This machine packs some of the model's weights only; try another dtype."
            ) from error
        # Packs are in the model's order, whichever was ready first: a recording takes them as arguments.
        for index, of_group in enumerate(members):
            # Where a weight lies names it in the forwards to come; the new place of one that is gone is its own, too.
            self._add(made[index], [member.data_ptr() for member in of_group], work[index][0])

    def _let_go(self, members: Sequence[Tensor], looked_up: Collection[int], *, is_rounded: bool) -> int:
        """Free the model's own copies of weights that are packed, but for those that it looks up; return the bytes."""
        own = [member for member in members if member.data_ptr() not in looked_up]
        num_bytes = sum(member.numel() * member.element_size() for member in own)
        for member in own:
            _let_go(member)
        self.saved_bytes += num_bytes if is_rounded else 0
        return num_bytes

    def _add(self, made: _Made, keys: Sequence[int], form: WeightFormat | None) -> None:
        """Take in the packed weights of one group, rounded to the format if there is one."""
        if form is not None:
            self.bytes_by_format[form] += made.num_bytes
            self.saved_bytes -= made.num_bytes
        packed = replace(made.packed, members=keys, packs=slice(len(self.packs), len(self.packs) + len(made.packs)))
        self.packs += made.packs
        for kind, of_kind in made.products:
            self.by_kind.setdefault(kind, of_kind)
        self._products.update(dict.fromkeys(keys, packed))

    def serving(self, packs: Sequence[Tensor]) -> TorchFunctionMode:
        """Return a mode that computes with these packs, which are `self.packs` or stand for them in a recording."""

        def compute(packed: _Packed, call: LinearCall) -> Tensor:
            if packed.own:
                return _own_sum(call.input, packed.own, packed.width)
            own = list(packs[packed.packs])
            if call.offsets is not None:
                return grouped_product(call.input, own, packed.width, call.offsets)
            return product(call.input, own, packed.width, packed.bias)

        return JoinedCalls(self._products, compute)

    def _packed(self, group: Sequence[LinearCall]) -> _Made:
        first = group[0]
        if first.offsets is None and takes_pairs(first.weight):
            return _by_pairs(group)
        width = part_width(first.weight.shape[-1], self._width)
        weights = first.weight.unbind() if first.offsets is not None else [joined([call.weight for call in group])]
        bias = _joined_bias(group)
        parts = [part for weight in weights for part in weight.split(width, dim=1)]
        halves = _halves(parts, bias) if first.offsets is None else ()
        packs = [] if halves else list(map(pack, parts))
        weight_bits = 16 if halves else first.weight.dtype.itemsize * 8
        kinds = [ProductKind(part.shape[0], part.shape[1], weight_bits) for part in parts]
        products = list(zip(kinds, halves or map(product_with, packs), strict=True))
        return _Made(_Packed((), _sizes(group), bias, width, slice(0), halves), packs, products)


def _by_pairs(group: Sequence[LinearCall]) -> _Made:
    weight = joined([call.weight for call in group])
    of_all = pair_product(weight, _joined_bias(group))
    kind = ProductKind(weight.shape[0], weight.shape[1], weight.itemsize * 8)
    return _Made(_Packed((), _sizes(group), None, weight.shape[1], slice(0), (of_all,)), (), [(kind, of_all)])


def _rounded(group: Sequence[LinearCall], form: WeightFormat) -> _Made:
    weight = joined([call.weight for call in group])
    of_all = rounded_product(form, weight, _joined_bias(group))
    kind = ProductKind(weight.shape[0], weight.shape[1], BITS[form])
    packed = _Packed((), _sizes(group), None, weight.shape[1], slice(0), (of_all,))
    num_bytes = (kernel_bytes if takes_codes() else rounded_bytes)(form, *weight.shape)
    return _Made(packed, (), [(kind, of_all)], num_bytes)


def _halves(parts: Sequence[Tensor], bias: Tensor | None) -> Sequence[Product]:
    """Return the products with the parts of one weight held in 16 bits; none unless all of them can be."""
    products: list[Product] = []
    for part in parts:
        of_part = half_product(part, None if products else bias)
        if of_part is None:
            return ()
        products.append(of_part)
    return products


def product_with(weight: Tensor) -> Product:
    """Return the product with a pack."""
    return lambda x: packed_product(x, weight, None)


def _sizes(group: Sequence[LinearCall]) -> Sequence[int]:
    return [call.weight.shape[-2] for call in group]


def _joined_bias(group: Sequence[LinearCall]) -> Tensor | None:
    biases = [call.bias for call in group if call.bias is not None]
    return joined(biases) if biases else None


def _size(parameter: Tensor | None) -> int:
    return parameter.numel() if parameter is not None else 0


def _let_go(weight: Tensor) -> None:
    """Free a weight's memory; it keeps its shape, and an address of its own."""
    with torch.inference_mode(False), torch.no_grad():
        weight.data = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
