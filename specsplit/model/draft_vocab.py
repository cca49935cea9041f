"""The draft's vocabulary: the tokens that its head computes, all or the frequent ones. It never changes the text.

A draft of a large vocabulary spends most of a forward in its head. A token that the head leaves out has the logit -inf,
as if the draft had cut it; ids and noise are those of the whole vocabulary.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from string import printable
from typing import Any

import torch
from torch import Tensor, nn

from specsplit.core.errors import InvalidSettings, ModelUnsupported
from specsplit.core.ports import Tokenizer
from specsplit.model.backends.packed_linear import product
from specsplit.model.recent_tokens import RecentTokens
from specsplit.model.transformers_models import PreTrainedModel
from specsplit.model.vocab_file import DEFAULT_DRAFT_VOCAB, VocabFile, parse_draft_vocab
from specsplit.sampling.columns import Columns

_log = logging.getLogger(__name__)
_INDENTS = ("  ", "    ", "        ", "\n\n")
_RECENT_SHARE = 16
"""Tokens of a trimmed head for each that it computes because a text had it. Chosen: 2,048 for 32,768."""


def kept_ids(chosen: str, tokenizer: Tokenizer | None, vocab_size: int) -> list[int] | None:
    """Return the ids that "N", "all" or a file's name stands for, ascending, with the ends of text; None if it is all.

    N stands for the N lowest ids: a byte-pair vocabulary numbers its merges by frequency.

    Raises:
        InvalidSettings: N is 0, there is no such file, or it is none of a vocabulary that this draft has.
    """
    named = parse_draft_vocab(chosen)
    if named is None:
        return None
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


class TrimmedHead(nn.Linear):
    """A CPU's head of some tokens only; the embedding keeps all of them. It may come to follow the texts, too.

    Legend: C tokens that it computes, R rows.
    """

    def __init__(self, head: nn.Linear, kept_ids: Sequence[int]) -> None:
        parts = _rows_of(head, kept_ids)
        with torch.device("meta"):
            super().__init__(head.in_features, len(kept_ids), bias="bias" in parts)
        for part, values in parts.items():
            setattr(self, part, values)
        self.columns = Columns(kept_ids, len(head.weight))
        """The tokens that it computes; its outputs are in this order."""
        self.recent: RecentTokens | None = None
        """The tokens behind the fixed ones, once it follows the texts."""
        self.whole = head.weight if "bias" not in parts else None
        """The rows of all tokens, while others than the fixed ones may be asked for."""
        self._packs: Sequence[Tensor] = ()

    def follow_texts(self, width: int) -> None:
        """Compute from now on some of the tokens that texts had last, too; packs have at most `width` inputs.

        A head that has only its own rows, or few of them, stays as it is.
        """
        num_places = self.out_features // _RECENT_SHARE
        if self.whole is not None and num_places:
            self.recent = RecentTokens(self.whole.detach(), self.columns, num_places, width)
        else:
            self.forget_others()

    def forget_others(self) -> None:
        """Let go of the rows of all other tokens."""
        self.whole = None

    @contextmanager
    def computing_with(self, packs: Sequence[Tensor]) -> Generator[None]:
        """Compute with these packs, which are those of `recent` or stand for them in a recording."""
        self._packs = packs
        try:
            yield
        finally:
            self._packs = ()

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits [..., R, C]."""
        logits = super().forward(input)
        if not self._packs or self.recent is None:
            return logits
        return torch.cat([logits, product(input, list(self._packs), self.recent.width, None)], dim=-1)


def trim_head(model: PreTrainedModel, token_ids: Sequence[int], name: str) -> TrimmedHead | None:
    """Give the model a head of these rows only; return it, or None on a GPU, where it is a layer like others.

    Raises:
        ModelUnsupported: its head is no linear layer.
    """
    head: Any = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelUnsupported(f"The head of {name} is no linear layer, so --draft-vocab cannot trim it; leave it out.")
    _log.info("the head of %s computes %d of %d tokens", name, len(token_ids), len(head.weight))
    if head.weight.is_cpu:
        trimmed = TrimmedHead(head, token_ids)
        model.set_output_embeddings(trimmed)
        return trimmed
    parts = _rows_of(head, token_ids)
    with torch.device("meta"):
        layer = nn.Linear(head.in_features, len(token_ids), bias="bias" in parts)
    for part, values in parts.items():
        setattr(layer, part, values)
    model.set_output_embeddings(layer)
    return None


def _rows_of(head: nn.Linear, token_ids: Sequence[int]) -> dict[str, nn.Parameter]:
    """Return the weight of some tokens, and their bias if there is one."""
    rows = torch.tensor(token_ids, device=head.weight.device)
    parts = dict(head.named_parameters())
    return {part: nn.Parameter(values.detach()[rows], requires_grad=False) for part, values in parts.items()}


def frequent_ids(tokenizer: Tokenizer | None, vocab_size: int) -> list[int] | None:
    """Return the ids of a draft's vocabulary by default: the DEFAULT_DRAFT_VOCAB lowest, and the characters of ASCII.

    Vocabularies of SentencePiece have single characters behind all merges, punctuation and digits among them.
    """
    kept = kept_ids(str(DEFAULT_DRAFT_VOCAB), tokenizer, vocab_size)
    if kept is None or tokenizer is None:
        return kept
    # Some tokenizers put a blank before a text, so that its first character is a token with that blank.
    encoded = (_encoded(lead + characters, tokenizer) for characters in (*printable, *_INDENTS) for lead in ("", "\n"))
    return sorted({*kept, *(token_id for ids in encoded for token_id in ids if token_id < vocab_size)})


def _encoded(text: str, tokenizer: Tokenizer) -> Sequence[int]:
    """Return the tokens of a text, none if the tokenizer refuses it."""
    try:
        return tokenizer.encode(text)
    except Exception:  # noqa: BLE001 - of its own library: a character that no token has is not needed
        return ()


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
