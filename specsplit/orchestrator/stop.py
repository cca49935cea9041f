"""Where an answer ends: EOS, a stop string, max tokens or the context. Cuts the tokens that a round committed.

The walk in the target ignores all of this; here the tokens of a round become the text of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specsplit.core.types import FinishReason
from specsplit.orchestrator.records import Piece
from specsplit.orchestrator.text import Decode, Detokenizer, StopStrings


@dataclass(frozen=True, slots=True)
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

    def __init__(self, decode: Decode, *, eos_ids: Sequence[int], stop: Sequence[str], max_tokens: int) -> None:
        self._eos_ids = frozenset(eos_ids)
        self._detokenizer = Detokenizer(decode)
        self._stop_strings = StopStrings(stop)
        self._tokens_left = max_tokens

    def take(self, token_ids: tuple[int, ...], num_accepted: int) -> Cut:
        """Return what a round adds; its first `num_accepted` tokens were drafted."""
        kept, reason = self._kept(token_ids)
        shown = kept[:-1] if reason == "stop" else kept
        pieces: list[Piece] = []
        num_taken = 0
        for run, drafted in self._runs(shown, num_accepted):
            num_taken += len(run)
            if self._stop_strings.push(self._detokenizer.push(run), drafted, pieces):
                return Cut(token_ids[:num_taken], tuple(pieces), "stop")
        if reason is not None and self._finish(len(kept) <= num_accepted, pieces):
            reason = "stop"
        return Cut(kept, tuple(pieces), reason)

    def _kept(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Return the tokens up to EOS, which is "stop", or as many as are left, the last of which is "length"."""
        kept = token_ids[: self._tokens_left]
        self._tokens_left -= len(kept)
        if not self._eos_ids.isdisjoint(kept):
            end = next(index for index, token_id in enumerate(kept, 1) if token_id in self._eos_ids)
            return kept[:end], "stop"
        return kept, None if self._tokens_left else "length"

    def _runs(self, shown: tuple[int, ...], num_accepted: int) -> list[tuple[tuple[int, ...], bool]]:
        """Cut the tokens where their mark changes, or into single ones where one of them may complete a stop string."""
        if self._stop_strings:
            return [((token_id,), index < num_accepted) for index, token_id in enumerate(shown)]
        runs = ((shown[:num_accepted], True), (shown[num_accepted:], False))
        return [run for run in runs if run[0]]

    def _finish(self, drafted: bool, pieces: list[Piece]) -> bool:
        """Release all that is left; return whether an unfinished character completed a stop string."""
        if self._stop_strings.push(self._detokenizer.flush(), drafted, pieces):
            return True
        self._stop_strings.flush(pieces)
        return False
