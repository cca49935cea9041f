"""Pure functions on logits, the same on draft and target: penalties, bias, then the cuts top-k, top-p, min-p.

They know token paths but neither noise nor models: `pick` divides by the temperature and adds the noise.
Legend: N rows (the root, then the nodes), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count
from typing import NamedTuple, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import SamplingParams
from specsplit.sampling.cuts import cut


class PenaltyContext(NamedTuple):
    """The tokens that stand before the one that each row chooses, counted."""

    seen: Tensor
    """bool [N, V]: the token occurs in the prompt, the output or the row's own path."""
    output_counts: Tensor
    """float32 [N, V]: how often it occurs after the prompt, the row's own path included."""


class PenaltyColumns(NamedTuple):
    """A context without the tokens that do not occur, which no penalty changes."""

    token_ids: Tensor
    """int64 [M]: the tokens that the context's columns belong to."""
    context: PenaltyContext
    """Its V is M."""


def process_logits(
    logits: Tensor,
    params: SamplingParams,
    context: PenaltyContext | PenaltyColumns | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the logits, float32 [N, V], after penalties, bias and cuts; a token that is cut has -inf.

    They are not yet divided by the temperature, at which top-p and min-p take their probabilities. The input
    is never written to; greedy without penalties and bias returns it as it is, in its own dtype. `context` is
    needed with penalties and ignored without; `bias` is `bias_row`'s.
    """
    if params.has_penalties:
        assert context is not None, "penalties need the tokens of each row's path"
        if isinstance(context, PenaltyColumns):
            logits = logits.to(torch.float32, copy=True)
            cells = context.token_ids.expand(len(logits), -1)
            logits.scatter_(1, cells, _penalised(logits.gather(1, cells), params, context.context))
        else:
            logits = _penalised(logits.float(), params, context)
    if bias is not None:
        logits = logits.float() + bias
    if params.is_greedy:
        return logits
    return cut(logits.float(), params)


def bias_row(params: SamplingParams, vocab_size: int, device: torch.device | str = "cpu") -> Tensor | None:
    """Return the logit bias as float32 [V], None if there is none.

    Raises:
        InvalidRequest: a biased token id lies outside the vocabulary.
    """
    if not params.logit_bias:
        return None
    check_against_vocabulary(params, vocab_size)
    # One assignment for all: a mask may name most of the vocabulary, and the device's other sessions wait meanwhile.
    biases = dict(params.logit_bias)
    row = np.zeros(vocab_size, np.float32)
    row[np.fromiter(biases, np.int64)] = np.fromiter(biases.values(), np.float32)
    return torch.from_numpy(row).to(device)


def check_against_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Check the parameters against the model's vocabulary.

    Raises:
        InvalidRequest: a biased token id lies outside the vocabulary.
    """
    largest = max([token_id for token_id, _ in params.logit_bias], default=-1)
    if largest >= vocab_size:
        raise InvalidRequest(
            f"logit_bias names token {largest}; the vocabulary ends at {vocab_size - 1}.", param="logit_bias"
        )


class CommittedIds(list[int]):
    """A session's committed tokens, deleted and extended at the end only; its one reader asks how many have stayed."""

    _num_stayed = 0

    def __delitem__(self, key: SupportsIndex | slice) -> None:
        first = key.indices(len(self))[0] if isinstance(key, slice) else range(len(self))[key]
        self._num_stayed = min(self._num_stayed, first)
        super().__delitem__(key)

    def take_stayed(self) -> int:
        """Return how many of the first tokens are still those of the last call."""
        num_stayed, self._num_stayed = self._num_stayed, len(self)
        return num_stayed


class TokenCounts:
    """Token counts of one session's committed tokens, kept up to date by difference.

    Tokens at index `prompt_length` and above are output. Only `sync` changes the counts.
    """

    def __init__(self, vocab_size: int, prompt_length: int, device: torch.device | str = "cpu") -> None:
        self._prompt_length = prompt_length
        self._device = torch.device(device)
        self._token_ids: list[int] = []
        self._total = torch.zeros(vocab_size, device=self._device)
        self._output = torch.zeros(vocab_size, device=self._device)
        self._columns: dict[int, int] = {}
        """The place of every token that has occurred, also of those that have gone."""
        self._column_ids = torch.empty(0, dtype=torch.int64, device=self._device)

    def __len__(self) -> int:
        return len(self._token_ids)

    def sync(self, token_ids: Sequence[int]) -> None:
        """Cover exactly `token_ids`, all committed tokens from the start of the prompt.

        If they are always the same `CommittedIds`, only those that have changed since the last call are looked at.
        """
        ours = self._token_ids
        keep = min(len(ours), token_ids.take_stayed()) if isinstance(token_ids, CommittedIds) else 0
        keep += common_length(ours[keep:], token_ids[keep:])
        self._add(self._token_ids[keep:], keep, -1.0)
        self._add(token_ids[keep:], keep, 1.0)
        self._token_ids[keep:] = token_ids[keep:]

    def rows(self, paths: Sequence[Sequence[int]]) -> PenaltyContext:
        """Return the context of N rows; `paths[i]` holds row i's token ids below the root, its own included.

        The root's path is empty. Tokens of a path are output tokens.
        """
        return self._context(self._total, self._output, paths, list(chain.from_iterable(paths)))

    def columns(self, paths: Sequence[Sequence[int]]) -> PenaltyColumns:
        """Return `rows` without tokens that occur nowhere."""
        on_paths = list(chain.from_iterable(paths))
        columns, new, column_ids = self._columns, *self._columns_with(on_paths)
        total, output = self._total[column_ids], self._output[column_ids]
        places = [columns[each] if each in columns else new[each] for each in on_paths]
        return PenaltyColumns(column_ids, self._context(total, output, paths, places))

    def _context(
        self, total: Tensor, output: Tensor, paths: Sequence[Sequence[int]], on_paths: list[int]
    ) -> PenaltyContext:
        """Return the context of N rows from the counts of all, and the columns of the paths' tokens, path by path."""
        output = output.repeat(len(paths), 1)
        seen = (total > 0).repeat(len(paths), 1)
        column_ids = torch.tensor(on_paths, dtype=torch.int64, device=self._device)
        lengths = torch.tensor([len(path) for path in paths], device=self._device)
        row_ids = torch.repeat_interleave(torch.arange(len(paths), device=self._device), lengths)
        output.index_put_((row_ids, column_ids), torch.ones(len(on_paths), device=self._device), accumulate=True)
        seen[row_ids, column_ids] = True
        return PenaltyContext(seen, output)

    def _columns_with(self, token_ids: Sequence[int]) -> tuple[dict[int, int], Tensor]:
        """Return the places of those tokens that have none, behind all others, and the ids of all with them."""
        new = dict.fromkeys([token_id for token_id in token_ids if token_id not in self._columns], 0)
        if not new:
            return new, self._column_ids
        new_ids = torch.tensor(list(new), dtype=torch.int64, device=self._device)
        return dict(zip(new, count(len(self._columns)))), torch.cat([self._column_ids, new_ids])

    def _add(self, token_ids: Sequence[int], first_index: int, weight: float) -> None:
        # Counts are whole numbers below 2^24, exact in float32 whatever the order of addition.
        if not token_ids:
            return
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        new, self._column_ids = self._columns_with(token_ids)
        self._columns.update(new)
        weights = torch.full((len(token_ids),), weight, device=self._device)
        self._total.index_put_((ids,), weights, accumulate=True)
        num_prompt = max(0, self._prompt_length - first_index)
        self._output.index_put_((ids[num_prompt:],), weights[num_prompt:], accumulate=True)


def common_length(ours: list[int], theirs: Sequence[int]) -> int:
    """Return how many tokens from the start are the same in both."""
    return next(
        (index for index, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other),
        min(len(ours), len(theirs)),
    )


def _penalised(logits: Tensor, params: SamplingParams, context: PenaltyContext) -> Tensor:
    """Apply the repetition penalty as in CTRL (arXiv 1909.05858), frequency and presence as in OpenAI's API."""
    penalty = params.repetition_penalty
    if penalty != 1:
        # Positive logits are divided, negative ones multiplied: above 1 that is the smaller of both, below the larger.
        choose = torch.minimum if penalty > 1 else torch.maximum
        logits = torch.where(context.seen, choose(logits / penalty, logits * penalty), logits)
    if params.frequency_penalty:
        logits = torch.sub(logits, context.output_counts, alpha=params.frequency_penalty)
    if params.presence_penalty:
        logits = torch.sub(logits, context.output_counts.clamp(max=1), alpha=params.presence_penalty)
    return logits
