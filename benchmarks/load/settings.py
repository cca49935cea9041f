"""The settings of a load, and the checks before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from benchmarks import registry
from benchmarks.settings import Setup
from specsplit.core.errors import InvalidRequest

GENERATE, ENDPOINT = registry.GENERATE, "endpoint"
"""The systems beside our modes: transformers' generate on whole batches, and the server of --url."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server of the OpenAI completions protocol."""

    url: str
    model: str | None = None
    key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest times of a request that counts towards goodput."""

    ttft_s: float
    itl_s: float
    """Mean over the tokens after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings(Setup):
    """The settings of a load; `num_new_tokens` is the greatest of `lengths`."""

    systems: tuple[str, ...]
    clients: tuple[int, ...]
    temperatures: tuple[float, ...]
    lengths: tuple[int, ...]
    """New tokens of the requests, in turn."""
    num_requests: int
    """Requests at each number of clients."""
    limits: Limits
    sessions: int
    """KV slots of our systems."""
    queue: int | None = None
    """Places of the queue before the slots of a worker process; None for its default."""
    rate: float | None = None
    """Requests per second of an open loop; None for none."""
    overload: float | None = None
    """The same, as a multiple of the most that the system's closed loops of the round did."""
    num_arrivals: int = 200
    """Requests of an open loop."""
    endpoint: Endpoint | None = None

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            InvalidRequest: naming what does not fit and what would.
        """
        for name in self.systems:
            if name not in (ENDPOINT, GENERATE) and registry.find(name, self).mode is None:
                raise InvalidRequest(
                    f"{name} takes no load; our modes, at any place, and generate do, and a server named with --url.",
                    param="systems",
                )
        uneven = next((size for size in self.clients if self.num_requests % size), None)
        if uneven is not None:
            raise InvalidRequest(
                f"--requests ({self.num_requests}) must be a multiple of each of --clients, and {uneven} does not "
                "divide it: else generate's last batch would be smaller than the others.",
                param="requests",
            )
        if min(self.temperatures) < 0 or min(self.lengths) < 2:
            raise InvalidRequest("--temperature must be at least 0, --new-tokens 2.", param="new_tokens")
        if self.rate is not None and self.overload is not None:
            raise InvalidRequest("--rate and --overload say the same thing; give one of them.", param="rate")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings in JSON types, without the key."""
        inherited = {each.name for each in fields(Setup)}
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in inherited}
        place = {"url": self.endpoint.url, "model": self.endpoint.model} if self.endpoint else None
        return {**own, "limits": asdict(self.limits), "endpoint": place, **Setup.to_dict(self)}
