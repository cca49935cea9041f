"""The contents of a stage's slot as a SlotState and back, for another process that takes the stage's place.

Runs on the stage's device thread. Legend: the KV cache has one block [slots, heads, rows, head size] per layer for keys
and one for values; the payload is the slot's rows of each block, keys before values, layer after layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specsplit.core.errors import InvalidPacket
from specsplit.stages.chain.stage_slot import StageSlot
from specsplit.stages.shard.loader import LoadedShard
from specsplit.stages.shard.payload import from_payload, payload_type, to_payload, torch_dtype
from specsplit.stages.slot_state import SlotState

_HEADER_BYTES = 256
"""Upper bound of an exported slot's header with its alignment."""
_ROW_BYTES = 12
"""Bytes of a row's prefix hash and token id."""


def slot_bytes(shard: LoadedShard) -> int:
    """Return the bytes of the largest slot that the shard can export."""
    return _HEADER_BYTES + shard.runner.cache.capacity * (shard.kv_bytes_per_token + _ROW_BYTES)


def export_slot(shard: LoadedShard, slot: StageSlot) -> SlotState:
    """Return what a slot holds, the rows of its last step included, and nothing behind them."""
    rows = slot.num_rows
    # One layer after the other: a GPU whose memory is full of slots has no room for a copy of a whole one.
    layers = [block[slot.index, :, :rows].reshape(-1).cpu() for block in _blocks(shard)]
    return SlotState(
        slot=slot.index,
        epoch=max(slot.epoch, 0),
        length=slot.length,
        first_layer=shard.spec.start,
        end_layer=shard.spec.end,
        dtype=payload_type(shard.runner.dtype),
        hashes=tuple(slot.hashes[:rows]),
        token_ids=tuple(slot.ids[:rows]),
        pending=slot.pending,
        payload=to_payload(torch.cat(layers)),
    )


@torch.inference_mode()
def import_slot(shard: LoadedShard, slot: StageSlot, state: SlotState) -> None:
    """Write what another process held into a slot.

    Raises:
        InvalidPacket: it does not fit the shard, or is not finite; nothing changed.
    """
    spec, rows, own_type = shard.spec, state.num_rows, payload_type(shard.runner.dtype)
    blocks = _blocks(shard)
    sizes = [block.shape[1] * rows * block.shape[3] for block in blocks]
    fits = (state.first_layer, state.end_layer, state.dtype) == (spec.start, spec.end, own_type)
    num_bytes = memoryview(state.payload).nbytes
    if not fits or rows > shard.runner.cache.capacity or num_bytes != sum(sizes) * own_type.itemsize:
        raise InvalidPacket(
            f"A slot of {state.dtype.name} layers {state.first_layer}:{state.end_layer} with {rows} rows in "
            f"{num_bytes} bytes does not fit a stage of {own_type.name} {spec}."
        )
    if rows:
        dtype = torch_dtype(state.dtype)
        assert dtype is not None
        values = from_payload(state.payload, dtype, sum(sizes))
        # A NaN in a row that is only masked would still spoil every sum, so nothing that is not finite gets in.
        if not values.isfinite().all():
            raise InvalidPacket("The rows of an exported slot are not finite.")
        for block, part in zip(blocks, values.split(sizes), strict=True):
            block[slot.index, :, :rows] = part.view(block.shape[1], rows, block.shape[3])
        shard.runner.cache.clear_rows(slot.index, rows)
    slot.take_over(state)


def _blocks(shard: LoadedShard) -> list[Tensor]:
    cache = shard.runner.cache
    return [block for pair in zip(cache.keys, cache.values, strict=True) for block in pair]
