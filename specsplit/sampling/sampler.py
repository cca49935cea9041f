"""One session's way from logits to scores, the same on draft and target; its tables follow the committed tokens.

Legend: N rows (the root, then the nodes), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsplit.core.types import SessionParams
from specsplit.sampling.noise import NoiseRows
from specsplit.sampling.pick import scores
from specsplit.sampling.processors import TokenCounts, bias_row, check_against_vocabulary, process_logits


class Sampler:
    """Logits to scores for one session: the same processors and the same noise on both workers."""

    def __init__(self, params: SessionParams, vocab_size: int, device: torch.device) -> None:
        check_against_vocabulary(params.sampling, vocab_size)
        self.params = params
        sampling = params.sampling
        self._noise = None if sampling.is_greedy else NoiseRows(params.seed, params.choice, vocab_size, device)
        self._bias = bias_row(sampling, vocab_size, device)
        self._counts = TokenCounts(vocab_size, params.prompt_length, device) if sampling.has_penalties else None
        self.needs_paths = self._counts is not None
        self.changes_nothing = sampling.is_greedy and not sampling.has_penalties and self._bias is None

    def scores(
        self, logits: Tensor, committed: Sequence[int], depths: Sequence[int], paths: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """Return processed logits / T + noise, [N, V].

        Row i stands `depths[i]` levels below the last of the `committed` tokens; `paths[i]` are the token ids on its
        way there, used only if `needs_paths`.
        """
        if self.changes_nothing:
            return logits
        context = None
        if self._counts is not None:
            assert paths is not None, "penalties need each row's path"
            self._counts.sync(committed)
            context = self._counts.rows(paths)
        processed = process_logits(logits, self.params.sampling, context, self._bias)
        if self._noise is None:
            return processed
        # The token picked at a row stands one position behind it, at len(committed) + its depth: the root has depth 0.
        noise = self._noise.for_depths(len(committed), depths)
        return scores(processed, self.params.sampling.temperature, noise)
