"""A target over a chain of stages with ends = stages: picks are made behind the last layer, logits never travel.

With ends = coordinator the logits are this process's own, so an engine over a ChainRunner lacks nothing but limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from typing import cast

from torch import Tensor

from specsplit.core.errors import InvalidPacket
from specsplit.core.types import Proposal, SessionParams, TokenLogProb
from specsplit.engine.executor import Executor
from specsplit.engine.measure import Probe
from specsplit.engine.prompt_budget import MAX_STEP_ROWS
from specsplit.engine.session import TTL_S, WorkerSession
from specsplit.engine.slots import Loan, borrowed_slot
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.attention.paths import slot_rows
from specsplit.model.runner import Runner
from specsplit.sampling.pick import NOT_A_NUMBER
from specsplit.sampling.sampler import Sampler
from specsplit.stages.chain.coordinator_ends import CoordinatorEnds
from specsplit.stages.chain.runner import ChainOptions, ChainRunner, ChainShape
from specsplit.stages.packet import HeadRequest, PacketSession
from specsplit.stages.ports import SlotReleaser, StageLink
from specsplit.stages.shard.chain_model import ChainModel
from specsplit.target.engine import TargetEngine
from specsplit.target.score import no_numbers


class ChainProbe(Probe):
    """Measures and tries stages of which the last one picks."""

    head_request = HeadRequest(SessionParams())

    def are_numbers(self, logits: Tensor) -> bool:
        return NOT_A_NUMBER not in _answer(logits).picks


class CoordinatorTarget(TargetEngine):
    """A target engine over a chain, whose runner keeps to the limits of steps with what it sends again."""

    def limit_steps(self, step_tokens: int | None, prefill_chunk: int | None) -> None:
        super().limit_steps(step_tokens, prefill_chunk)
        cast(ChainRunner, self._model.runner).limit_steps(step_tokens)


class ChainTarget(CoordinatorTarget):
    """A target engine whose sampler is applied by the stage with the head, as every entry requests it."""

    # With ends = stages the "logits" of an entry are the answer's session, which has picks or log-probabilities.

    _probe = ChainProbe()
    _head_request = HeadRequest

    def _score(
        self, prompt: Sequence[int], scored: Sequence[int], params: SessionParams, loan: Loan
    ) -> Generator[SequenceInput, Tensor, tuple[TokenLogProb, ...]]:
        token_ids = [*prompt, *scored[:-1]]  # the last token's own logits are not needed
        values: list[TokenLogProb] = []
        sessions = self._sessions
        with borrowed_slot(sessions.slots, loan, prompt, token_ids, sessions.open_sessions) as slot:
            start = slot.length
            while start < len(token_ids):
                chunk = token_ids[start : start + MAX_STEP_ROWS]
                num_scored = max(0, min(len(chunk), start + len(chunk) - len(prompt) + 1))
                wanted = tuple(scored[len(values) : len(values) + num_scored])
                request = HeadRequest(params, wanted) if wanted else None
                values += _answer((yield SequenceInput(slot.index, start, chunk, None, num_scored, request))).log_probs
                # A step may have taken the first ones only.
                start = len(prompt) - 1 + len(values) if wanted else start + len(chunk)
            if not all(math.isfinite(value.log_prob) for value in values):
                raise no_numbers(self._model)
        return tuple(values)

    def _picks(self, session: WorkerSession, logits: Tensor, proposal: Proposal, tree: Sequence[int]) -> list[int]:
        """Return the picks that the last stage made at the root and at every node; they stand where logits would."""
        picks = list(_answer(logits).picks)
        if NOT_A_NUMBER in picks:
            raise no_numbers(self._model)
        return picks

    def _log_probs(
        self, sampler: Sampler, logits: Tensor, accepted: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[TokenLogProb, ...]:
        """Return what the last stage answered for the tokens that the verdict emits."""
        log_probs = _answer(logits).log_probs
        if len(log_probs) != len(token_ids):
            raise InvalidPacket("The last stage answered log-probabilities of other tokens than the verdict's.")
        return log_probs


def _answer(logits: Tensor) -> PacketSession:
    return cast(PacketSession, logits)


def chain_target(
    model: ChainModel,
    link: StageLink,
    ends: CoordinatorEnds | None = None,
    *,
    executor: Executor | None = None,
    ttl_s: float = TTL_S,
    options: ChainOptions | None = None,
) -> tuple[TargetEngine, ChainRunner]:
    """Return a target over the chain behind `link`, and its runner, whose statistics count what was sent again.

    It is called on the event loop on which the links live. `ends` are this process's own with ends = coordinator, None
    with ends = stages. The engine computes on `executor`, or on a thread of its own. The loop may drive it if there are
    several stages: then it sends steps off, where with one stage a forward would wait for its own loop. Its sessions
    are freed when they were not used for `ttl_s`, and the stages forget what freed slots held.
    """
    loop = asyncio.get_running_loop()
    assert model.dtype is not None, "the stages have said what they compute in"
    capacity = slot_rows(model.context + model.node_limit)
    shape = ChainShape(model.max_sessions, model.hidden_size, model.vocab_size, model.dtype, capacity)
    runner = ChainRunner(link, loop, shape, ends, options)
    # An engine uses of a Runner only what a ChainRunner has, too: forward, begin, max_pending, cache.move_rows, device,
    # dtype, vocab_size, is_recorded, exactness, numerics and revision. The cast says so where a protocol would.
    loaded, kind = model.loaded(cast(Runner, runner)), CoordinatorTarget if ends else ChainTarget
    return kind(loaded, executor, ttl_s=ttl_s, on_release=_slot_release(runner, link, loop)), runner


def _slot_release(runner: ChainRunner, link: StageLink, loop: asyncio.AbstractEventLoop) -> Callable[[int], None]:
    """Return the function that forgets a slot that has become free, here at once and in the stages soon."""

    def release(slot: int) -> None:
        epoch = runner.cache.slots[slot].end()
        if epoch is not None and isinstance(link, SlotReleaser):
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the coordinator gone for its stages
                loop.call_soon_threadsafe(link.end, slot, epoch)

    return release
