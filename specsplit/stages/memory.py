"""The KV memory of a chain: how many rows every one of its stages can hold. Knows identities, and no tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specsplit.core.errors import InvalidSettings, OutOfMemory
from specsplit.core.record import record
from specsplit.model.memory_size import parse_memory, shown_memory
from specsplit.stages.identity import StageIdentity


@record
class ChainMemory:
    """Rows of all slots together that a coordinator may use, and the bytes of a row over all stages, 0 if unknown."""

    num_rows: int
    row_bytes: int


def total_bytes(kv_memory: str | None) -> int | None:
    """Return the bytes that the rows of all stages together may take; None if nobody bounds them.

    Raises:
        InvalidSettings: the setting is a fraction, or none at all.
    """
    size = parse_memory(kv_memory)
    if isinstance(size, float):
        raise InvalidSettings(
            "The --kv-memory of a target that is cut into stages is for all of them together, so it cannot be a "
            "fraction of one machine's memory; give it in bytes, as in 8GiB, or give each stage its own."
        )
    return size


def stage_share(kv_memory: str | None, num_layers: int, of_layers: int) -> str | None:
    """Return the part of the memory for all layers that a stage of `num_layers` needs, as the value of its option.

    Raises:
        InvalidSettings: as `total_bytes`.
    """
    num_bytes = total_bytes(kv_memory)
    if num_bytes is None:
        return None
    # The coordinator counts the rows exactly; a stage only has to have room for them.
    return f"{math.ceil(num_bytes * num_layers / of_layers / 1024)}KiB"


def chain_memory(stages: Sequence[StageIdentity], num_slots: int, slot_rows: int, kv_memory: int | None) -> ChainMemory:
    """Return the memory of a chain of `num_slots` slots of `slot_rows` rows; `kv_memory` bounds all stages together.

    Raises:
        OutOfMemory: the stages do not hold one full slot within it.
        InvalidSettings: a stage does not say what a row costs, so the bytes cannot be counted.
    """
    # Every stage holds the rows of every slot, so the smallest one decides.
    rows = [num_slots * slot_rows, *(stage.kv_rows for stage in stages if stage.kv_rows)]
    costs = [stage.kv_bytes_per_token for stage in stages]
    row_bytes = sum(costs) if all(costs) else 0
    if kv_memory is not None:
        if not row_bytes:
            raise InvalidSettings(
                "--kv-memory cannot be counted: a stage is of a release that does not say what a token costs; install "
                "the same release on all sides."
            )
        rows.append(kv_memory // row_bytes)
        if rows[-1] < slot_rows:
            raise OutOfMemory(
                f"One full session needs {slot_rows} rows of {row_bytes} bytes over all stages, "
                f"{shown_memory(slot_rows * row_bytes)}, and --kv-memory {shown_memory(kv_memory)} holds {rows[-1]}; "
                "use a smaller --context, or more memory."
            )
    return ChainMemory(min(rows), row_bytes)
