"""Log-probabilities of given tokens, computed in a slot of no session, which is warm or free afterwards.

    prompt, but its last token | scored positions       rows that are warm or a session's are found in the first part

A score of all of a text has no first part: each row's logits are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

from torch import Tensor

from specsplit.core.errors import ContextExceeded, InvalidRequest, ModelDamaged
from specsplit.core.types import SamplingParams, SessionParams, TokenLogProb
from specsplit.engine.prompt_budget import MAX_STEP_ROWS
from specsplit.engine.session import SessionTable
from specsplit.engine.slots import Loan, borrowed_slot
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel
from specsplit.sampling.log_probs import token_log_probs
from specsplit.sampling.processors import bias_row


def check_score(
    model: LoadedModel,
    prompt: Sequence[int],
    scored: Sequence[int],
    logit_bias: Sequence[tuple[int, float]],
    top_logprobs: int,
) -> SessionParams:
    """Return the biases of tokens that the model has, and what is asked for, as a session's parameters.

    Raises:
        InvalidRequest: nothing to score, an empty prompt, a token outside the vocabulary, a bias out of range, or too
            many of the likeliest tokens.
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
    biases = SamplingParams(logit_bias=tuple(bias for bias in logit_bias if 0 <= bias[0] < model.vocab_size))
    return SessionParams(biases, top_logprobs=top_logprobs)


def score(
    model: LoadedModel,
    sessions: SessionTable,
    prompt: Sequence[int],
    scored: Sequence[int],
    params: SessionParams,
    loan: Loan,
) -> Generator[SequenceInput, Tensor, tuple[TokenLogProb, ...]]:
    """Return log_softmax(logits + bias) of each token of `scored`, a chunk of tokens a step.

    Biases are finite, so the values are. `loan` is of a row for each token but the last.

    Raises:
        NoFreeSlot: every slot is in use.
        ModelDamaged: the model's logits are not numbers.
    """
    token_ids = [*prompt, *scored[:-1]]  # the last token's own logits are not needed
    values: list[TokenLogProb] = []
    bias = bias_row(params.sampling, model.vocab_size, model.runner.device)
    with borrowed_slot(sessions.slots, loan, prompt, token_ids, sessions.open_sessions) as slot:
        start = slot.length
        while start < len(token_ids):
            chunk = token_ids[start : start + MAX_STEP_ROWS]
            # Row i of a chunk predicts token start + i + 1: the row of the prompt's last token is the first scored.
            num_scored = min(len(chunk), start + len(chunk) - len(prompt) + 1)
            logits = yield SequenceInput(slot.index, start, chunk, num_logits=max(1, num_scored))
            start += len(chunk)
            if num_scored > 0:  # of which a step may have taken the first ones only
                wanted = scored[len(values) : len(values) + len(logits)]
                values += token_log_probs(logits, wanted, bias, params.top_logprobs or 0)
                start = len(prompt) - 1 + len(values)
        if not all(math.isfinite(value.log_prob) for value in values):
            raise no_numbers(model)
    return tuple(values)


def no_numbers(model: LoadedModel) -> ModelDamaged:
    """Return the error of a model whose logits are not numbers."""
    return ModelDamaged(
        f"{model.name} computed logits that are not numbers; its weights are damaged or overflow in "
        f"{model.identity.dtype}: try --dtype fp32."
    )
