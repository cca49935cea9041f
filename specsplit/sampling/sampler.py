"""One session's way from logits to scores, the same on draft and target; its tables follow the committed tokens.

Legend: N rows (the root, then the nodes), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specsplit.core.tree import depths, path_to
from specsplit.core.types import SamplingParams, SessionParams, TokenLogProb
from specsplit.sampling.best import Best, best_of_logits, rows_to_search
from specsplit.sampling.columns import ColumnNoise, Columns
from specsplit.sampling.cuts import has_cuts
from specsplit.sampling.log_probs import token_log_probs
from specsplit.sampling.noise import NoiseRows
from specsplit.sampling.pick import NOT_A_NUMBER, best_of_rows, picked_ids, scores
from specsplit.sampling.processors import TokenCounts, bias_row, process_logits
from specsplit.sampling.row_search import found_in, search_of
from specsplit.sampling.shortlist import best_of_shortlists, has_shortlist
from specsplit.sampling.sparse_noise import shared_noise
from specsplit.sampling.verify import picks_for_walk

_MANY_TOKENS = 16_384
"""From so many on a row's picks cost more than to begin with its penalties."""


class Sampler:
    """Logits to scores for one session: the same processors and the same noise on both workers."""

    def __init__(self, params: SessionParams, vocab_size: int, device: torch.device) -> None:
        self.params = params
        sampling = params.sampling
        self._bias = bias_row(sampling, vocab_size, device)  # refuses tokens that the vocabulary lacks
        self._sparse_noise = None if sampling.is_greedy else shared_noise(params.seed, params.choice, vocab_size)
        self._noise = None if sampling.is_greedy else NoiseRows(params.seed, params.choice, vocab_size, device)
        self._counts = TokenCounts(vocab_size, params.prompt_length, device) if sampling.has_penalties else None
        self._uncut: SamplingParams | None = None
        """Without the cuts, where they are made while the best are looked for."""
        if has_cuts(sampling, vocab_size) if device.type == "cpu" else has_shortlist(sampling, vocab_size):
            self._uncut = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
        self.needs_paths = self._counts is not None
        self.search = search_of(sampling, params.seed, params.choice) if device.type != "cpu" else None
        """Asks a GPU for the best of the session's rows as it computes them."""
        self.changes_nothing = sampling.is_greedy and not sampling.has_penalties and self._bias is None

    def picks(
        self, logits: Tensor, committed: Sequence[int], depths: Sequence[int], paths: Sequence[Sequence[int]] | None
    ) -> list[int]:
        """Return the token of each row, NOT_A_NUMBER where the logits are none; arguments are those of `scores`."""
        best = self._best_of_few(logits, committed, depths, paths, 1)
        if best is None:
            return picked_ids(self.scores(logits, committed, depths, paths))
        return [ids[0] if ids else NOT_A_NUMBER for ids, _ in best]

    def picks_of_tree(
        self, logits: Tensor, committed: Sequence[int], parents: Sequence[int], token_ids: Sequence[int]
    ) -> list[int]:
        """Return the picks at the root and at the nodes of a tree, [1 + N] as `logits`; any where `walk` reads none.

        `parents` and `token_ids` are those of the nodes. `committed` is only counted unless `needs_paths`. With noise
        each row has a search of its own on a CPU, so that rows off the accepted path are left out.
        """
        if self.changes_nothing:
            return picked_ids(logits)
        levels = [0, *depths(parents)]
        paths: list[list[int]] | None = None
        if self.needs_paths:
            paths = [[], *([token_ids[at] for at in path_to(parents, node)] for node in range(len(parents)))]
        noise = self._sparse_noise
        is_in_vain = self.needs_paths and logits.shape[-1] < _MANY_TOKENS
        if noise is None or not logits.is_cpu or is_in_vain:
            return self.picks(logits, committed, levels, paths)

        rows = rows_to_search(logits) if self._takes_as_they_are(logits) else None

        def pick_at(row: int) -> int:
            if rows is not None:
                position = len(committed) + levels[row]
                ids, _ = best_of_logits(rows[row : row + 1], self.params.sampling, noise, [position], 1)[0]
                return ids[0] if ids else NOT_A_NUMBER
            path = None if paths is None else paths[row : row + 1]
            return self.picks(logits[row : row + 1], committed, levels[row : row + 1], path)[0]

        return picks_for_walk(parents, token_ids, pick_at)

    def best(
        self,
        logits: Tensor,
        committed: Sequence[int],
        depths: Sequence[int],
        paths: Sequence[Sequence[int]] | None,
        count: int,
        columns: Columns | None = None,
    ) -> Iterable[Best]:
        """Return the `count` best tokens of each row with their finite scores; the rest as for `scores`.

        With `columns` the logits [N, C] are of these tokens alone, on a CPU: the others count as cut, and of equals the
        lower column comes first. Penalties and biases are made for rows of the whole vocabulary.
        """
        if columns is not None and self._counts is None and self._bias is None:
            if self._sparse_noise is None:
                found = best_of_rows(logits, count)
            else:
                positions = [len(committed) + depth for depth in depths]
                noise = ColumnNoise(self._sparse_noise, columns)
                found = best_of_logits(logits.float(), self.params.sampling, noise, positions, count)
            return [(columns.tokens(places), values) for places, values in found]
        if columns is not None:
            logits = columns.over_vocabulary(logits)
        best = self._best_of_few(logits, committed, depths, paths, count)
        return best_of_rows(self.scores(logits, committed, depths, paths), count) if best is None else best

    def _takes_as_they_are(self, logits: Tensor) -> bool:
        """Return whether only cuts and noise are left to do for logits."""
        return self._counts is None and self._bias is None and logits.dtype is torch.float32

    def _best_of_few(
        self,
        logits: Tensor,
        committed: Sequence[int],
        depths: Sequence[int],
        paths: Sequence[Sequence[int]] | None,
        count: int,
    ) -> list[Best] | None:
        """Return `best` with noise for few tokens; None if there is no noise, or a GPU has to add it to all."""
        noise, sampling = self._sparse_noise, self.params.sampling
        if noise is None:
            return None
        positions = [len(committed) + depth for depth in depths]
        if logits.is_cpu:
            rows = logits
            if not self._takes_as_they_are(logits):
                rows = self._processed(logits, committed, paths, self._uncut)
            return best_of_logits(rows, sampling, noise, positions, count)
        found = found_in(logits)
        best = found.noisy(sampling, noise, positions, count) if found is not None else None
        if best is None and self._uncut is not None:
            uncut = self._processed(logits, committed, paths, self._uncut)
            best = best_of_shortlists(uncut, sampling, noise, positions, count)
        return best

    def scores(
        self, logits: Tensor, committed: Sequence[int], depths: Sequence[int], paths: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """Return processed logits / T + noise, [N, V]: of all tokens, where `picks` and `best` look at a few.

        Row i stands `depths[i]` levels below the last of the `committed` tokens; `paths[i]` are the token ids on its
        way there, used only if `needs_paths`.
        """
        processed = self._processed(logits, committed, paths)
        if self._noise is None:
            return processed
        # The token picked at a row stands one position behind it, at len(committed) + its depth: the root has depth 0.
        noise = self._noise.for_depths(len(committed), depths)
        return scores(processed, self.params.sampling.temperature, noise)

    def log_probs(self, logits: Tensor, accepted: Sequence[int], token_ids: Sequence[int]) -> tuple[TokenLogProb, ...]:
        """Return what was asked for of the tokens that a verify emits; nothing if nothing was.

        Row 0 of `logits` [N, V] is the root's and row 1 + i that of node i. `token_ids` are the picks at the root and
        at the `accepted` nodes, in order.
        """
        top_logprobs = self.params.top_logprobs
        if top_logprobs is None:
            return ()
        rows = logits[[0, *[1 + node for node in accepted]]]
        return token_log_probs(rows, token_ids, self._bias, top_logprobs)

    def _processed(
        self,
        logits: Tensor,
        committed: Sequence[int],
        paths: Sequence[Sequence[int]] | None,
        sampling: SamplingParams | None = None,
    ) -> Tensor:
        if self.changes_nothing:
            return logits
        context = None
        if self._counts is not None:
            assert paths is not None, "penalties need each row's path"
            self._counts.sync(committed)
            context = self._counts.columns(paths) if logits.is_cpu else self._counts.rows(paths)
        return process_logits(logits, sampling or self.params.sampling, context, self._bias)
