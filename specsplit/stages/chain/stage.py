"""One stage of a chain: hidden states in, its layers, hidden states (or picks) out. Implements the Stage port.

It owns the contents of its KV slots and nothing else: the coordinator knows which session a slot serves, which stage
follows and how a lost row is computed again. With ends = coordinator it never sees a token id.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specsplit.core.errors import InvalidRequest, InvalidSettings, StageBehind
from specsplit.engine.batch import at_once
from specsplit.engine.cancellation import to_its_end
from specsplit.engine.executor import Executor
from specsplit.engine.scheduler import WorkQueue
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import dtype_name
from specsplit.stages.chain.head_output import empty_answer, log_probs_of, picks_of, search_for, wanted_rows
from specsplit.stages.chain.loop_share import LoopShare
from specsplit.stages.chain.packet_check import check_packet, check_slot, not_finite
from specsplit.stages.chain.slot_transfer import export_slot, import_slot, slot_bytes
from specsplit.stages.chain.stage_slot import StageSlot, emptied_slot
from specsplit.stages.identity import StageIdentity
from specsplit.stages.packet import COORDINATOR, Packet, PacketSession
from specsplit.stages.ports import StageStatistics
from specsplit.stages.shard.loader import LoadedShard
from specsplit.stages.shard.payload import from_payload, payload_type, to_payload
from specsplit.stages.slot_state import SlotState
from specsplit.telemetry import spans


class StageEngine:
    """Stage `index` of a chain of `num_stages`, over one shard; takes packets in the order in which they come."""

    def __init__(
        self,
        shard: LoadedShard,
        *,
        index: int = 0,
        num_stages: int = 1,
        device: Executor | None = None,
        at_once_s: float = 0.0,
    ) -> None:
        """Compute packets of a few rows on the event loop where the last one took less than `at_once_s`."""
        if shard.spec.is_empty:
            raise InvalidSettings("A stage of a chain needs at least one layer.")
        self.shard, self.index, self.num_stages = shard, index, num_stages
        self.statistics = StageStatistics()
        self._slots = [StageSlot(slot) for slot in range(shard.max_sessions)]
        self._dtype = payload_type(shard.runner.dtype)
        self._worker = WorkQueue(shard.runner, name="stage", threads=shard.threads, executor=device)
        self._loop_share = LoopShare(at_once_s, shard.threads)

    @property
    def identity(self) -> StageIdentity:
        """Return who this stage is to a coordinator."""
        return identity_of(self.shard)

    @property
    def is_well(self) -> bool:
        """Whether the device computes."""
        return self._worker.is_well

    @property
    def is_alive(self) -> bool:
        """Whether it may ever be well again."""
        return self._worker.is_alive

    @property
    def num_rows(self) -> list[int]:
        """Return the rows that each slot holds."""
        return [slot.num_rows for slot in self._slots]

    def check_integrity(self) -> None:
        """Assert that a slot without rows keeps nothing of the session that had it."""
        for slot in self._slots:
            assert slot.num_rows or slot.is_empty, f"slot {slot.index} has no rows and still keeps something"

    async def place(self, index: int, num_stages: int) -> None:
        """Take position `index` in a chain of `num_stages`, from the next packet on."""

        # Positions change on the device thread, between two packets, so no packet sees half a change.
        def take_position() -> None:
            self.index, self.num_stages = index, num_stages

        await to_its_end(self._run(take_position))

    async def forward(self, packet: Packet) -> Packet:
        """Apply the packet's keep-list, write its rows and return the packet for the next stage."""
        return await self._run(self._loop_share.measuring(self._forward, packet))

    def forward_now(self, packet: Packet) -> Packet | None:
        """Do what `forward` does without a turn of the event loop; None if it takes too long for that."""
        if not self._loop_share.takes(packet.num_tokens) or any(map(self._gives_back, packet.sessions)):
            return None
        return self._worker.do_now(self._loop_share.measuring(self._forward, packet))

    def _gives_back(self, session: PacketSession) -> bool:
        has_slot = session.slot < len(self._slots)
        return has_slot and self._slots[session.slot].gives_back(session, self.shard.runner.cache)

    async def end(self, slot: int, epoch: int | None = None) -> None:
        """Forget what a slot holds, all of it or until the end of an epoch; also if the caller is cancelled."""
        check_slot(slot, len(self._slots))

        def forget() -> None:
            # With the next epoch's number, late packets of the session that has ended are refused as stale.
            if epoch is None or self._slots[slot].epoch <= epoch:
                self._slots[slot] = emptied_slot(self.shard.runner.cache, slot, -1 if epoch is None else epoch + 1)

        await to_its_end(self._run(forget))

    async def reset(self) -> None:
        """Forget what all slots hold, for a coordinator that begins."""

        def forget() -> None:
            self._slots = [emptied_slot(self.shard.runner.cache, slot.index) for slot in self._slots]

        await to_its_end(self._run(forget))

    async def export_kv(self, slot: int) -> SlotState:
        """Return what a slot holds, the rows of its last step included, and nothing behind them."""
        check_slot(slot, len(self._slots))
        return await self._run(lambda: export_slot(self.shard, self._slots[slot]))

    async def import_kv(self, state: SlotState) -> None:
        """Take over what the same layers held in a slot elsewhere."""
        check_slot(state.slot, len(self._slots))
        await self._run(lambda: import_slot(self.shard, self._slots[state.slot], state))

    async def aclose(self) -> None:
        """Take no more packets."""
        await self._worker.close()

    async def _run(self, action: Any) -> Any:
        with self._loop_share.thread_works():
            result, _ = await self._worker.run(None, at_once(action))
        return result

    # The methods below run on the device thread, or on the event loop while that has nothing to do.

    @torch.inference_mode()
    def _forward(self, packet: Packet) -> Packet:
        began_s, began_ns = time.perf_counter(), time.time_ns() if spans.is_on else 0
        check_packet(packet, self.shard, self.index)
        hidden = self._hidden(packet)
        # All sessions are checked before the first slot changes, so that a refused packet leaves every slot as it was.
        for session in packet.sessions:
            self._slots[session.slot].check(session)
        have: dict[int, int] = {}
        for session in packet.sessions:
            held = self._slots[session.slot].admit(session, self.shard.runner.cache)
            if held is not None:
                have[session.slot] = held
        # Slots that are behind are reported together: one packet back tells the coordinator all it has to send again.
        if have:
            self.statistics.num_behind += 1
            raise StageBehind(have)
        try:
            entries = [self._entry(session) for session in packet.sessions]
            rows = self.shard.runner.rows(entries, hidden)
        except InvalidRequest as error:  # nothing else is left to refuse behind `check_packet`
            raise not_finite(f"Stage {packet.stage_from}", self.shard) from error
        for session in packet.sessions:
            self._slots[session.slot].write(session, packet.request_id)
        following = self._following(packet, entries, rows)
        self._worker.scheduler.health.has_succeeded = True  # no batch of its own, so the scheduler cannot tell
        self.statistics.add(packet.num_tokens, len(packet.sessions), time.perf_counter() - began_s)
        if spans.is_on:
            _record(packet, self.index, began_ns)
        return following

    def _hidden(self, packet: Packet) -> Tensor | None:
        """Return the packet's hidden states [T, H], None where token ids enter."""
        if self.shard.spec.has_embedding:
            return None
        return from_payload(packet.payload, self.shard.runner.dtype, packet.num_rows, self.shard.hidden_size)

    def _entry(self, session: PacketSession) -> SequenceInput:
        token_ids = session.token_ids if self.shard.spec.has_embedding else [0] * session.num_tokens
        search = search_for(session.head_request, self.shard.runner.device) if self.shard.spec.has_head else None
        return SequenceInput(session.slot, session.start, token_ids, session.parents, session.num_logits, search)

    def _following(self, packet: Packet, entries: Sequence[SequenceInput], rows: Tensor) -> Packet:
        """Return the packet for the next stage with the hidden states of all rows; from the last one, the answer."""
        to, sessions = self.index + 1, packet.sessions
        sent: Tensor | None = rows
        if to == self.num_stages:
            to = COORDINATOR
            has_head = self.shard.spec.has_head
            sessions = (
                self._answers(packet, self.shard.runner.split(entries, rows))
                if has_head
                else tuple(map(empty_answer, sessions))
            )
            sent = None if has_head else rows[wanted_rows(packet)]
        return Packet(
            request_id=packet.request_id,
            step_kind=packet.step_kind,
            hidden_size=packet.hidden_size,
            dtype=self._dtype,
            stage_from=self.index,
            stage_to=to,
            sessions=sessions,
            payload=b"" if sent is None else to_payload(sent),
            layout=packet.layout,
            traces=packet.traces if to != COORDINATOR else (),
        )

    def _answers(self, packet: Packet, rows: Sequence[Tensor]) -> tuple[PacketSession, ...]:
        vocab_size, device = self.shard.vocab_size, self.shard.runner.device
        answers = list[PacketSession]()
        for session, session_rows in zip(packet.sessions, rows, strict=True):
            answer, slot, request = empty_answer(session), self._slots[session.slot], session.head_request
            if request is not None and request.scored:
                answer = replace(answer, log_probs=log_probs_of(request, session_rows))
            elif request is not None:
                sampler = slot.sampler(request.params, vocab_size, device)
                picks, log_probs = picks_of(sampler, session_rows, slot.ids, session)
                answer = replace(answer, picks=picks, log_probs=log_probs)
            answers.append(answer)
        return tuple(answers)


