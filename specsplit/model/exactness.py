"""Whether a row of a model has the same bits in any company: packed products, and the proof on the model itself.

With it plain decoding, any tree, batch, prefill and cut into stages give the same logits bit for bit, and so the same
text in every dtype (docs/adr/0015). It depends on processor, torch and shapes, so it is proved at load; the outcome is
kept in the user's cache. Where it does not hold, a worker serves all the same and says "near ties".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specsplit.core.exactness import Exactness
from specsplit.model import processor
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends.packed_linear import ProductKind, pack, product_with
from specsplit.model.backends.product import Product
from specsplit.model.kernels.library import kernel_digest
from specsplit.model.kv_cache import KVCache
from specsplit.model.proofs import Proofs, digest

_WIDTHS = (1024, 512, 256)
"""Inputs of a product, the widest first."""
_NO_CUT = 1 << 30
_COUNTS = (2, 3, 5, 8, 9, 16, 17, 33, 64, 100, 129, 256, 512)
_MOST_PRODUCTS = 1 << 34
"""Multiplications of one proof of a product; the largest (a head) is tried with fewer rows."""
_PROOF_ROWS, _FEW_PROOF_ROWS = 524, 140
_FEW_PARAMETERS = 100_000_000
_LAST = 24
"""Rows at the end of the proof's text that are compared one by one."""
_FEW_SINGLE_ROWS = 8
"""Rows that a large model computes alone, each of which has many elements; a small one computes all of the last."""
_CHUNKS = (1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 100)
_LIMITS = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "FBGEMM_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY"),
)
"""Variables that choose the libraries' kernels; oneDNN still reads its old names, too."""
_FILE, _WIDTHS_FILE = "proofs.json", "widths.json"
_VERSION = 6
"""Changes with the layout of forwards: the rows attended to, the parts of products, activations."""


class Provable(Protocol):
    """A runner, as the proof needs it."""

    cache: KVCache
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    context: int
    exactness: Exactness
    exactness_reason: str
    numerics: str

    @property
    def products(self) -> Mapping[ProductKind, Product]:
        """One product of each kind; empty if no weight is packed."""
        ...

    @property
    def outline(self) -> str:
        """All that the order of its sums follows from, but for the machine: shapes, layers, how it is computed."""
        ...

    def proof_rows(self, sequences: Sequence[SequenceInput]) -> Tensor:
        """Return all rows that a forward of these sequences gives for the logits wanted."""
        ...


def product_width(dtype: torch.dtype) -> int:
    """Return the inputs up to which a packed product's rows do not depend on their number here; no cut if none.

    It is found once for each machine and dtype.

    Raises:
        RuntimeError: this machine or torch has no packed products for the dtype.
    """
    pack(torch.zeros(_WIDTHS[-1], _WIDTHS[-1], dtype=dtype))
    widths, key = Proofs(_WIDTHS_FILE), fingerprint(dtype)
    known = widths.get(key)
    if known is not None and known.isdigit():
        return int(known)
    width = _found_width(dtype)
    widths.put(key, str(width))
    return width


def _found_width(dtype: torch.dtype) -> int:
    generator = torch.Generator().manual_seed(0)
    for width in _WIDTHS:
        weight = torch.randn(768, width, generator=generator).to(dtype)
        if _has_invariant_rows(product_with(pack(weight)), ProductKind(768, width, weight.itemsize * 8), dtype):
            return width
    return _NO_CUT


@torch.inference_mode()
def settle(runner: Provable, weights_hash: str) -> None:
    """Prove that the runner's rows have the same bits in any company, and note on it what was found and why.

    Whether two orders of a sum differ in their last bit depends on the numbers, so the outcome is for these weights.
    """
    if runner.device.type != "cpu":
        runner.exactness_reason = "on a GPU the order of sums follows the number of rows"
        return
    if not runner.products and runner.cache.keys:
        runner.exactness_reason = f"this machine has no packed products for {str(runner.dtype).removeprefix('torch.')}"
        return
    runner.numerics = fingerprint(runner.dtype)
    key = digest(runner.numerics, runner.outline, weights_hash, _extent(runner))
    proofs = Proofs(_FILE)
    reason = proofs.get(key)
    if reason is None:
        reason = _objection(runner)
        proofs.put(key, reason)
    runner.exactness, runner.exactness_reason = ("near ties", reason) if reason else ("bits", "")


def fingerprint(dtype: torch.dtype) -> str:
    """Return 16 hex digits: machines of the same compute the same bits from the same weights."""
    limits = [os.environ.get(name, "") for name in _LIMITS]
    return digest(processor.description(), kernel_digest(), limits, torch.__version__, dtype, _WIDTHS, _VERSION)


def _objection(runner: Provable) -> str:
    """Return why a row of this model has other bits in other company; "" if it has the same."""
    for kind, product in runner.products.items():
        if not _has_invariant_rows(product, kind, runner.dtype):
            return f"products of {kind.num_outputs} x {kind.num_inputs} differ with the number of rows on this machine"
    for name, holds in _trials(runner):
        if not holds:
            return f"a row differs {name} on this machine"
    return ""


