"""The circumstances in which a text may be generated, and how a study draws or multiplies them. Knows no process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product

from benchmarks.settings import Shape

IN_PROCESS, LOOPBACK, TWO_STAGES = "in process", "loopback", "two stages"
PLACES = (IN_PROCESS, LOOPBACK, TWO_STAGES)
"""Where target and draft compute; over loopback they are processes of their own, and so are the stages of a cut one."""
EMBEDDED_DRAFT, TARGET_AS_DRAFT, NO_DRAFT = "embedded", "target", "none"
WAYS = (
    *product(("pingpong", "overlap", "stream", "auto"), (EMBEDDED_DRAFT, TARGET_AS_DRAFT)),
    *product(("auto", "lookup", "plain"), (NO_DRAFT,)),
)
"""Modes, each with its draft."""
SHAPES = (Shape(4, 3, 2), Shape(8, 8, 1), Shape(16, 4, 4), Shape(32, 12, 3))
THREADS = (1, 2)
NO_FAULT, CUT, KILLED = "none", "link cut", "killed"
_WEIGHTS = {NO_FAULT: 12, CUT: 6, KILLED: 1}
"""Killed workers are rare, since each takes seconds to come back."""


@dataclass(frozen=True, slots=True, order=True)
class Circumstances:
    """Everything that must not matter to a text; a fault happens in its middle."""

    place: str
    threads: int
    mode: str
    draft: str
    fault: str
    """Nothing, or whose link is cut or process killed and started again, such as "draft link cut"."""
    shape: Shape

    def to_dict(self) -> dict[str, object]:
        """Return the fields in JSON types."""
        return {**asdict(self), "shape": self.shape.name}


def draw(rng: random.Random) -> Circumstances:
    """Draw each dimension among what the others allow."""
    place, (mode, draft) = rng.choice(PLACES), rng.choice(WAYS)
    return Circumstances(place, rng.choice(THREADS), mode, draft, _fault(rng, place, draft), rng.choice(SHAPES))


def all_of_them(rng: random.Random) -> Iterator[Circumstances]:
    """Yield the product of all dimensions; over sockets each without a fault and with a drawn one."""
    for place, threads, (mode, draft), shape in product(PLACES, THREADS, WAYS, SHAPES):
        if mode == "plain" and shape != SHAPES[0]:
            continue  # it has no tree
        yield Circumstances(place, threads, mode, draft, NO_FAULT, shape)
        while place != IN_PROCESS:
            fault = _fault(rng, place, draft)
            if fault != NO_FAULT:
                yield Circumstances(place, threads, mode, draft, fault, shape)
                break


def _fault(rng: random.Random, place: str, draft: str) -> str:
    if place == IN_PROCESS:
        return NO_FAULT
    victims = ["target"] + ["draft"] * (draft != NO_DRAFT) + ["stage"] * (place == TWO_STAGES)
    kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    return kind if kind == NO_FAULT else f"{rng.choice(victims)} {kind}"
