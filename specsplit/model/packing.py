"""Packs a model's weights as this machine multiplies them best, with its logits compared with those of transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from specsplit.core.errors import DeviceUnavailable, OutOfMemory
from specsplit.model import exactness, memory
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.comparisons import Comparisons
from specsplit.model.files import lay_out
from specsplit.model.probe import check_against_eager, eager_logits, trying
from specsplit.model.runner import Runner
from specsplit.model.weight_format import WeightFormat
from specsplit.model.wide_spans import span_rows

logger = logging.getLogger(__name__)
NUM_CHECKED = 24
"""Tokens of the comparison; the first third, what follows and the last one go in forwards of their own."""
_TRANSFORMERS = "transformers"
"""The comparison of a model's logits with those of transformers' eager attention."""


def check_and_pack(
    runner: Runner,
    kept: Sequence[int] | None,
    form: WeightFormat | None,
    name: str,
    comparisons: Comparisons,
    read_tokenizer: Callable[[], object],
) -> None:
    """Pack the weights of a model, and check its logits, those of the tokens kept, against transformers' own.

    What was compared here before, with the very files, is only packed.

    Raises:
        ModelDamaged, ModelUnsupported, OutOfMemory, DeviceUnavailable.
    """
    if comparisons.has(_TRANSFORMERS):
        pack(runner, form, lambda: None)
        return
    read_tokenizer()  # a broken one shows before the long first load
    # Distinct ids, so that a wrong position or mask cannot cancel out.
    token_ids = [(7 * i + 3) % runner.vocab_size for i in range(min(NUM_CHECKED, runner.context))]
    truth = eager_logits(runner.model, token_ids)

    def check() -> None:
        parts = parts_of(len(token_ids))
        steps = [SequenceInput(0, first, token_ids[first:stop], num_logits=stop - first) for first, stop in parts]
        with trying(runner.model):
            ours = torch.cat([runner.forward([step])[0] for step in steps])
        if kept is not None:
            ours = ours[:, kept] if runner.columns is None else ours[:, : len(kept)]
        check_against_eager(ours, truth, name)

    pack(runner, form, check)
    comparisons.add(_TRANSFORMERS)


def parts_of(num_tokens: int) -> Sequence[tuple[int, int]]:
    """Return the parts of a text that one forward each computes: its beginning, what follows, and its last token.

    A model that takes positions from the tokens of a forward, not from those that it is given, is wrong in most rows.
    """
    return list(pairwise(sorted({0, num_tokens // 3, num_tokens - 1, num_tokens})))


def pack(runner: Runner, form: WeightFormat | None, check: Callable[[], None]) -> None:
    """Pack the weights where this machine can; else lay them out as its own products read them best.

    `check` compares the runner's rows with the truth of the checkpoint's weights. If those are rounded to a format, it
    is called before.
    """
    if form is not None:
        check()
    if runner.device.type == "cpu":
        try:
            runner.pack(exactness.product_width(runner.dtype), form)
        except (RuntimeError, MemoryError) as error:
            if memory.is_exhausted(error):  # some of the model's own copies are gone, so it is of no use
                words = "The memory ran out while the weights were packed; use a smaller model or --dtype int8."
                raise OutOfMemory(words) from error
            if form is not None:
                raise DeviceUnavailable(f"This processor packs no weights, which {form} needs.") from error
            lay_out(runner.model)
        else:
            runner.widen_spans(span_rows(runner.attention_layers, runner.dtype, runner.context))
    elif form is not None:
        runner.round(form)
    if form is None:
        check()
    else:
        _note_experts(runner.model, form)


def _note_experts(model: torch.nn.Module, form: WeightFormat) -> None:
    """Log how much of a mixture of experts is not rounded: so much of its memory and time stays."""
    sizes = [(parameter.dim(), parameter.numel()) for parameter in model.parameters()]
    num_experts = sum(size for dim, size in sizes if dim == 3)  # a matrix for each expert, in one parameter
    if num_experts:
        share, dtype = num_experts / sum(size for _, size in sizes), str(model.dtype).removeprefix("torch.")
        logger.warning("%.0f %% of the weights are experts, which stay in %s with --dtype %s", 100 * share, dtype, form)