def identity_of(shard: LoadedShard) -> StageIdentity:
    """Return who a stage of a shard is."""
    return StageIdentity(
        model=shard.name,
        num_layers=shard.num_layers,
        start=shard.spec.start,
        end=shard.spec.end,
        has_embedding=shard.spec.has_embedding,
        has_head=shard.spec.has_head,
        hidden_size=shard.hidden_size,
        vocab_size=shard.vocab_size,
        dtype=shard.dtype,
        hidden_dtype=dtype_name(shard.runner.dtype),
        context=shard.context,
        node_limit=shard.node_limit,
        num_slots=shard.max_sessions,
        slot_bytes=slot_bytes(shard),
        config_hash=shard.config_hash,
        weights_hash=shard.weights_hash,
        exactness=shard.runner.exactness,
        numerics=shard.runner.numerics,
        kv_bytes_per_token=shard.kv_bytes_per_token,
        kv_rows=shard.runner.cache.row_limit,
        model_revision=shard.model_revision,
    )


def _record(packet: Packet, index: int, began_ns: int) -> None:
    """Record a span of stage `index` for every session of the packet that is traced."""
    ended_ns = time.time_ns()
    for session, traceparent in zip(packet.sessions, packet.traces, strict=False):
        spans.record(
            "stage",
            spans.extract([("traceparent", traceparent)]),
            began_ns,
            ended_ns,
            stage=index,
            num_tokens=session.num_tokens,
            batch_size=packet.batch,
        )
