"""Ranges of layers, one per stage: even or written by hand, and whether they hold every layer once.

Ranges are half-open: A:B is A to B - 1. Knows no model.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from specsplit.core.errors import InvalidSettings

_RANGE = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*")


def even_ranges(num_layers: int, stages: int) -> tuple[range, ...]:
    """Return as many ranges as `stages`; the first `num_layers` mod `stages` have one layer more.

    Raises:
        InvalidSettings: no stage, or more stages than layers.
    """
    require_stages(num_layers, stages)
    short, longer = divmod(num_layers, stages)
    bounds = [stage * short + min(stage, longer) for stage in range(stages + 1)]
    return tuple(range(start, end) for start, end in itertools.pairwise(bounds))


def parse_ranges(text: str) -> tuple[range, ...]:
    """Read "0:20,20:47": one half-open range of layers per stage.

    Raises:
        InvalidSettings: something else stands there, or a range holds no layer.
    """
    return tuple(_parse_range(part) for part in text.split(","))


def _parse_range(part: str) -> range:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise InvalidSettings(f"Layers are written A:B,B:C, such as 0:20,20:47, and {part.strip()!r} is no such range.")
    layers = range(int(match[1]), int(match[2]))
    if not layers:
        raise InvalidSettings(
            f"The range {_written(layers)} holds no layer: A:B begins with layer A and ends before layer B."
        )
    return layers


def check_ranges(ranges: Sequence[range], num_layers: int) -> None:
    """Check that `ranges` hold every layer once, in order.

    Raises:
        InvalidSettings: naming the gap, the overlap, the wrong order or what lies beyond the last layer.
    """
    _check_each(ranges, num_layers)
    reached = 0
    for stage, layers in enumerate(ranges):
        if layers.start < reached:
            before = ranges[stage - 1]
            raise InvalidSettings(
                f"Stages {stage - 1} ({_written(before)}) and {stage} ({_written(layers)}) overlap: "
                f"{_named(range(layers.start, min(reached, layers.stop)))} would be in both."
            )
        if layers.start > reached:
            raise InvalidSettings(f"There is a gap: {_named(range(reached, layers.start))} would be in no stage.")
        reached = layers.stop
    if reached < num_layers:
        raise InvalidSettings(f"The last stages are missing: {_named(range(reached, num_layers))} would be in none.")


def _check_each(ranges: Sequence[range], num_layers: int) -> None:
    """Check that no range is empty, goes beyond the last layer or begins before the one in front of it."""
    before = range(0)
    for stage, layers in enumerate(ranges):
        if not layers:
            raise InvalidSettings(f"Stage {stage} ({_written(layers)}) holds no layer.")
        if layers.stop > num_layers:
            raise InvalidSettings(
                f"Stage {stage} ({_written(layers)}) goes beyond the last layer: the model has {num_layers}, "
                f"so the last range ends with {num_layers}."
            )
        if layers.start < before.start:
            raise InvalidSettings(
                f"Stage {stage} ({_written(layers)}) lies before stage {stage - 1} ({_written(before)}): "
                "list the stages from the first layer to the last."
            )
        before = layers


def require_stages(num_layers: int, stages: int) -> None:
    """Check that there is a layer for each of the stages.

    Raises:
        InvalidSettings: no stage, or more stages than layers.
    """
    if stages < 1:
        raise InvalidSettings(f"There must be at least 1 stage, not {stages}.")
    if stages > num_layers:
        raise InvalidSettings(f"{stages} stages are too many for {num_layers} layers: every stage holds at least one.")


def _written(layers: range) -> str:
    return f"{layers.start}:{layers.stop}"


def _named(layers: range) -> str:
    if len(layers) == 1:
        return f"layer {layers.start}"
    return f"layers {layers.start} to {layers.stop - 1}"
