"""The systems that can be measured, by name: where each lives, what it needs, and how its process is made.

Knows no library: what a system is made of is imported by the process that serves it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import get_args

from benchmarks.peers.factories import (
    serve_bare_forward,
    serve_completions,
    serve_loopback,
    serve_modes,
    serve_services,
    serve_transformers,
)
from benchmarks.peers.modes import ServedMode
from benchmarks.processes import Factory
from benchmarks.settings import Setup
from specsplit.core.defaults import DRAFTLESS, Mode
from specsplit.core.errors import InvalidRequest

MODES = get_args(Mode)
"""The orchestrator's own: a new one can be measured as soon as it can be asked for."""
PLACES = ("loopback", "remote")
PLAIN, GENERATE, BARE = "plain", "generate", "bare"
_WAYS = ("generate", "assisted", "assisted-constant", "lookup-4", "lookup-10")
"""Ways to use transformers; a system has the name of its way."""
_SERVER = "openai:"


@dataclass(frozen=True, slots=True)
class Entry:
    """One system: `make` gives the factory of its process, which it shares with nobody."""

    name: str
    where: str
    make: Callable[[Setup], Factory]
    mode: str | None = None
    """The orchestrator's mode, None unless the system is ours."""
    packages: tuple[str, ...] = ()
    needs_draft: bool = False

    @property
    def is_server(self) -> bool:
        return self.name.startswith(_SERVER)

    @property
    def is_ours(self) -> bool:
        return self.mode is not None

    @property
    def has_costs(self) -> bool:
        """Whether its workers can be asked for what their forwards cost."""
        return self.is_ours

    def missing_package(self) -> str | None:
        """Return the package that it needs and that is not installed."""
        return next((package for package in self.packages if find_spec(package) is None), None)

    def to_dict(self) -> dict[str, object]:
        """Return the facts that a results file names."""
        return {"where": self.where, "mode": self.mode, "has_costs": self.has_costs}


def names() -> list[str]:
    """Return the names that can be asked for, addresses left open."""
    ours = [*MODES, *(f"{mode}@{place}" for place in PLACES for mode in MODES)]
    return [*ours, BARE, *_WAYS, f"{_SERVER}URL"]


def find(name: str, setup: Setup) -> Entry:
    """Return the system of that name.

    Raises:
        InvalidRequest: there is none, or it needs a draft or an address that was not given.
    """
    mode, _, place = name.partition("@")
    if name.startswith(_SERVER):
        entry = _server(name)
    elif name == BARE:
        entry = Entry(name, "in process", lambda s: serve_bare_forward(s.threads, name, s.pair))
    elif name in _WAYS:
        entry = _transformers(name)
    elif mode in MODES and (name == mode or place in PLACES):
        entry = _mode(name, mode, place)
    else:
        raise InvalidRequest(f"There is no system {name!r}; there are {', '.join(names())}.", param="systems")
    _check(entry, place, setup)
    return entry


def _check(entry: Entry, place: str, setup: Setup) -> None:
    if entry.mode == "lookup" and not setup.lookup:
        raise InvalidRequest(f"{entry.name} cannot be measured with --no-lookup.", param="lookup")
    if place == "remote":
        roles = {"--target-address": setup.target_address}
        if entry.needs_draft:
            roles["--draft-address"] = setup.draft_address
        lacking = [option for option, address in roles.items() if address is None]
        if lacking:
            raise InvalidRequest(f"{entry.name} needs {' and '.join(lacking)}.", param="systems")
    elif entry.needs_draft and setup.pair.draft is None:
        raise InvalidRequest(f"{entry.name} needs a draft; name one with --draft.", param="systems")


def _mode(name: str, mode: str, place: str) -> Entry:
    def make(setup: Setup) -> Factory:
        chosen = ServedMode(name, mode, setup.shape, setup.lookup)
        if place == "loopback":
            return serve_loopback(setup.threads, chosen, setup.pair)
        if place == "remote":
            addresses = {"target": setup.target_address, "draft": None if mode in DRAFTLESS else setup.draft_address}
            return serve_services(chosen, {role: at for role, at in addresses.items() if at is not None})
        return serve_modes(setup.threads, (chosen,), setup.pair)

    where = {"": "in process", "loopback": "local worker processes", "remote": "workers elsewhere"}[place]
    return Entry(name, where, make, mode=mode, needs_draft=mode not in DRAFTLESS)


def _transformers(name: str) -> Entry:
    def make(setup: Setup) -> Factory:
        return serve_transformers(setup.threads, {name: name}, setup.pair)

    needs_draft = name.startswith("assisted")
    return Entry(name, "in process", make, packages=("torch", "transformers"), needs_draft=needs_draft)


def _server(name: str) -> Entry:
    url, _, model = name.removeprefix(_SERVER).partition("#")
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"{name!r} names no server; write openai:http://HOST:PORT/v1, and #MODEL behind it if need be.",
            param="systems",
        )
    return Entry(name, "a server", lambda setup: serve_completions(name, url, model or None), packages=("openai",))
