"""A model without weights: every KV row is the hash of the prefix it was computed from, so a wrong row is seen.

It stands where a loaded model stands, under the real engines. Knows neither sessions nor the network: who drives it may
say with an entry (`ClaimedEntry`) which rows ought to lie in the slot, and a forward over others is a `Violation`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from specsplit.core.exactness import Exactness
from specsplit.core.ports import ChatMessage, Variables
from specsplit.core.record import record
from specsplit.core.types import SessionParams
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel, Role
from specsplit.sampling.sampler import Sampler

VOCAB_SIZE = 40
START = 1
"""The hash that a row before the first one would hold."""
_BEST, _SECOND = 8.0, 7.0
_NUM_NOISES = 251
_NOISE = torch.rand(_NUM_NOISES, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 2


class Violation(AssertionError):
    """A property that must hold whatever the faults does not."""


class Row(NamedTuple):
    """One KV row: the hash of its prefix, and the hash before its own token."""

    value: int
    before: int


GARBAGE = Row(0, 0)
BLOCK_ROWS = 8
"""Rows by which a slot grows."""


def extend(before: int, token_id: int) -> int:
    """Return the hash of a prefix and one more token; `hash` of integers is the same in every process."""
    return hash((before, token_id))


def row_values(token_ids: Sequence[int], before: int = START) -> list[int]:
    """Return what the rows of `token_ids` ought to hold."""
    values: list[int] = []
    for token_id in token_ids:
        before = extend(before, token_id)
        values.append(before)
    return values


@record
class ClaimedEntry(SequenceInput):
    """An entry that also says what the rows of its session's committed tokens, first to last, must hold."""

    committed: Sequence[int] = ()


