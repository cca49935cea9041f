"""An activation gives an element the same bits wherever it stands, however many rows and threads there are."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specsplit.model.activations import WholeVectors

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "method": Tensor.sigmoid,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "mish": F.mish,
}
WIDTHS = (8, 100, 1024, 2600)


@pytest.fixture(params=(1, 2, 3))
def threads(request: pytest.FixtureRequest) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_row_has_the_same_bits_among_any_others(name: str, dtype: torch.dtype) -> None:
    activation = ACTIVATIONS[name]
    for width in WIDTHS:
        rows = (3 * torch.randn(65, width, generator=torch.Generator().manual_seed(width))).to(dtype)
        with WholeVectors():
            alone = torch.cat([activation(rows[row : row + 1]) for row in range(len(rows))])
            for count in (2, 3, 7, 29, 33, 64, 65):
                assert torch.equal(activation(rows[:count]), alone[:count]), (width, count)
                halves = torch.cat([rows[:count], rows[:count]], dim=-1)[:, width:]
                assert torch.equal(activation(halves), alone[:count]), (width, count)
                # Experts whose gate is every second output.
                apart = torch.stack([rows[:count], rows[:count]], dim=-1)[..., 0]
                assert torch.equal(activation(apart), alone[:count]), (width, count)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_recording_of_one_thread_has_the_same_bits_with_three(name: str) -> None:
    before, rows = torch.get_num_threads(), 3 * torch.randn(65, 2600, generator=torch.Generator().manual_seed(5))

    def activated(x: Tensor) -> Tensor:
        with WholeVectors():
            return ACTIVATIONS[name](x)

    try:
        torch.set_num_threads(1)
        recorded = torch.jit.trace(activated, (rows[:5],), check_trace=False)
        alone = activated(rows)
        torch.set_num_threads(3)
        assert all(torch.equal(recorded(rows[:count]), alone[:count]) for count in (1, 7, 33, 65))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_values_are_torchs(name: str) -> None:
    values = torch.linspace(-30, 30, 5 * 17).view(5, 17)
    with WholeVectors():
        ours = ACTIVATIONS[name](values)
    torch.testing.assert_close(ours, ACTIVATIONS[name](values), rtol=1e-6, atol=1e-7)
    assert ours.shape == values.shape


def test_options_and_memory_of_the_caller_are_respected() -> None:
    values = torch.linspace(-3, 3, 20)
    with WholeVectors():
        assert torch.equal(F.softplus(values, 2.0), F.softplus(values, beta=2.0))
        assert torch.equal(F.gelu(values), F.gelu(values, approximate="none"))
        in_place = values.clone()
        assert F.silu(in_place, inplace=True) is in_place
        assert torch.equal(torch.add(values, other=values), 2 * values)  # an option that has no truth
