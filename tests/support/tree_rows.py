"""Rows of a text and a tree behind it, beside those of transformers for each path."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.runner import Runner
from tests.support.stage_models import Chain

PARENTS = (-1, 0, 0, 1)
"""Three positions deep."""


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 258, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def text_and_tree_rows(runner: Runner | Chain, ids: list[int], nodes: list[int]) -> Tensor:
    """Return the logits [T + N, V] of a text, which comes in three steps, and of a tree behind its last token."""
    middle, last = len(ids) // 2, len(ids) - 1
    steps = [
        SequenceInput(0, 0, ids[:middle], num_logits=middle),
        SequenceInput(0, middle, ids[middle:last], num_logits=last - middle),
        SequenceInput(0, last, [ids[last], *nodes], [-1, *(parent + 1 for parent in PARENTS)], len(nodes) + 1),
    ]
    return torch.cat([runner.forward([step])[0].clone() for step in steps])


@torch.inference_mode()
def rows_of_transformers(model: nn.Module, ids: list[int], nodes: list[int]) -> Tensor:
    """Return the same logits by plain forwards of whole texts."""
    paths: list[list[int]] = []
    for node, parent in zip(nodes, PARENTS, strict=False):
        paths.append([*(paths[parent] if parent >= 0 else ids), node])
    whole = model(torch.tensor([ids]), use_cache=False).logits[0]
    return torch.cat([whole, *(model(torch.tensor([path]), use_cache=False).logits[0, -1:] for path in paths)])
