"""Whether a packet fits the stage where it arrived: its position in the chain, its model and its slots."""

from __future__ import annotations

from specsplit.core.errors import InvalidPacket
from specsplit.model.loader import dtype_name
from specsplit.stages.packet import Packet, PacketSession
from specsplit.stages.shard.loader import LoadedShard
from specsplit.stages.shard.payload import payload_type


def check_packet(packet: Packet, shard: LoadedShard, index: int) -> None:
    """Check that a packet is for stage `index`, and that the shard there can compute it.

    Raises:
        InvalidPacket: it is for another stage or model, or reaches beyond a slot.
    """
    own_type = payload_type(shard.runner.dtype)
    if (packet.stage_from, packet.stage_to) != (index - 1, index):
        raise InvalidPacket(f"A packet from stage {packet.stage_from} to {packet.stage_to} arrived at stage {index}.")
    if (packet.hidden_size, packet.dtype) != (shard.hidden_size, own_type):
        raise InvalidPacket(
            f"A packet of {packet.dtype.name} hidden states of size {packet.hidden_size} does not fit a stage of "
            f"{own_type.name} and size {shard.hidden_size}."
        )
    if packet.has_hidden == shard.spec.has_embedding:
        needed = "token ids" if shard.spec.has_embedding else "hidden states"
        raise InvalidPacket(f"A stage of {shard.spec} takes {needed}.")
    for session in packet.sessions:
        _check_session(session, shard)


def check_slot(slot: int, num_slots: int) -> None:
    """Check that there is such a slot.

    Raises:
        InvalidPacket: there is none.
    """
    if not 0 <= slot < num_slots:
        raise InvalidPacket(f"There is no slot {slot}; this stage has {num_slots}.")


def not_finite(sender: str, shard: LoadedShard) -> InvalidPacket:
    """Return the error of hidden states that `shard` refuses to compute; users may do what they do for a whole model.

    The packet says whose rows these are only if it is of one session, so the engine sends the others' again.
    """
    return InvalidPacket(
        f"{sender} computed hidden states that are not finite; the weights of {shard.name} are damaged or overflow in "
        f"{dtype_name(shard.runner.dtype)}: try --dtype fp32 for all stages."
    )


def _check_session(session: PacketSession, shard: LoadedShard) -> None:
    check_slot(session.slot, shard.max_sessions)
    # A slot is [committed | tree | free]: positions are bounded by the context, rows by the slot's capacity, which has
    # room for a whole tree behind a full context.
    capacity = shard.runner.cache.capacity
    if session.start + session.depth > shard.context or session.start + session.num_tokens > capacity:
        raise InvalidPacket(f"A packet reaches beyond the context of {shard.context} tokens.")
    if shard.spec.has_embedding or shard.spec.has_head:
        if len(session.token_ids) != session.num_tokens or max(session.token_ids) >= shard.vocab_size:
            raise InvalidPacket(f"A stage of {shard.spec} needs token ids below {shard.vocab_size}.")
        request = session.head_request
        if request and any(token >= shard.vocab_size for token in request.scored):
            raise InvalidPacket(f"A token to score is outside the vocabulary of {shard.vocab_size}.")
