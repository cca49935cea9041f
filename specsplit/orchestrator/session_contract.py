"""The orchestrator's half of the session contract: token history, epochs, rounds, base lengths, replay.

Both clients keep one `SessionContract` each over one shared `TokenHistory`. Knows neither draft nor target.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from zlib import crc32

from specsplit.core.errors import AccessDenied, SlotBehind, SpecSplitError, StaleEpoch, StaleRound, WorkerFailed
from specsplit.core.types import Identity, SessionParams, Timings, Turn, prefix_hash
from specsplit.orchestrator.degraded import ReplayReason, WorkerRole
from specsplit.orchestrator.events import RequestEvents
from specsplit.orchestrator.wire import Traffic
from specsplit.speculation.constants import LONG_TEXT, MAX_CAUGHT_UP_TOKENS, WINDOW_ROOM

MAX_RAISES = 8
"""Epochs that one call may go through; a worker that finds each of them stale does not keep the contract."""
MAX_BEHIND = 8
"""Times in a row that a worker may lack tokens: it may have been evicted again while the rest was on its way."""
CONTRACT_ERRORS = (SlotBehind, StaleRound, StaleEpoch, AccessDenied)
"""Errors by which a worker says that it holds another state than the turn claims; see docs/protocol.md."""


def session_key() -> str:
    """Return a key for a session, which nobody else can guess."""
    return secrets.token_hex(16)


class TokenHistory:
    """The token ids of a session, prompt first, and their prefix hashes. It is the only truth about the text."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.ids, self.num_prompt = list(prompt_ids), len(prompt_ids)
        self.largest = max(prompt_ids, default=0)
        """The largest of the ids; a draft whose vocabulary has fewer cannot follow."""
        self.hashes: list[int] = []
        """`hashes[n]` is the prefix hash of the prompt and n tokens behind it; empty as long as there are none."""

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        hashes = self.hashes or [prefix_hash(self.ids)]
        for token_id in token_ids:
            hashes.append(crc32(token_id.to_bytes(4, "little"), hashes[-1]))
        self.hashes = hashes
        self.ids.extend(token_ids)
        self.largest = max(self.largest, 0, *token_ids)

    def prefix_hash(self, length: int) -> int:
        """Return the prefix hash of the first `length` tokens; those of parts of the prompt are not kept."""
        known = length - self.num_prompt
        return self.hashes[known] if known >= 0 and self.hashes else prefix_hash(self.ids[:length])


