"""Where an answer ends: EOS, a stop string, max tokens or the context. Cuts the tokens that a round committed.

The walk in the target ignores all of this; here the tokens of a round become the text of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsplit.core.ports import Tokenizer
from specsplit.core.record import record
from specsplit.core.types import FinishReason
from specsplit.orchestrator.request import Piece
from specsplit.orchestrator.text import StopStrings, detokenizer_of


@record
class Cut:
    """What is left of a round's tokens, the text they release, and the end if this is it."""

    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    finish_reason: FinishReason | None


class Stop:
    """Follows one answer token by token, so that its end never depends on how rounds cut it.

    `max_tokens` is what the request allows or what the context has room for, whichever is less. Where several ends
    fall on one token, EOS and stop strings come before length.
    """

    def __init__(self, tokenizer: Tokenizer, *, eos_ids: Sequence[int], stop: Sequence[str], max_tokens: int) -> None:
        self._eos_ids = frozenset(eos_ids)
        self._detokenizer = detokenizer_of(tokenizer)
        self._stop_strings = StopStrings(stop)
        self._tokens_left = max_tokens

    def take(self, token_ids: tuple[int, ...], num_accepted: int) -> Cut:
        """Return what a round adds; its first `num_accepted` tokens were drafted."""
        pieces: list[Piece] = []
        for index, token_id in enumerate(token_ids):
            reason = self._take_token(token_id, index < num_accepted, pieces)
            if reason is not None:
                return Cut(token_ids[: index + 1], tuple(pieces), reason)
        return Cut(token_ids, tuple(pieces), None)

    def _take_token(self, token_id: int, drafted: bool, pieces: list[Piece]) -> FinishReason | None:
        self._tokens_left -= 1
        if token_id in self._eos_ids:
            self._finish(drafted, pieces)
            return "stop"
        if self._stop_strings.push(self._detokenizer.push(token_id), drafted, pieces):
            return "stop"
        if self._tokens_left > 0:
            return None
        return "stop" if self._finish(drafted, pieces) else "length"

    def _finish(self, drafted: bool, pieces: list[Piece]) -> bool:
        """Release all that is left; return whether an unfinished character completed a stop string."""
        if self._stop_strings.push(self._detokenizer.flush(), drafted, pieces):
            return True
        self._stop_strings.flush(pieces)
        return False
