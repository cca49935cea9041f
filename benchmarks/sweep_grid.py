"""The grid of `sweep`: its points, the settings they share, and the checks before anything is loaded.

Knows no process and no file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from benchmarks import registry
from benchmarks.settings import Setup
from specsplit.core.defaults import DRAFTLESS
from specsplit.core.errors import InvalidRequest

Link = Literal["target", "draft", "both"]
"""Which links a round trip is added to."""
AXES = ("rtt_ms", "concurrency", "temperature")


@dataclass(frozen=True, slots=True)
class Point:
    """One set of conditions under which every mode is measured."""

    rtt_ms: float = 0.0
    """Added to what the links take by themselves; at 0 no proxy is between."""
    concurrency: int = 1
    """Sessions at once."""
    temperature: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.rtt_ms:g} ms, {self.concurrency} at once, T {self.temperature:g}"


@dataclass(frozen=True, slots=True)
class GridSettings(Setup):
    """The settings of a sweep; two sweeps of the same settings are the same measurement."""

    modes: tuple[str, ...]
    rtts_ms: tuple[float, ...] = (0.0,)
    concurrencies: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    link: Link = "target"

    @property
    def points(self) -> list[Point]:
        """Return the grid, in the order in which a round goes through it."""
        return [Point(*values) for values in product(self.rtts_ms, self.concurrencies, self.temperatures)]

    @property
    def needs_draft(self) -> bool:
        """Whether a mode is nothing without one; `auto` does what it can."""
        return any(mode not in (*DRAFTLESS, "auto") for mode in self.modes)

    @property
    def asks_draft(self) -> bool:
        """Whether there is a draft, and a mode that asks it."""
        has_draft = self.draft_address is not None if self.is_remote else self.pair.draft is not None
        return has_draft and any(mode not in DRAFTLESS for mode in self.modes)

    @property
    def is_remote(self) -> bool:
        return self.target_address is not None

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            InvalidRequest: naming what does not fit and what would.
        """
        for is_wrong, message, param in self._mistakes():
            if is_wrong:
                raise InvalidRequest(message, param=param)

    def _mistakes(self) -> Iterator[tuple[bool, str, str]]:
        unknown = [mode for mode in self.modes if mode not in registry.MODES]
        asked = f"no mode {unknown[0]!r}" if unknown else "no mode named"
        known = f"There is {asked}; there are {', '.join(registry.MODES)}."
        yield bool(unknown) or not self.modes, known, "modes"
        no_lookup = "lookup" in self.modes and not self.lookup
        yield no_lookup, "Mode lookup cannot be measured with --no-lookup.", "lookup"
        axes = (self.modes, self.rtts_ms, self.concurrencies, self.temperatures)
        for name, values in zip(("modes", "rtt-ms", "concurrency", "temperature"), axes, strict=True):
            yield len(set(values)) < len(values), f"--{name} names a value twice; name each once.", name
        is_negative = min(*self.rtts_ms, *self.temperatures, 0) < 0
        yield is_negative, "--rtt-ms and --temperature must not be negative.", "rtt-ms"
        for size in self.concurrencies:
            uneven = (
                f"--prompts ({self.num_prompts}) must be a multiple of each of --concurrency, and {size} does not "
                "divide it: else the last sessions would have fewer neighbours than the others."
            )
            yield bool((self.num_prompts or 0) % size), uneven, "prompts"
        is_alone = self.needs_draft and not self.is_remote and self.pair.draft is None
        yield is_alone, "These modes need a draft; name one with --draft.", "draft"
        is_alone = self.needs_draft and self.is_remote and self.draft_address is None
        yield is_alone, "These modes need --draft-address beside --target-address.", "draft_address"
        is_lone = self.draft_address is not None and not self.is_remote
        yield is_lone, "--draft-address needs --target-address beside it.", "target_address"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings in JSON types."""
        return {
            "modes": list(self.modes),
            "rtt_ms": list(self.rtts_ms),
            "concurrency": list(self.concurrencies),
            "temperatures": list(self.temperatures),
            "link": self.link,
            **Setup.to_dict(self),
        }
