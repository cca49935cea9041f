"""A chain of stages in one process, and the hidden states of the whole model at every layer boundary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.runner import Runner
from specsplit.stages.shard.loader import LoadedShard, ShardOptions, ShardSpec, hidden_entry, load_ends, load_shard


def cut(num_layers: int, bounds: Sequence[int], *, has_ends: bool = True) -> list[ShardSpec]:
    """Return stages that end at `bounds` and at the last layer, with the model's ends on the outer ones or on none."""
    edges = [0, *bounds, num_layers]
    last = len(edges) - 2
    return [
        ShardSpec(start, end, has_ends and stage == 0, has_ends and stage == last)
        for stage, (start, end) in enumerate(pairwise(edges))
    ]


class Chain:
    """Runs a step through stages as if links lay between them; `ends` are a coordinator's, where stages have none."""

    def __init__(self, stages: Sequence[LoadedShard], ends: tuple[LoadedShard, LoadedShard] | None = None) -> None:
        self.stages = stages
        self._all = [*stages] if ends is None else [ends[0], *stages, ends[1]]
        self.boundaries: dict[int, Tensor] = {}
        """Hidden states [T, H] of the last step by the number of layers before them."""

    @classmethod
    def load(
        cls, folder: Path, num_layers: int, bounds: Sequence[int], *, ends: str = "stages", **options: Any
    ) -> Chain:
        specs = cut(num_layers, bounds, has_ends=ends == "stages")
        stages = [load_shard(str(folder), spec, ShardOptions(max_sessions=3, threads=1, **options)) for spec in specs]
        return cls(stages, None if ends == "stages" else load_ends(str(folder), ShardOptions(threads=1, **options)))

    def forward(self, entries: Sequence[SequenceInput]) -> list[Tensor]:
        """Return per entry logits [num_logits, V]; only the stage with the embedding sees token ids."""
        without_ids = [
            hidden_entry(entry.slot, entry.base_length, len(entry.token_ids), entry.parents, entry.num_logits)
            for entry in entries
        ]
        self.boundaries = {}
        first, *rest = self._all
        if not rest:
            return first.runner.forward(entries)
        rows = first.runner.rows(entries)
        for before, stage in zip(self._all, rest, strict=False):
            self.boundaries[before.spec.end] = rows
            if stage is self._all[-1]:
                return stage.runner.forward(without_ids, rows)
            rows = stage.runner.rows(without_ids, rows)
        raise AssertionError("a chain ends with its head")

    def move_rows(self, slot: int, sources: Sequence[int], start: int) -> None:
        """Compact an accepted path in every stage, as its packet would tell it to."""
        for stage in self.stages:
            stage.runner.cache.move_rows(slot, sources, start)


class Whole:
    """The whole model's runner, its hidden states noted before every layer and after the last."""

    def __init__(self, runner: Runner, layers: str) -> None:
        self.runner = runner
        self.boundaries: dict[int, Tensor] = {}
        for index, layer in enumerate(runner.model.get_submodule(layers)):  # type: ignore[arg-type]
            layer.register_forward_hook(self._noting(index + 1))
            if index == 0:
                layer.register_forward_pre_hook(self._noting_first, with_kwargs=True)

    def _noting_first(self, layer: object, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.boundaries[0] = (args[0] if args else keywords["hidden_states"])[0].clone()

    def _noting(self, num_layers: int) -> Any:
        def note(layer: object, args: object, output: Tensor) -> None:
            self.boundaries[num_layers] = output[0].clone()

        return note

    def forward(self, entries: Sequence[SequenceInput]) -> list[Tensor]:
        self.boundaries = {}
        return self.runner.forward(entries)

    def move_rows(self, slot: int, sources: Sequence[int], start: int) -> None:
        self.runner.cache.move_rows(slot, sources, start)


def largest_difference(first: Tensor, second: Tensor) -> float:
    """Return the largest error, relative to the largest value (at least 1)."""
    assert first.shape == second.shape
    return ((first - second).abs().max() / second.abs().max().clamp(min=1)).item()


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 258, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
