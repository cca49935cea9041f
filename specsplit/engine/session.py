"""One session on one worker: its slot, the ids in it, and the length rule, one operation for rollback and replay.

Used by draft and target alike; knows nothing of trees or of what is done with the slot.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from specsplit.core.errors import InvalidRequest, SlotBehind, StaleEpoch, StaleRound
from specsplit.core.types import SessionParams, Turn, prefix_hashes
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.kv_cache import Slot
from specsplit.sampling.noise import NoiseRows
from specsplit.sampling.pick import scores
from specsplit.sampling.processors import TokenCounts, bias_row, check_against_vocabulary, process_logits

MAX_STEP_TOKENS = 512
"""Tokens one session may bring to a step before its tree: the size of a prefill chunk."""


class Sampler:
    """Logits to scores for one session: the same processors and the same noise on both workers."""

    def __init__(self, params: SessionParams, vocab_size: int, device: torch.device) -> None:
        check_against_vocabulary(params.sampling, vocab_size)
        self.params = params
        sampling = params.sampling
        self._noise = None if sampling.is_greedy else NoiseRows(params.seed, params.choice, vocab_size, device)
        self._bias = bias_row(sampling, vocab_size, device)
        self._counts = TokenCounts(vocab_size, params.prompt_length, device) if sampling.has_penalties else None
        self.needs_paths = self._counts is not None
        self.changes_nothing = sampling.is_greedy and not sampling.has_penalties and self._bias is None

    def scores(
        self, logits: Tensor, committed: Sequence[int], depths: Sequence[int], paths: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """Return processed logits / T + noise, [N, V].

        Row i stands `depths[i]` levels below the last of the `committed` tokens; `paths[i]` are the token ids on its
        way there, asked for only where `needs_paths`.
        """
        if self.changes_nothing:
            return logits
        context = None
        if self._counts is not None:
            assert paths is not None, "penalties need each row's path"
            self._counts.sync(committed)
            context = self._counts.rows(paths)
        processed = process_logits(logits, self.params.sampling, context, self._bias)
        if self._noise is None:
            return processed
        noise = self._noise.for_depths(len(committed), depths)
        return scores(processed, self.params.sampling.temperature, noise)


class WorkerSession:
    """What a worker remembers of a session between rounds. Invariant: len(ids) == len(hashes) == slot.length."""

    def __init__(self, key: str, slot: Slot) -> None:
        self.key, self.slot = key, slot
        self.epoch = self.round = -1
        self.ids: list[int] = []
        self._hashes: list[int] = []
        self.sampler: Sampler | None = None
        self._body: object = None
        self.answer: object = None
        """What this round was answered, None while it runs: a repeat of the round gets it again."""
        self.kept: object = None
        """What the engine keeps beside the slot through an epoch; it goes with the session."""
        self.last_used_s = 0.0
        self.is_in_use = False

    def admit(self, turn: Turn, body: object) -> bool:
        """Check epoch, round and length rule before anything changes; return whether this repeats the last round.

        Raises:
            StaleEpoch, StaleRound: a later one was seen.
            InvalidRequest: the last round again, with another `body`.
            SlotBehind: the slot holds fewer tokens than `base_length`, or others, or the epoch's parameters were never
                sent.
        """
        if turn.epoch < self.epoch:
            raise StaleEpoch(f"epoch {turn.epoch} of this session is over; epoch {self.epoch} has begun")
        if turn.epoch == self.epoch and turn.round < self.round:
            raise StaleRound(f"round {turn.round} of this session is over; round {self.round} was the last")
        if turn.epoch == self.epoch and turn.round == self.round:
            if (turn, body) != self._body:
                raise InvalidRequest(f"Round {turn.round} of this session had another body before.", param="round")
            if self.answer is not None:
                return True
        if turn.base_length > len(self.ids):
            raise SlotBehind(len(self.ids))
        if turn.base_length and self._hashes[turn.base_length - 1] != turn.base_hash:
            raise SlotBehind(0)
        if turn.opening is None and (self.sampler is None or turn.epoch > self.epoch):
            raise SlotBehind(0)
        return False

    def use(self, params: SessionParams, vocab_size: int, device: torch.device) -> None:
        """Take over the parameters of an opening."""
        if self.sampler is None or self.sampler.params != params:
            self.sampler = Sampler(params, vocab_size, device)

    def begin(self, turn: Turn, body: object) -> None:
        """Take over the turn's epoch and round, once `admit` passed; what an epoch kept goes with it."""
        if turn.epoch > self.epoch:
            self.kept = None
        self.epoch, self.round = turn.epoch, turn.round
        self._body, self.answer = (turn, body), None

    def common_length(self, turn: Turn) -> int:
        """Return how many of the turn's tokens (base + tail) the slot holds, counted from the start."""
        keep, tail = turn.base_length, turn.tail
        limit = min(len(self.ids), turn.base_length + len(tail))
        while keep < limit and self.ids[keep] == tail[keep - turn.base_length]:
            keep += 1
        return keep

    def truncate(self, length: int) -> None:
        """Roll the slot back to its first `length` tokens: O(1) on the device."""
        if length == len(self.ids):
            return
        del self.ids[length:], self._hashes[length:]
        self.slot.length = length

    def extend(self, token_ids: Sequence[int]) -> None:
        """Commit tokens whose rows already lie behind the slot's length."""
        if not token_ids:
            return
        self._hashes.extend(prefix_hashes(token_ids, self._hashes[-1] if self._hashes else 0))
        self.ids.extend(token_ids)
        self.slot.length = len(self.ids)


def prefill(session: WorkerSession, tail: Sequence[int]) -> Generator[SequenceInput, Tensor, Sequence[int]]:
    """Forward and commit whole chunks of a long tail; return what is left for the step that needs logits."""
    while len(tail) > MAX_STEP_TOKENS:
        chunk = tail[:MAX_STEP_TOKENS]
        yield SequenceInput(session.slot.index, session.slot.length, chunk)
        session.extend(chunk)
        tail = tail[MAX_STEP_TOKENS:]
    return tail
