"""Workers without weights, over the tiny language of tests/language.py.

They honour the whole session contract, so what holds over them holds because of the orchestrator, not by their grace.
A slot is read back, never the caller's arguments: wrong tokens in a slot give a wrong text.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from specsplit.core.errors import ContextExceeded, InvalidRequest, SlotBehind, StaleEpoch, StaleRound
from specsplit.core.tree import check_proposal, parent_indices
from specsplit.core.types import (
    ROOT,
    Budget,
    Identity,
    Proposal,
    Scores,
    SessionParams,
    StreamLimits,
    Timings,
    TokenizerFiles,
    Turn,
    Verdict,
    prefix_hash,
    prefix_hashes,
)
from specsplit.target.stream import TargetLimits, TargetStream
from specsplit.target.stream_lookup import LookupKnowledge
from tests.support.fake_tree import FakeTree
from tests.support.language import (
    EOS,
    VOCAB_SIZE,
    Biases,
    FakeTokenizer,
    Guess,
    adversarial_guess,
    empty_guess,
    good_guess,
    log_probs,
    next_token,
    perfect_guess,
    plain_tokens,
    random_guess,
    token_log_prob,
)

__all__ = [
    "EOS",
    "VOCAB_SIZE",
    "FakeDraft",
    "FakeTarget",
    "FakeTokenizer",
    "Faults",
    "adversarial_guess",
    "empty_guess",
    "good_guess",
    "next_token",
    "perfect_guess",
    "plain_tokens",
    "random_guess",
]


@dataclass
class FakeSlot:
    """One session in a worker; invariant: len(ids) == len(hashes)."""

    ids: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    epoch: int = -1
    round: int = -1
    opening: SessionParams | None = None
    body: object = None
    answer: object = None
    highest_node: int = 0
    tree: FakeTree | None = None

    def truncate(self, length: int) -> None:
        del self.ids[length:], self.hashes[length:]

    def extend(self, token_ids: Sequence[int]) -> None:
        self.hashes.extend(prefix_hashes(token_ids, self.hashes[-1] if self.hashes else 0))
        self.ids.extend(token_ids)


@dataclass
class Faults:
    """When a worker loses its slots, fails, or waits; calls count from 0.

    `evict` is the chance that the slot is gone when a call comes. At call `fail_at` `error` is raised. Every call
    first gives the event loop `pauses` turns, and waits for `gate` if there is one.
    """

    evict: float = 0.0
    seed: int = 0
    fail_at: int = -1
    error: Exception = field(default_factory=lambda: RuntimeError("the worker died"))
    pauses: int = 1
    gate: asyncio.Event | None = None


class _FakeWorker:
    """The part of the contract that both workers share."""

    role: str
    min_tail = 0
    max_nodes = 64

    def __init__(self, faults: Faults | None = None, *, context: int = 512, vocab_hash: str = "bytes") -> None:
        self.faults = faults or Faults()
        self.context, self.vocab_hash = context, vocab_hash
        self.slots: dict[str, FakeSlot] = {}
        self.turns: list[Turn] = []
        self.num_calls = self.num_behind = self.num_forwards = 0
        self.num_tokens = 0
        """Tokens that had to be computed, those of trees included."""
        self.num_under_way = 0
        self._rng = random.Random(self.faults.seed)

    async def ping(self) -> Identity:
        return Identity(
            role="target" if self.min_tail else "draft",
            model=f"fake-{type(self).__name__}",
            vocab_size=VOCAB_SIZE,
            vocab_hash=self.vocab_hash,
            context=self.context,
            max_nodes=self.max_nodes,
        )

    async def close(self, session: str) -> None:
        await asyncio.sleep(0)
        self.slots.pop(session, None)

    async def _pause(self, turn: Turn) -> None:
        """Wait as the faults say, before anything changes: a cancelled call leaves no trace."""
        call, self.num_calls = self.num_calls, self.num_calls + 1
        self.num_under_way += 1
        try:
            for _ in range(self.faults.pauses):
                await asyncio.sleep(0)
            if self.faults.gate is not None:
                await self.faults.gate.wait()
        finally:
            self.num_under_way -= 1
        self.turns.append(turn)
        if call == self.faults.fail_at:
            raise self.faults.error
        if self._rng.random() < self.faults.evict:
            self.slots.pop(turn.session, None)

    def _begin(self, turn: Turn, body: object) -> tuple[FakeSlot, object | None]:
        """Apply the contract; return the slot cut to what it shares with the turn, or the cached answer of a repeat."""
        if not self.min_tail <= len(turn.tail) <= self.context - turn.base_length:
            raise InvalidRequest("the tail is empty or longer than the context", param="tail")
        if any(not 0 <= token_id < VOCAB_SIZE for token_id in turn.tail):
            raise InvalidRequest("the tail has a token outside the vocabulary", param="tail")
        slot = self.slots.get(turn.session)
        if slot is None:
            self._require_held(turn, turn.base_length == 0 and turn.opening is not None, have=0)
            slot = self.slots[turn.session] = FakeSlot()
        if turn.epoch < slot.epoch:
            raise StaleEpoch("a later epoch was seen")
        if turn.epoch == slot.epoch and turn.round <= slot.round:
            if turn.round < slot.round:
                raise StaleRound("a later round was seen")
            if body != slot.body:
                raise InvalidRequest("the same round with another body", param="round")
            return slot, slot.answer
        base = turn.base_length
        self._require_held(turn, base <= len(slot.ids), have=len(slot.ids))
        self._require_held(turn, base == 0 or slot.hashes[base - 1] == turn.base_hash, have=0)
        if turn.epoch > slot.epoch:
            self._require_held(turn, turn.opening is not None, have=0)
            slot.highest_node, slot.tree = 0, None
        slot.epoch, slot.round, slot.body = turn.epoch, turn.round, body
        slot.opening = turn.opening or slot.opening
        return slot, None

    def _require_held(self, turn: Turn, is_held: bool, have: int) -> None:
        if not is_held:
            self.num_behind += 1
            raise SlotBehind(have)


def _common_length(slot: FakeSlot, turn: Turn) -> int:
    """Return how many of base + tail the slot holds."""
    keep = turn.base_length
    for have, want in zip(slot.ids[keep:], turn.tail, strict=False):
        if have != want:
            break
        keep += 1
    return keep


class FakeTarget(_FakeWorker):
    """A Verifier; with `trim` it scores only the first nodes of a larger tree."""

    min_tail = 1
    next_token = staticmethod(next_token)

    def __init__(
        self,
        faults: Faults | None = None,
        *,
        trim: int | None = None,
        max_nodes: int = 64,
        context: int = 512,
        vocab_hash: str = "bytes",
    ) -> None:
        super().__init__(faults, context=context, vocab_hash=vocab_hash)
        self.trim, self.max_nodes = trim, max_nodes
        self.proposals: list[Proposal] = []
        self.lookup = LookupKnowledge()

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        await self._pause(turn)
        slot, answer = self._begin(turn, (turn, proposal))
        if isinstance(answer, Verdict):
            return answer
        length = turn.base_length + len(turn.tail)
        check_proposal(
            proposal, vocab_size=VOCAB_SIZE, max_nodes=self.max_nodes, max_depth=max(self.context - length, 0)
        )
        parents = parent_indices(proposal)
        if len(proposal) and (proposal.first_node <= slot.highest_node or proposal.root_position != length - 1):
            raise InvalidRequest("the tree is numbered or placed wrongly", param="proposal")
        slot.highest_node = proposal.first_node + len(proposal) - 1
        self.proposals.append(proposal)
        slot.truncate(keep := min(_common_length(slot, turn), length - 1))
        slot.extend(turn.tail[keep - turn.base_length :])
        self.num_tokens += length - keep + len(proposal.token_ids[: self.trim])
        slot.answer = verdict = self._walk(slot, proposal, parents)
        return verdict

    def open_stream(self, turn: Turn, limits: StreamLimits) -> TargetStream:
        async def leave(keeps_slot: bool) -> None:
            if not keeps_slot:
                await self.close(turn.session)

        return TargetStream(self.verify, leave, turn, limits, self.limits_of(turn))

    def limits_of(self, turn: Turn) -> TargetLimits:
        """Return what bounds a stream that begins with `turn`; as with every target, it looks up nodes itself."""

        def text() -> Sequence[int]:
            slot = self.slots.get(turn.session)
            return slot.ids[: turn.base_length] if slot is not None else ()

        return TargetLimits(self.context, self.max_nodes, lookup=self.lookup, text=text)

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Biases = (),
        top_logprobs: int = 0,
        keep_for: str | None = None,
    ) -> Scores:
        await asyncio.sleep(0)
        ids = [*prompt, *scored]
        if not prompt or not scored or not all(0 <= token_id < VOCAB_SIZE for token_id in ids):
            raise InvalidRequest("there is nothing to score, or a token outside the vocabulary", param="scored")
        if len(ids) > self.context:
            raise ContextExceeded("the tokens do not fit the context", param="scored")
        hashes = prefix_hashes(ids)
        positions = range(len(prompt), len(ids))
        values = [log_probs(hashes[at - 1], ids[:at], logit_bias) for at in positions]
        tokens = tuple(map(token_log_prob, values, scored, [top_logprobs] * len(scored)))
        rows = len(ids) - 1
        timings = Timings(2.0, 0.5, 1.0, num_forwards=1, num_tokens=rows, step_rows=rows, sampling_ms=0.25)
        return Scores(tokens, timings)

    async def tokenizer_files(self, known_hash: str = "") -> TokenizerFiles:
        await asyncio.sleep(0)
        files = {} if known_hash == FakeTokenizer.hash else {"tokenizer.json": b"{}"}
        return TokenizerFiles(hash=FakeTokenizer.hash, eos_ids=FakeTokenizer.eos_ids, files=files)

    def _walk(self, slot: FakeSlot, proposal: Proposal, parents: Sequence[int]) -> Verdict:
        assert slot.opening is not None
        scored = range(len(proposal))[: self.trim]
        at, accepted, token_ids, emitted = -1, [], [], []
        opening, top = slot.opening, slot.opening.top_logprobs
        while True:
            pick = self.next_token(opening, slot.hashes[-1], slot.ids)
            if top is not None:
                values = log_probs(slot.hashes[-1], slot.ids, opening.sampling.logit_bias)
                emitted.append(token_log_prob(values, pick, top))
            token_ids.append(pick)
            at = next((node for node in scored if parents[node] == at and proposal.token_ids[node] == pick), -2)
            if at < 0:
                break
            accepted.append(at)
            slot.extend([pick])
        self.num_forwards += 1
        return Verdict(
            accepted=tuple(proposal.first_node + node for node in accepted),
            token_ids=tuple(token_ids),
            length=len(slot.ids),
            verified=tuple(proposal.first_node + node for node in scored),
            timings=Timings(num_forwards=1, device_ms=1.0),
            log_probs=tuple(emitted),
        )


class FakeDraft(_FakeWorker):
    """A Drafter over a guess; `oversize` multiplies nodes and depth beyond what the budget allows.

    `estimates` are the log-probabilities that it claims by rank; the likeliest nodes grow first.
    """

    def __init__(
        self,
        guess: Guess = good_guess,
        faults: Faults | None = None,
        *,
        oversize: int = 1,
        context: int = 512,
        vocab_hash: str = "bytes",
        estimates: tuple[float, ...] = (-0.5, -0.5, -0.5),
    ) -> None:
        super().__init__(faults, context=context, vocab_hash=vocab_hash)
        self.guess, self.oversize, self.estimates = guess, oversize, estimates
        self.known_nodes: list[int] = []

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        await self._pause(turn)
        self.known_nodes.append(known_nodes)
        slot, answer = self._begin(turn, (turn, known_nodes, budget))
        if isinstance(answer, Proposal):
            return answer
        keep = _common_length(slot, turn)
        new = turn.tail[keep - turn.base_length :]
        is_extended = keep == len(slot.ids) and slot.tree is not None
        slot.tree = slot.tree.reroot(new) if is_extended and slot.tree is not None else FakeTree()
        slot.truncate(keep)
        slot.extend(new)
        slot.highest_node = max(slot.highest_node, known_nodes)
        self.num_tokens += len(new)
        num_levels = self._grow(slot, slot.tree, budget)
        limit = budget.max_new_nodes * self.oversize
        slot.answer = proposal = self._proposal(slot, slot.tree, known_nodes, limit, num_levels)
        return proposal

    def _grow(self, slot: FakeSlot, tree: FakeTree, budget: Budget) -> int:
        """Expand nodes in order of their numbers until the budget is used up; return the number of levels it took."""
        assert slot.opening is not None
        room, max_depth, levels = budget.max_new_nodes * self.oversize, budget.max_depth * self.oversize, set[int]()
        frontier = [number for number in (ROOT, *tree.nodes) if number not in tree.grown]
        while frontier and room > 0:
            at = min(frontier, key=lambda number: (-tree.path_log_prob(number), number))
            frontier.remove(at)
            _, token, depth, prefix = tree.nodes.get(at, (0, -1, 0, slot.hashes[-1]))
            if depth >= max_depth or token in slot.opening.eos_ids:
                continue
            levels.add(depth)
            guesses = self.guess(slot.opening, prefix, [*slot.ids[-3:], *tree.path(at)])[: budget.max_branching]
            held = {child for parent, child, *_ in tree.nodes.values() if parent == at}
            missing = [child for child in guesses if child not in held]
            if len(missing) <= room:
                tree.grown.add(at)
            for child in missing[:room]:
                slot.highest_node += 1
                room -= 1
                tree.nodes[slot.highest_node] = (at, child, depth + 1, prefix_hash([child], prefix))
                tree.log_probs[slot.highest_node] = self.estimates[min(guesses.index(child), len(self.estimates) - 1)]
                frontier.append(slot.highest_node)
        self.num_forwards += len(levels)
        return len(levels)

    def _proposal(self, slot: FakeSlot, tree: FakeTree, known_nodes: int, limit: int, num_levels: int) -> Proposal:
        new = [number for number in tree.nodes if number > known_nodes]
        if new and new != list(range(new[0], new[0] + len(new))):  # some that were offered before are gone
            numbers = dict(zip(new, range(slot.highest_node + 1, slot.highest_node + 1 + len(new)), strict=True))
            slot.highest_node += len(new)
            tree.renumber(numbers)
            new = list(numbers.values())
        new = new[:limit]
        return Proposal(
            first_node=new[0] if new else slot.highest_node + 1,
            root_position=len(slot.ids) - 1,
            token_ids=tuple(tree.nodes[number][1] for number in new),
            parents=tuple(tree.nodes[number][0] for number in new),
            log_probs=tuple(tree.log_probs[number] for number in new),
            timings=Timings(num_forwards=num_levels, device_ms=0.5),
        )
