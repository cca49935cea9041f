"""Log-probabilities of the tokens that a target emits or scores: log_softmax(logits + bias), a row at a time.

Computed for the rows asked for alone, and the same bits whatever the company of a row. Knows no penalties, no cuts and
no temperature: these values come before them. Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsplit.core.types import TokenLogProb
from specsplit.sampling.pick import best_of_rows


@torch.inference_mode()
def token_log_probs(
    logits: Tensor, token_ids: Sequence[int], bias: Tensor | None, top_logprobs: int
) -> tuple[TokenLogProb, ...]:
    """Return the log-probability of one token per row of `logits` [N, V], and those of the likeliest `top_logprobs`.

    `bias` is `bias_row`'s. A row whose logits are not numbers has values that are not finite, and fewer likeliest
    tokens.
    """
    shifted = logits.float() if bias is None else logits.float() + bias
    # Each row is summed by itself, so its bits are those that it has alone; a logsumexp may split one long row.
    values = torch.log_softmax(shifted, -1)
    wanted = torch.tensor(token_ids, device=logits.device).unsqueeze(-1)
    own: list[float] = values.gather(-1, wanted).squeeze(-1).tolist()
    if top_logprobs == 0:
        return tuple([TokenLogProb(value) for value in own])
    # Ranked by logits, which differ where log-probabilities are rounded to the same number: a greedy pick comes first.
    found = [ids for ids, _ in best_of_rows(shifted, min(top_logprobs, shifted.shape[-1]))]
    return tuple(
        [
            TokenLogProb(value, tuple(zip(ids, row[ids].tolist(), strict=True)))
            for value, row, ids in zip(own, values, found, strict=True)
        ]
    )