class HashCache:
    """Rows of every slot; behind a slot's length the garbage of earlier trees stays, as in the KV cache."""

    can_copy = can_fill = can_return = True
    row_bytes = 16

    def __init__(self, num_slots: int, capacity: int, row_limit: int | None = None) -> None:
        self.num_slots, self.capacity = num_slots, capacity
        self.row_limit = num_slots * capacity if row_limit is None else row_limit
        self.rows = [[GARBAGE] * capacity for _ in range(num_slots)]

    def rows_for(self, num_rows: int) -> int:
        """Return the rows that the first `num_rows` of a slot take, by blocks."""
        return min(-(-num_rows // BLOCK_ROWS) * BLOCK_ROWS, self.capacity)

    def return_rows(self, slot: int, start: int) -> None:
        """Lose the rows of a slot from `start` on."""
        self.rows[slot][start:] = [GARBAGE] * (self.capacity - start)

    @property
    def num_bytes(self) -> int:
        return 16 * self.num_slots * self.capacity

    def copy_rows(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` rows of a slot to another one."""
        self.rows[target][:count] = self.rows[source][:count]
        self.clear_rows(target, count)

    def fill_rows(self, slot: int, count: int) -> None:
        """Write the first `count` rows of a slot, as if of a text of zeros."""
        before = START
        for index in range(count):
            self.rows[slot][index] = Row(extend(before, 0), before)
            before = self.rows[slot][index].value

    def clear_rows(self, slot: int, start: int) -> None:
        """Lose the rows from `start` on that share a block with the row before."""
        stop = self.rows_for(start)
        self.rows[slot][start:stop] = [GARBAGE] * (stop - start)

    def move_rows(self, slot: int, sources: Sequence[int], start: int) -> None:
        """Copy rows `sources` (ascending) of a slot to rows start, start + 1, ... of it, all at once."""
        rows = self.rows[slot]
        rows[start : start + len(sources)] = [rows[source] for source in sources]


class HashRunner:
    """Forwards entries as a Runner does; what it is and how sure it is depends on the row's hash alone.

    A `tie` above 0 lets the two best tokens change places with that chance: a forward that differs by its batch.
    Without one it promises the same bits.
    """

    numerics = "a5"
    revision = 0
    columns = None
    """Its logits are of all tokens."""

    def __init__(self, role: Role, cache: HashCache, *, tie: float = 0.0, seed: int = 0) -> None:
        self.role, self.cache, self.tie = role, cache, tie
        self.exactness: Exactness = "near ties" if tie else "bits"
        self.vocab_size = VOCAB_SIZE
        self.max_pending = 1
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.num_forwards = self.num_tokens = 0
        self.violations: list[Violation] = []
        """Also those that an engine turned into its caller's error."""
        self._rng = random.Random(seed)

    def see_text(self, token_ids: Iterable[int]) -> None:
        """Have no head that follows texts."""

    def forward(self, entries: Sequence[SequenceInput]) -> list[Tensor]:
        """Return per entry fp32 logits [num_logits, V]; writes each entry's rows into its slot.

        Raises:
            Violation: a row it would attend to is not what it ought to be.
        """
        slots = [entry.slot for entry in entries]
        self._require(len(set(slots)) == len(slots), f"rows: two entries of one step share a slot {slots}")
        self.num_forwards += 1
        self.num_tokens += sum(len(entry.token_ids) for entry in entries)
        return [self._logits(self._write(entry)[-entry.num_logits :]) for entry in entries]

    def _write(self, entry: SequenceInput) -> list[int]:
        """Check what the entry sees, write its rows and return their hashes."""
        rows, base, num_rows = self.cache.rows[entry.slot], entry.base_length, entry.num_tree_rows
        self._require(0 < len(entry.token_ids) <= num_rows, "rows: an entry without tokens, or of fewer rows")
        self._require(base + num_rows <= self.cache.capacity, "bounded: rows behind the end of the slot")
        self._check_committed(entry, rows)
        parents = range(-1, num_rows - 1) if entry.parents is None else entry.parents
        first = num_rows - len(entry.token_ids)
        seen: set[int] = set()
        for index, token_id in enumerate(entry.token_ids, first):
            parent = parents[index]
            self._require(-1 <= parent < index, "rows: a parent that is no earlier row")
            self._check_ancestors(rows, base, parents, parent, first, seen)
            before = rows[base + parent].value if base + parent >= 0 else START
            rows[base + index] = Row(extend(before, token_id), before)
        self._check_written(entry, rows)
        return [row.value for row in rows[base + first : base + num_rows]]

    def _check_committed(self, entry: SequenceInput, rows: Sequence[Row]) -> None:
        before = START
        for index, row in enumerate(rows[: entry.base_length]):
            self._require(row.before == before, f"rows: row {index} of the {self.role} does not follow the one before")
            before = row.value
        if isinstance(entry, ClaimedEntry):
            self._require(entry.base_length <= len(entry.committed), "rows: a slot longer than its committed tokens")
            held = [row.value for row in rows[: entry.base_length]]
            self._require(
                held == list(entry.committed[: entry.base_length]),
                f"rows: the {self.role} computes on rows that are not the committed tokens",
            )

    def _check_ancestors(
        self, rows: Sequence[Row], base: int, parents: Sequence[int], at: int, first: int, seen: set[int]
    ) -> None:
        """Check that the rows of earlier steps on the way from `at` to the root are each other's parents."""
        while at >= 0 and at not in seen:
            seen.add(at)
            parent = parents[at]
            before = rows[base + parent].value if base + parent >= 0 else START
            self._require(
                at >= first or rows[base + at].before == before,
                f"rows: row {at} of the {self.role}'s tree is not its parent's child",
            )
            at = parent

    def _check_written(self, entry: SequenceInput, rows: Sequence[Row]) -> None:
        if isinstance(entry, ClaimedEntry):
            held = [row.value for row in rows[: entry.base_length + entry.num_tree_rows]]
            count = min(len(held), len(entry.committed))
            self._require(
                held[:count] == list(entry.committed[:count]),
                f"rows: the {self.role} forwards other tokens than the committed ones",
            )

    def _logits(self, values: Sequence[int]) -> Tensor:
        logits = draft_logits(values) if self.role == "draft" else target_logits(values)
        if self.tie:
            for index, value in enumerate(values):
                if self._rng.random() < self.tie:
                    logits[index] = tied_logits([value])[0]
        return logits

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            violation = Violation(what)
            self.violations.append(violation)
            raise violation


def best_tokens(value: int) -> tuple[int, int]:
    """Return the target's best token after a prefix, and the one that a near tie may put first."""
    best = hash((value, 7)) % VOCAB_SIZE
    return best, (best + 1) % VOCAB_SIZE


def _guesses(value: int) -> tuple[int, int]:
    best, second = best_tokens(value)
    chance = hash((value, 11)) % 1000
    return (best, second) if chance < 700 else (second, best) if chance < 900 else (second, (best + 2) % VOCAB_SIZE)


def _logits_of(values: Sequence[int], tops: Sequence[tuple[int, int]]) -> Tensor:
    logits = _NOISE[[value % _NUM_NOISES for value in values]]  # a copy
    return logits.scatter_(1, torch.tensor(tops), torch.tensor([[_BEST, _SECOND]]).expand(len(tops), 2))


def target_logits(values: Sequence[int]) -> Tensor:
    """Return the target's logits after each prefix, fp32 [N, V]."""
    return _logits_of(values, [best_tokens(value) for value in values])


def tied_logits(values: Sequence[int]) -> Tensor:
    """Return the same with the two best tokens the other way round."""
    return _logits_of(values, [best_tokens(value)[::-1] for value in values])


def draft_logits(values: Sequence[int]) -> Tensor:
    """Return the draft's logits: the target's in seven of ten prefixes, its second token first in most others."""
    return _logits_of(values, [_guesses(value) for value in values])


def picks_along(params: SessionParams, prompt_ids: Sequence[int], token_ids: Sequence[int], logits: Any) -> list[int]:
    """Return what plain decoding picks after the prompt and after each of `token_ids`, given those before it.

    `logits` is `target_logits` or `tied_logits`. Where this equals `token_ids` all along, they are plain decoding's.
    """
    values = row_values([*prompt_ids, *token_ids])[len(prompt_ids) - 1 :]
    sampler = Sampler(params, VOCAB_SIZE, torch.device("cpu"))
    paths = [list(token_ids[:depth]) for depth in range(len(token_ids) + 1)]
    scores = sampler.scores(logits(values), prompt_ids, range(len(values)), paths)
    return cast("list[int]", scores.argmax(-1).tolist())


def plain_tokens(params: SessionParams, prompt_ids: Sequence[int], count: int) -> list[int]:
    """Return what plain decoding says after `prompt_ids`, up to an end-of-sequence token: the truth."""
    token_ids: list[int] = []
    while len(token_ids) < count and not (token_ids and token_ids[-1] in params.eos_ids):
        token_ids.append(picks_along(params, prompt_ids, token_ids, target_logits)[-1])
    return token_ids


class LetterTokenizer:
    """A letter a token."""

    eos_ids: tuple[int, ...] = ()
    vocab_hash = f"no-tokenizer-{VOCAB_SIZE}"

    def encode(self, text: str) -> list[int]:
        return [ord(character) - ord("A") for character in text]

    def encode_messages(
        self, messages: Sequence[ChatMessage], variables: Variables | None = None, *, continues: bool = False
    ) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("A") + token_id) for token_id in token_ids)

    def fallback_byte(self, token_id: int) -> bytes:
        return b""

    token_bytes = None


def hash_model(
    role: Role,
    *,
    max_sessions: int = 2,
    context: int = 96,
    node_limit: int = 16,
    tie: float = 0.0,
    seed: int = 0,
    row_limit: int | None = None,
) -> tuple[LoadedModel, HashRunner]:
    """Return a model that an engine takes as it is, and its runner; all slots together hold up to `row_limit` rows."""
    runner = HashRunner(role, HashCache(max_sessions, context + node_limit, row_limit), tie=tie, seed=seed)
    model = LoadedModel(
        name=f"hash-{role}",
        role=role,
        runner=cast("Any", runner),
        max_sessions=max_sessions,
        tokenizer=None,
        context=context,
        node_limit=node_limit,
        eos_ids=(),
        threads=None,
    )
    return model, runner
