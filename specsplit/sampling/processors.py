"""Pure functions on logits, the same on draft and target: penalties, bias, then the cuts top-k, top-p, min-p.

They know token paths but neither noise nor models: `pick` divides by the temperature and adds the noise.
Legend: N rows (the root, then the nodes), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import SamplingParams

_HEAD_TOKENS = 64
_COLDEST = 1e-30


class PenaltyContext(NamedTuple):
    """What stands before the token that each row chooses."""

    seen: Tensor
    """bool [N, V]: the token occurs in the prompt, the output or the row's own path."""
    output_counts: Tensor
    """float32 [N, V]: how often it occurs after the prompt, the row's own path included."""


def process_logits(
    logits: Tensor, params: SamplingParams, context: PenaltyContext | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return the logits, float32 [N, V], after penalties, bias and cuts; a token that is cut has -inf.

    They are not yet divided by the temperature, at which top-p and min-p take their probabilities. The input
    is never written to; greedy without penalties and bias returns it as it is, in its own dtype. `context` is
    needed with penalties and ignored without; `bias` is `bias_row`'s.
    """
    if params.has_penalties:
        assert context is not None, "penalties need the tokens of each row's path"
        logits = _penalised(logits.float(), params, context)
    if bias is not None:
        logits = logits.float() + bias
    if params.is_greedy:
        return logits
    return _cut(logits.float(), params)


def bias_row(params: SamplingParams, vocab_size: int, device: torch.device | str = "cpu") -> Tensor | None:
    """Return the logit bias as float32 [V], None if there is none.

    Raises:
        InvalidRequest: a biased token id lies outside the vocabulary.
    """
    if not params.logit_bias:
        return None
    check_against_vocabulary(params, vocab_size)
    row = torch.zeros(vocab_size)
    for token_id, bias in params.logit_bias:
        row[token_id] = bias
    return row.to(device)


def check_against_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Check what only the model's vocabulary can tell about the parameters.

    Raises:
        InvalidRequest: a biased token id lies outside the vocabulary.
    """
    for token_id, _ in params.logit_bias:
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {token_id}; the vocabulary ends at {vocab_size - 1}.", param="logit_bias"
            )


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

    def __len__(self) -> int:
        return len(self._token_ids)

    def sync(self, token_ids: Sequence[int]) -> None:
        """Cover exactly `token_ids`, all committed tokens from the start of the prompt."""
        keep = _common_length(self._token_ids, token_ids)
        self._add(self._token_ids[keep:], keep, -1.0)
        self._add(token_ids[keep:], keep, 1.0)
        self._token_ids[keep:] = token_ids[keep:]

    def rows(self, paths: Sequence[Sequence[int]]) -> PenaltyContext:
        """Return the context of N rows; `paths[i]` holds row i's token ids below the root, its own included.

        The root's path is empty. Tokens of a path are output tokens.
        """
        output = self._output.repeat(len(paths), 1)
        seen = (self._total > 0).repeat(len(paths), 1)
        token_ids = torch.tensor(list(chain.from_iterable(paths)), dtype=torch.int64, device=self._device)
        lengths = torch.tensor([len(path) for path in paths], device=self._device)
        row_ids = torch.repeat_interleave(torch.arange(len(paths), device=self._device), lengths)
        output.index_put_((row_ids, token_ids), torch.ones(len(token_ids), device=self._device), accumulate=True)
        seen[row_ids, token_ids] = True
        return PenaltyContext(seen, output)

    def _add(self, token_ids: Sequence[int], first_index: int, weight: float) -> None:
        # Counts are whole numbers below 2^24, exact in float32 whatever the order of addition.
        if not token_ids:
            return
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        weights = torch.full((len(token_ids),), weight, device=self._device)
        self._total.index_put_((ids,), weights, accumulate=True)
        num_prompt = max(0, self._prompt_length - first_index)
        self._output.index_put_((ids[num_prompt:],), weights[num_prompt:], accumulate=True)


def _common_length(ours: list[int], theirs: Sequence[int]) -> int:
    if ours == list(theirs[: len(ours)]):
        return len(ours)
    return next(
        (index for index, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other),
        min(len(ours), len(theirs)),
    )


def _penalised(logits: Tensor, params: SamplingParams, context: PenaltyContext) -> Tensor:
    """Apply the repetition penalty as in CTRL (arXiv 1909.05858), frequency and presence as in OpenAI's API."""
    if params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        logits = torch.where(context.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if params.frequency_penalty:
        logits = logits - params.frequency_penalty * context.output_counts
    if params.presence_penalty:
        logits = logits - params.presence_penalty * (context.output_counts > 0)
    return logits


def _cut(logits: Tensor, params: SamplingParams) -> Tensor:
    vocab_size = logits.shape[-1]
    if 0 < params.top_k < vocab_size:
        kth = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p == 1 and params.min_p == 0:
        return logits
    # Unnormalised softmax(logits / T), 1 at the best token; colder than _COLDEST, T would vanish in float32.
    best = logits.amax(dim=-1, keepdim=True)
    weights = (logits - best).div_(max(params.temperature, _COLDEST)).exp_()
    outside = weights < params.min_p
    if params.top_p < 1:
        outside |= _outside_nucleus(logits, weights, params.top_p)
    return logits.masked_fill(outside, -torch.inf)


def _outside_nucleus(logits: Tensor, weights: Tensor, top_p: float) -> Tensor:
    """Return bool [N, V], false for the smallest set of likeliest tokens whose mass reaches `top_p`.

    Of equal logits the lower ids are taken first. Sums run in float64, so that they do not depend on the
    number of rows or the device.
    """
    vocab_size = logits.shape[-1]
    wanted = top_p * weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    # The head usually holds the nucleus and spares a full sort; on an accelerator the sort is cheaper than asking.
    head_size = min(_HEAD_TOKENS, vocab_size) if logits.device.type == "cpu" else vocab_size
    while True:
        head, ids = logits.topk(head_size, dim=-1)
        mass = weights.gather(-1, ids).cumsum(dim=-1, dtype=torch.float64)
        if head_size == vocab_size or bool((mass[:, -1:] >= wanted).all()):
            break
        head_size = min(8 * head_size, vocab_size)
    # A token is in the nucleus while the mass of those before it falls short.
    sizes = (mass[:, :-1] < wanted).sum(dim=-1, keepdim=True) + 1
    border = head.gather(-1, sizes - 1)
    outside = logits < border
    at_border = logits == border
    taken = head == border
    taken &= torch.arange(head_size, device=logits.device) < sizes
    room = taken.sum(dim=-1, keepdim=True)
    if bool((at_border.sum(dim=-1, keepdim=True) > room).any()):
        outside |= at_border & (at_border.cumsum(dim=-1) > room)
    return outside
