"""The grid of `sweep`: its points, the settings they share, and the checks before anything is loaded.

Knows no process and no file.
"""

from __future__ import annotations

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
        unknown = [mode for mode in self.modes if mode not in registry.MODES]
        if unknown or not self.modes:
            asked = f"no mode {unknown[0]!r}" if unknown else "no mode named"
            raise InvalidRequest(f"There is {asked}; there are {', '.join(registry.MODES)}.", param="modes")
        if "lookup" in self.modes and not self.lookup:
            raise InvalidRequest("Mode lookup cannot be measured with --no-lookup.", param="lookup")
        for what, values in (
            ("modes", self.modes),
            ("rtt-ms", self.rtts_ms),
            ("concurrency", self.concurrencies),
            ("temperature", self.temperatures),
        ):
            if len(set(values)) < len(values):
                raise InvalidRequest(f"--{what} names a value twice; name each once.", param=what)
        if min(*self.rtts_ms, *self.temperatures, 0) < 0:
            raise InvalidRequest("--rtt-ms and --temperature must not be negative.", param="rtt-ms")
        uneven = [each for each in self.concurrencies if (self.num_prompts or 0) % each]
        if uneven:
            raise InvalidRequest(
                f"--prompts ({self.num_prompts}) must be a multiple of each of --concurrency, and {uneven[0]} does not "
                "divide it: else the last sessions would have fewer neighbours than the others.",
                param="prompts",
            )
        if not self.is_remote and self.needs_draft and self.pair.draft is None:
            raise InvalidRequest("These modes need a draft; name one with --draft.", param="draft")
        if self.is_remote and self.needs_draft and self.draft_address is None:
            raise InvalidRequest("These modes need --draft-address beside --target-address.", param="draft_address")
        if self.draft_address is not None and not self.is_remote:
            raise InvalidRequest("--draft-address needs --target-address beside it.", param="target_address")

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