class SessionContract:
    """One session's state towards one worker.

    Invariant: the worker has executed every round of this epoch that it answered, so it holds at least `num_held`
    committed tokens unless it says otherwise with SlotBehind. Retry, replay after a restart and failover are the same
    operation: the next turn sends `[num_held | committed)` as its tail.
    """

    def __init__(
        self, role: WorkerRole, session: str, history: TokenHistory, params: SessionParams, events: RequestEvents
    ) -> None:
        self.session = session
        self.history = history
        self.params = params
        self.epoch = 1
        self.round = 0
        self.num_held = 0
        self.is_open = False
        """Whether the worker knows the session's parameters in this epoch."""
        self.traffic = Traffic()
        """Bytes of the answered calls."""
        self.num_behind = 0
        """SlotBehind answers since the last one that was none; the clients set it back."""
        self._role: WorkerRole = role
        self.events = events
        self._has_unreported_raise = False

    @property
    def has_begun(self) -> bool:
        """Whether the worker was ever sent a turn."""
        return self.round > 0 or self.epoch > 1

    @property
    def num_to_read(self) -> int:
        """Committed tokens that the worker is not known to hold."""
        return len(self.history.ids) - self.num_held

    @property
    def is_far_behind(self) -> bool:
        """Whether the worker has to read so much text that it does not keep to its usual time."""
        return self.num_to_read > MAX_CAUGHT_UP_TOKENS

    @property
    def lacks_long_text(self) -> bool:
        """Whether that is so much that the reading is weighed apart from its rounds."""
        return self.num_to_read >= LONG_TEXT

    def next_turn(
        self,
        params: SessionParams | None = None,
        *,
        time_left_s: float | None = None,
        waits: bool = True,
    ) -> Turn:
        """Return the next turn, with everything that the worker is not known to hold.

        If the turn has to open the session, `params` replace those of the session, and `time_left_s` is what is left
        of the request's deadline; it may wait for a slot until then, unless it is to be refused at once.
        """
        # [ held by the worker | tail: sent with this turn ]
        # 0                num_held                 committed
        history, num_held = self.history, self.num_held
        known = num_held - history.num_prompt
        self.round += 1
        if self._has_unreported_raise:
            self._has_unreported_raise = False
            self.events.replay(self._role, "epoch_raised", 0)
        return Turn(
            session=self.session,
            epoch=self.epoch,
            round=self.round,
            base_length=num_held,
            base_hash=history.hashes[known] if known >= 0 and history.hashes else history.prefix_hash(num_held),
            tail=tuple(history.ids[num_held:]),
            opening=None if self.is_open else params or self.params,
            max_wait_s=time_left_s if waits else 0.0,
            time_left_s=time_left_s,
        )

    def count_bytes(self, timings: Timings) -> None:
        """Count the bytes of an answered call."""
        sent_bytes = self.traffic.sent_bytes + timings.sent_bytes
        self.traffic = Traffic(sent_bytes, self.traffic.received_bytes + timings.received_bytes)

    def fall_back(self, believed: int, behind: SlotBehind) -> None:
        """Believe a worker that says how little it holds of `believed` tokens.

        Raises:
            WorkerFailed: it lacks what it was just sent, again and again, so the fault is its own.
        """
        # A worker that never agrees must not make this go on for ever.
        self.num_behind += 1
        if believed == 0 or self.num_behind > MAX_BEHIND:
            raise WorkerFailed(
                f"{behind.peer} says again and again that it lacks tokens which it was sent; "
                "it is broken, or not what it seems: restart it, or use another one."
            ) from behind
        # One token less than believed at most: a worker that claims more has no reason to complain.
        self.num_held = min(behind.have, believed - 1)
        self.is_open = False
        reason: ReplayReason = "slot_behind" if self.num_held else "slot_lost"
        if behind.is_preempted:
            reason = "preempted"
        self.events.replay(self._role, reason, believed - self.num_held)

    def change_key(self, error: SpecSplitError) -> None:
        """Go on under another key if the worker says that the session is another identity's.

        It says so when our certificate was replaced by one with another name: sessions stay with the name before.
        """
        if isinstance(error, AccessDenied):
            self.events.replay(self._role, "slot_lost", self.num_held)
            self.session, self.num_held = session_key(), 0

    def raise_epoch(self, *, is_reported: bool = True) -> None:
        """Begin a new epoch; its tokens stay where they are.

        It is reported as a replay if it is not known what the worker executed in the last one. An epoch that begins as
        a matter of course is not.
        """
        # Epoch and round together name a turn, so rounds may count anew without naming an old turn again.
        self.epoch += 1
        self.round = 0
        self.is_open = False
        self._has_unreported_raise |= is_reported


class DraftContract(SessionContract):
    """The contract with a draft, which may have no more than a window of a long text."""

    def __init__(self, session: str, history: TokenHistory, params: SessionParams, events: RequestEvents) -> None:
        super().__init__("draft", session, history, params, events)
        self.window = 0
        """Tokens of the text that the draft has at most; 0 if it has all."""
        self.num_skipped = 0
        """Those that it had left out when it answered last."""

    def set_window(self, draft: Identity | None) -> None:
        """Go by what the draft says of itself."""
        self.window = draft.context if draft is not None and draft.has_window else 0

    @property
    def num_to_read(self) -> int:
        """Tokens that the draft reads before its next tree: those that it lacks, or the end of the text anew."""
        num_tokens, window = len(self.history.ids), self.window
        num_left = self.params.prompt_length + self.params.max_tokens - num_tokens
        if not window or num_tokens - self.num_skipped + min(WINDOW_ROOM, num_left) <= window:
            return min(num_tokens - self.num_held, window or num_tokens)
        return min(num_tokens, window // 2)

    @property
    def is_far_behind(self) -> bool:
        """Whether it has to read much, or the window moves: the draft is to read that to its end."""
        return super().is_far_behind or self.num_to_read > len(self.history.ids) - self.num_held
