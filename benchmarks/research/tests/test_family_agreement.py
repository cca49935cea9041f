"""Agreement with transformers' eager bf16 is counted by position, near ties apart."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.research.exactness import families
from tests.support.model_zoo import FAMILIES, save_model


def test_a_near_tie_lies_within_one_step_of_bf16() -> None:
    for best, step in ((1.0, 2**-7), (3.0, 2**-6), (-0.75, 2**-8), (250.0, 1.0)):
        following = torch.nextafter(torch.tensor(abs(best)).bfloat16(), torch.tensor(1e9).bfloat16()).item()
        assert following - torch.tensor(abs(best)).bfloat16().item() == step
        exact = torch.tensor([[best, best - step], [best, best - 1.01 * step]], dtype=torch.float64)
        assert families.is_near_tie(exact).tolist() == [True, False]


def test_positions_are_counted_by_who_differs() -> None:
    exact = torch.tensor([[2.0, 1.0], [2.0, 1.999], [1.0, 2.0]], dtype=torch.float64)
    ours, eager = exact.clone(), exact.clone()
    ours[1] = ours[1].flip(0)
    eager[2] = eager[2].flip(0)
    found = families.compare("one", ours, eager, exact)
    assert found == families.Agreement("one", 3, 1, ours_eager=2, ours_eager_apart=1, ours_exact=1, eager_exact=1)


def test_a_checkpoint_is_read_in_all_three_ways(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, dtype=torch.bfloat16)
    texts = families.random_texts(folder, 0)
    assert sum(map(len, texts)) == families.NUM_TOKENS
    found = families.measure(folder, texts[:1])
    assert (found.model, found.num_tokens) == ("llama", families.TEXT_TOKENS)
    assert found.ours_eager <= found.ours_exact + found.eager_exact
    assert max(found.ours_exact, found.eager_exact) < 0.1 * found.num_tokens
