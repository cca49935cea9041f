"""The draft's vocabulary: the tokens that its head computes, all or the frequent ones. It never changes the text.

A draft of a large vocabulary spends most of a forward in its head. A token that the head leaves out has the logit -inf,
as if the draft had cut it; ids and noise are those of the whole vocabulary.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specsplit.core.errors import InvalidRequest, InvalidSettings, ModelUnsupported
from specsplit.core.paths import expanded
from specsplit.core.ports import Tokenizer
from specsplit.model.transformers_models import PreTrainedModel

_KIND = "specsplit draft vocabulary"


def kept_ids(chosen: str, tokenizer: Tokenizer | None, vocab_size: int) -> list[int] | None:
    """Return the ids that "N" or a file's name stands for, ascending, with those that end a text; None if it is all.

    N stands for the N lowest ids: a byte-pair vocabulary numbers its merges by frequency.

    Raises:
        InvalidSettings: there is no such file, it is none of `write_draft_vocab`, or of another tokenizer.
    """
    token_ids = set(range(min(int(chosen), vocab_size)) if chosen.isdigit() else _read(Path(chosen), tokenizer))
    token_ids |= set(tokenizer.eos_ids) if tokenizer is not None else set()
    token_ids = {token_id for token_id in token_ids if 0 <= token_id < vocab_size}
    if not token_ids:
        raise InvalidSettings("A draft vocabulary of no tokens proposes nothing; leave --draft-vocab out.")
    return sorted(token_ids) if len(token_ids) < vocab_size else None


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
    """Return the `size` most frequent ids of a vocabulary, ascending; the lowest fill up what no text has."""
    ranked = sorted(counts, key=lambda token_id: (-counts[token_id], token_id))[:size]
    rest = (token_id for token_id in range(num_tokens) if token_id not in counts)
    return sorted([*ranked, *(token_id for token_id, _ in zip(rest, range(size - len(ranked)), strict=False))])


def write_draft_vocab(path: Path, token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Write a list of ids with the hash of the vocabulary that they belong to.

    Raises:
        InvalidRequest: the file cannot be written.
    """
    found = {"kind": _KIND, "vocab_hash": tokenizer.vocab_hash, "token_ids": list(token_ids)}
    try:
        path.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written ({error.strerror}); choose another --output.") from error


def _read(path: Path, tokenizer: Tokenizer | None) -> list[int]:
    try:
        found: Any = json.loads(expanded(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSettings(
            f"The draft vocabulary {path} cannot be read ({error.strerror}); make one with specsplit draft-vocab, or "
            "give a number."
        ) from error
    except ValueError:
        found = None
    token_ids: Any = found.get("token_ids") if isinstance(found, dict) and found.get("kind") == _KIND else None
    if not isinstance(token_ids, list) or not all(isinstance(token_id, int) for token_id in token_ids):
        raise InvalidSettings(f"{path} holds no draft vocabulary; make one with specsplit draft-vocab.")
    if tokenizer is None or found["vocab_hash"] != tokenizer.vocab_hash:
        raise InvalidSettings(
            f"The draft vocabulary {path} belongs to another tokenizer than the draft's; make it anew."
        )
    return token_ids
