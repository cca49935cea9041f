"""The products that a model asks for, as its own forward calls them: which ones, on what input, and what gives them.

One run of the model shows its linear layers, so no family is named here. Layers that read the same input in a row can
be computed together: the first call computes all, and the others find their part ready.

Legend: N outputs, K inputs, X experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One product that the model asks for: input [..., K], weight [N, K], or [X, N, K] with the ends of groups."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    offsets: Tensor | None = None

    @property
    def key(self) -> int:
        """The address of the weight, whichever view of it the model passes."""
        return self.weight.data_ptr()

    def goes_with(self, other: LinearCall) -> bool:
        return (
            self.input is other.input
            and self.weight.dtype == other.weight.dtype
            and (self.bias is None) == (other.bias is None)
            and self.offsets is None
            and other.offsets is None
        )


def _as_call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> LinearCall | None:
    """Return the product with a weight that a torch function stands for; None for any other function."""
    if func is F.linear:
        return LinearCall(*args, **kwargs)
    if func is torch.addmm and len(args) == 3 and not kwargs:
        bias, given, weight = args
        return LinearCall(given, weight.t(), bias) if isinstance(weight, nn.Parameter) else None
    if getattr(func, "__name__", "") == "_grouped_mm" and len(args) == 2 and kwargs.get("bias") is None:
        given, weight = args
        return LinearCall(given, weight.transpose(-2, -1), None, kwargs["offs"])
    return None


class WithoutProducts(TorchFunctionMode):
    """Returns zeros in the place of products, within a `with` block: for a forward whose values do not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LinearCall] = []
        """The products that were asked for, in order."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = _as_call(func, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        self.calls.append(call)
        return call.input.new_zeros(*call.input.shape[:-1], call.weight.shape[-2])


def watched(forward: Callable[[], object]) -> list[LinearCall]:
    """Run `forward` once and return the products that it asks for, in order; none of them is computed."""
    watching = WithoutProducts()
    with watching:
        forward()
    return watching.calls


def in_groups(calls: Sequence[LinearCall]) -> list[list[LinearCall]]:
    """Return the calls, one for each weight, those that read the same input in a row as one group.

    A weight that is used more than once stays alone.
    """
    counts = Counter(call.key for call in calls)
    groups: dict[int, list[LinearCall]] = {}
    latest: list[LinearCall] = []
    for call in calls:
        if call.key in groups:
            latest = []
        elif latest and counts[call.key] == counts[latest[-1].key] == 1 and latest[-1].goes_with(call):
            latest.append(call)
        else:
            latest = groups[call.key] = [call]
    return list(groups.values())


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return weights, or biases, one behind the other; one alone is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


class Joined(Protocol):
    """Weights that are computed together."""

    @property
    def members(self) -> Sequence[int]:
        """Return the weights' keys."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Return the outputs of each member."""
        ...


J = TypeVar("J", bound=Joined)


class JoinedCalls(TorchFunctionMode, Generic[J]):
    """Computes products together, within a `with` block; `products` has them by the keys that begin one.

    `compute` returns the outputs of all members, side by side.
    """

    def __init__(self, products: Mapping[int, J], compute: Callable[[J, LinearCall], Tensor]) -> None:
        super().__init__()
        self._products, self._compute = products, compute
        self._ready: dict[int, tuple[Tensor, Tensor]] = {}
        """Maps a weight to the input that it was multiplied with, and the result."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = _as_call(func, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        # A result that was computed ahead serves only the very input it was computed for.
        known_input, ready = self._ready.pop(call.key, (None, None))
        if ready is not None and known_input is call.input:
            return ready
        joined = self._products.get(call.key)
        if joined is None:
            return func(*args, **(kwargs or {}))
        result = self._compute(joined, call)
        if len(joined.members) == 1:
            return result
        for member, part in zip(joined.members, result.split(list(joined.sizes), dim=-1), strict=True):
            self._ready[member] = call.input, part
        return self._ready.pop(call.key)[1]
