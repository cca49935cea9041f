"""The draft's vocabulary: the tokens that its head computes, all or the frequent ones. It never changes the text.

A draft of a large vocabulary spends most of a forward in its head. A token that the head leaves out has the logit -inf,
as if the draft had cut it; ids and noise are those of the whole vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from specsplit.core.errors import InvalidSettings, ModelUnsupported
from specsplit.core.ports import Tokenizer
from specsplit.model.transformers_models import PreTrainedModel
from specsplit.model.vocab_file import VocabFile, parse_draft_vocab


def kept_ids(chosen: str, tokenizer: Tokenizer | None, vocab_size: int) -> list[int] | None:
    """Return the ids that "N" or a file's name stands for, ascending, with those that end a text; None if it is all.

    N stands for the N lowest ids: a byte-pair vocabulary numbers its merges by frequency.

    Raises:
        InvalidSettings: N is 0, there is no such file, or it is none of a vocabulary that this draft has.
    """
    named = parse_draft_vocab(chosen)
    kept = set(range(min(named, vocab_size)) if isinstance(named, int) else _checked(named, tokenizer, vocab_size))
    if tokenizer is not None:
        kept |= {token_id for token_id in tokenizer.eos_ids if token_id < vocab_size}
    return sorted(kept) if len(kept) < vocab_size else None


def _checked(file: VocabFile, tokenizer: Tokenizer | None, vocab_size: int) -> Sequence[int]:
    """Return the ids of a file, if they are the draft's own."""
    if tokenizer is None or file.vocab_hash != tokenizer.vocab_hash:
        raise InvalidSettings(
            f"The draft vocabulary {file.path} belongs to another tokenizer than the draft's; make it anew."
        )
    wrong = next((token_id for token_id in file.token_ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise InvalidSettings(
            f"The draft vocabulary {file.path} has the token id {wrong}, and the draft's are 0 to {vocab_size - 1}; "
            "make it anew."
        )
    return file.token_ids


def trim_head(model: PreTrainedModel, token_ids: Sequence[int], name: str) -> None:
    """Give the model a head of these rows only; the embedding keeps all of them.

    Raises:
        ModelUnsupported: its head is no linear layer.
    """
    head: Any = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelUnsupported(f"The head of {name} is no linear layer, so --draft-vocab cannot trim it; leave it out.")
    rows = torch.tensor(token_ids, device=head.weight.device)
    parameters = dict(head.named_parameters())
    with torch.device("meta"):
        trimmed = nn.Linear(head.in_features, len(token_ids), bias="bias" in parameters)
    for part, values in parameters.items():
        setattr(trimmed, part, nn.Parameter(values.detach()[rows], requires_grad=False))
    model.set_output_embeddings(trimmed)


def count_tokens(texts: Iterable[str], tokenizer: Tokenizer) -> Counter[int]:
    """Return how often each token occurs in the texts."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer.encode(text))
    return counts


def coverage(counts: Counter[int], token_ids: Iterable[int]) -> float:
    """Return the share of the counted tokens that are among `token_ids`."""
    return sum(counts[token_id] for token_id in token_ids) / max(1, counts.total())


def most_frequent(counts: Counter[int], size: int, num_tokens: int) -> list[int]:
    """Return the `size` most frequent ids below `num_tokens`, ascending; the lowest fill up what no text has."""
    found = (token_id for token_id in counts if token_id < num_tokens)
    ranked = sorted(found, key=lambda token_id: (-counts[token_id], token_id))[:size]
    rest = (token_id for token_id in range(num_tokens) if token_id not in counts)
    return sorted([*ranked, *(token_id for token_id, _ in zip(rest, range(size - len(ranked)), strict=False))])
