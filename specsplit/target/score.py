"""Log-probabilities of given tokens, computed in a slot of no session, which is released whatever happens."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from specsplit.core.errors import ContextExceeded, InvalidRequest, ModelDamaged
from specsplit.core.types import SamplingParams
from specsplit.engine.session import MAX_STEP_TOKENS, SessionTable
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel
from specsplit.sampling.processors import bias_row


def check_score(
    model: LoadedModel, prompt: Sequence[int], scored: Sequence[int], logit_bias: Sequence[tuple[int, float]]
) -> SamplingParams:
    """Return the biases of tokens that the model has, as sampling parameters.

    Raises:
        InvalidRequest: nothing to score, an empty prompt, a token outside the vocabulary, or a bias out of range.
        ContextExceeded: the two do not fit the context.
    """
    if not len(scored):
        raise InvalidRequest("There is nothing to score; give at least one token.", param="scored")
    if not len(prompt):
        raise InvalidRequest("The prompt is empty; scoring needs at least one token before the first.", param="prompt")
    length = len(prompt) + len(scored)
    if length > model.context:
        raise ContextExceeded(
            f"Prompt and scored tokens are {length} together; the context is {model.context} tokens.", param="scored"
        )
    for name, token_ids in (("prompt", prompt), ("scored", scored)):
        if min(token_ids) < 0 or max(token_ids) >= model.vocab_size:
            raise InvalidRequest(
                f"{name} has a token id outside the vocabulary of {model.vocab_size} tokens.", param=name
            )
    return SamplingParams(logit_bias=tuple(bias for bias in logit_bias if 0 <= bias[0] < model.vocab_size))


def score(
    model: LoadedModel, sessions: SessionTable, prompt: Sequence[int], scored: Sequence[int], biases: SamplingParams
) -> Generator[SequenceInput, Tensor, tuple[float, ...]]:
    """Return log_softmax(logits + bias) of each token of `scored`, a chunk of tokens a step.

    Biases are finite, so the values are.

    Raises:
        NoFreeSlot: every slot is in use.
        ModelDamaged: the model's logits are not numbers.
    """
    token_ids = [*prompt, *scored[:-1]]  # the last token's own logits are not needed
    values: list[float] = []
    with sessions.borrowed_slot() as slot:
        for start in range(0, len(token_ids), MAX_STEP_TOKENS):
            chunk = token_ids[start : start + MAX_STEP_TOKENS]
            # Row i of a chunk predicts token start + i + 1: the row of the prompt's last token is the first scored.
            num_scored = min(len(chunk), start + len(chunk) - len(prompt) + 1)
            logits = yield SequenceInput(slot.index, start, chunk, num_logits=max(1, num_scored))
            if num_scored > 0:
                values += _log_probs(logits, scored[len(values) : len(values) + num_scored], biases)
    if not all(map(math.isfinite, values)):
        raise ModelDamaged(
            f"{model.name} computed logits that are not numbers; its weights are damaged or overflow in "
            f"{model.dtype}: try --dtype fp32."
        )
    return tuple(values)


@torch.inference_mode()
def _log_probs(logits: Tensor, token_ids: Sequence[int], biases: SamplingParams) -> list[float]:
    """Return the log-probability of one token per row of `logits` [N, V]."""
    bias = bias_row(biases, logits.shape[-1], logits.device)
    shifted = logits.float() if bias is None else logits.float() + bias
    wanted = torch.tensor(token_ids, device=logits.device).unsqueeze(-1)
    return torch.log_softmax(shifted, -1).gather(-1, wanted).squeeze(-1).tolist()