def _has_invariant_rows(product: Product, kind: ProductKind, dtype: torch.dtype) -> bool:
    most = max(_COUNTS[3], min(_COUNTS[-1], _MOST_PRODUCTS // (kind.num_outputs * kind.num_inputs)))
    rows = torch.randn(most, kind.num_inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    places = sorted({0, 1, 2, 6, most // 3, most - 1})
    alone = {place: product(rows[place : place + 1]) for place in places}
    for count in _COUNTS:
        if count <= most:
            among = product(rows[:count])
            if any(not torch.equal(among[place], row[0]) for place, row in alone.items() if place < count):
                return False
    return True


class _Extent(NamedTuple):
    """How far the trials go; few or short slots allow less."""

    num_rows: int
    """Tokens of the text."""
    num_single: int
    """Tokens at its end that are computed alone."""
    depth: int
    """Tokens at its end that are computed in a tree."""
    has_others: bool
    """Whether another session stands beside."""


def _extent(runner: Provable) -> _Extent:
    is_small = (
        sum(kind.num_outputs * kind.num_inputs for kind in runner.products) * len(runner.cache.keys) < _FEW_PARAMETERS
    )
    num_rows = min(_PROOF_ROWS if is_small else _FEW_PROOF_ROWS, runner.context)
    num_single = min(_LAST if is_small else _FEW_SINGLE_ROWS, num_rows - 1)
    depth = min(8, num_rows - 1, (runner.cache.capacity - num_rows) // 2)
    return _Extent(num_rows, num_single, depth, has_others=runner.cache.num_slots > 1)


def _trials(runner: Provable) -> Iterator[tuple[str, bool]]:
    """Yield circumstances in which a row could differ, and whether it is the same there bit for bit."""
    num_rows, num_single, depth, has_others = _extent(runner)
    last = min(_LAST, num_rows)
    token_ids = torch.randint(runner.vocab_size, (num_rows,), generator=torch.Generator().manual_seed(2)).tolist()
    rows = runner.proof_rows([SequenceInput(0, 0, token_ids, num_logits=last)])
    memory = _memory(runner, num_rows)

    cut = _in_chunks(runner, token_ids, last)
    yield "in a prefill of another width", torch.equal(cut, rows) and _same(_memory(runner, num_rows), memory)

    places = range(num_rows - num_single, num_rows)
    alone = [runner.proof_rows([SequenceInput(0, place, [token_ids[place]])]) for place in places]
    yield "alone", not alone or torch.equal(torch.cat(alone), rows[last - num_single :])

    base, wanted = num_rows - depth, rows[last - depth :]
    # Node 2 i is a wrong token, 2 i + 1 the true one; both hang below the true token before.
    nodes = [token for true in token_ids[base:] for token in ((true + 1) % runner.vocab_size, true)]
    parents = [parent for row in range(depth) for parent in (2 * row - 1, 2 * row - 1)]
    if nodes:
        tree = runner.proof_rows([SequenceInput(0, base, nodes, parents, num_logits=len(nodes))])
        places = [base + 2 * row + 1 for row in range(depth)]
        stored = [tensor[0, :, places] for tensor in (*runner.cache.keys, *runner.cache.values)]
        yield "in a tree", torch.equal(tree[1::2], wanted) and _same(stored, [row[:, base:] for row in memory])

    if has_others and depth:
        other = SequenceInput(1, 0, token_ids[: min(9, num_rows)])
        both = runner.proof_rows([other, SequenceInput(0, base, token_ids[base:], num_logits=depth)])
        yield "beside other sessions", torch.equal(both[1:], wanted)
        for row in range(max(0, depth - 2), depth):  # of two in a row, one at least shares its call
            like = [SequenceInput(slot, base + row, [token_ids[base + row]]) for slot in (0, 1)]
            yield "beside sessions of like length", torch.equal(runner.proof_rows(like)[:1], wanted[row : row + 1])


def _in_chunks(runner: Provable, token_ids: Sequence[int], last: int) -> Tensor:
    """Return the last rows of a text that comes in chunks of many widths."""
    rows: list[Tensor] = []
    start = turn = 0
    while start < len(token_ids):
        stop = min(start + _CHUNKS[turn % len(_CHUNKS)], len(token_ids))
        chunk = runner.proof_rows([SequenceInput(0, start, token_ids[start:stop], num_logits=stop - start)])
        rows.append(chunk[max(0, len(token_ids) - last - start) :])
        start, turn = stop, turn + 1
    return torch.cat(rows)


def _memory(runner: Provable, num_rows: int) -> list[Tensor]:
    """Return copies of the first slot's keys and values [heads, num_rows, D], layer by layer."""
    return [tensor[0, :, :num_rows].clone() for tensor in (*runner.cache.keys, *runner.cache.values)]


def _same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, ones, others))
