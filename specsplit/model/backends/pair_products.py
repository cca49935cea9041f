"""Products in bf16 by a kernel of our own, on processors that multiply pairs of such numbers.

For a few rows it reads weights as fast as memory gives them, a fifth to a third faster than oneDNN, and for many rows
it takes as long. A row has the same bits among any number of rows, so no product is cut and no row filled up.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specsplit.model.backends.product import Product, bound, scripted
from specsplit.model.kernels.library import has_pair_products


def _pair_product(x: Tensor, packed: Tensor, bias: Tensor, num_outputs: int) -> Tensor:
    return torch.ops.specsplit.product(x.contiguous(), packed, bias, num_outputs)


_script = scripted(_pair_product)


def takes_pairs(weight: Tensor) -> bool:
    """Return whether there is a kernel for products with a weight [N, K] here."""
    return weight.dtype == torch.bfloat16 and weight.shape[-1] % 2 == 0 and has_pair_products()


def pair_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return the product with a weight [N, K] that `takes_pairs` takes.

    A recording holds it as a whole, the packed weight included.
    """
    packed = torch.ops.specsplit.pack_pairs(weight.contiguous())
    return bound(_script, packed, weight.new_empty(0) if bias is None else bias.contiguous(), len(weight))
