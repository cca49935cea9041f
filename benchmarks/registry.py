"""The systems that can be measured, by name: where each lives, what it needs, and how its process is made.

Knows no library: what a system is made of is imported by the process that serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, get_args

from benchmarks.processes import Factory, Served
from benchmarks.settings import Pair, ServedMode, Setup
from specsplit.core.defaults import DRAFTLESS, Mode
from specsplit.core.errors import InvalidRequest

MODES = get_args(Mode)
"""The orchestrator's own: a new one can be measured as soon as it can be asked for."""
PLACES = {
    "loopback": "local workers as serve starts them",
    "apart": "a local process for each worker",
    "remote": "workers elsewhere",
}
NO_LOOKUP, WITH_DRAFT = "-no-lookup", "-with-draft"
"""Behind a mode: its trees hold none of lookup's nodes; it runs beside a draft that it has no use for."""
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
    needs_draft: bool = False

    @property
    def is_server(self) -> bool:
        return self.name.startswith(_SERVER)

    @property
    def is_ours(self) -> bool:
        """Whether it tells its counts, and its workers what their forwards cost."""
        return self.mode is not None

    def to_dict(self) -> dict[str, object]:
        """Return the facts that a results file names."""
        return {"where": self.where, "mode": self.mode, "has_costs": self.is_ours}


def names() -> list[str]:
    """Return the names that can be asked for, addresses left open."""
    modes = [*MODES, *(mode + NO_LOOKUP for mode in MODES if mode not in DRAFTLESS), PLAIN + WITH_DRAFT]
    ours = [*modes, *(f"{mode}@{place}" for place in PLACES for mode in modes)]
    return [*ours, BARE, *_WAYS, f"{_SERVER}URL"]


def find(name: str, setup: Setup) -> Entry:
    """Return the system of that name.

    Raises:
        InvalidRequest: there is none, or it needs a draft or an address that was not given.
    """
    mode, place = _mode_of(name), name.partition("@")[2]
    if name.startswith(_SERVER):
        entry = _server(name)
    elif name == BARE:
        entry = Entry(name, "in process", partial(serve_alone, "benchmarks.peers.bare_forward:load", name))
    elif name in _WAYS:
        make = partial(serve_alone, "benchmarks.peers.transformers_ways:load", name)
        entry = Entry(name, "in process", make, needs_draft=name.startswith("assisted"))
    elif name in names():
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
    needs_draft = mode not in DRAFTLESS or WITH_DRAFT in name

    def make(setup: Setup) -> Factory:
        chosen = served_mode(name, mode, setup)
        if place in ("loopback", "apart"):
            return partial(open_served, "benchmarks.peers.ours_remote:Loopback", chosen, setup.threads, setup.pair)
        if place == "remote":
            addresses = {"target": setup.target_address, "draft": setup.draft_address if needs_draft else None}
            known = {role: address for role, address in addresses.items() if address is not None}
            return partial(open_served, "benchmarks.peers.ours_remote:Services", chosen, known)
        return serve_modes(setup.threads, (chosen,), setup.pair)

    return Entry(name, PLACES.get(place, "in process"), make, mode=mode, needs_draft=needs_draft)


def facts_of_place(name: str, setup: Setup) -> dict[str, object]:
    """Return the threads of local worker processes together; nothing for systems in other places."""
    if not name.endswith(("@loopback", "@apart")):
        return {}
    shares = served_mode(name, _mode_of(name), setup).thread_shares(setup.threads)
    return {"threads": sum(shares.values())}


def _mode_of(name: str) -> str:
    return name.partition("@")[0].removesuffix(NO_LOOKUP).removesuffix(WITH_DRAFT)


def served_mode(name: str, mode: str, setup: Setup) -> ServedMode:
    """Return the mode of a system of ours, with the trees of the set-up and the variant that its name says."""
    has_lookup = setup.lookup and NO_LOOKUP not in name
    return ServedMode(name, mode, setup.shape, has_lookup, is_beside_draft=WITH_DRAFT in name)


def _server(name: str) -> Entry:
    url, _, model = name.removeprefix(_SERVER).partition("#")
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"{name!r} names no server; write openai:http://HOST:PORT/v1, and #MODEL behind it if need be.",
            param="systems",
        )
    factory = partial(open_alone, "benchmarks.peers.openai_completions:connect", name, url, model or None)
    return Entry(name, "a server", lambda setup: factory)


# Factories are picklable: the name of what the child imports, with its arguments bound. So torch and transformers are
# imported in the children and never here.


@dataclass(frozen=True, slots=True)
class Alone:
    """A system that has a process, and whatever model it holds, for itself."""

    systems: tuple[Any]

    def dialect(self) -> dict[str, Any]:
        """Return how a server is asked."""
        return asdict(self.systems[0].dialect)

    def drive(self, load: Any, tasks: Any) -> Any:
        """Put a load on the system; see benchmarks/load."""
        return self.systems[0].drive(load, tasks)


def open_served(name: str, *arguments: Any) -> AbstractContextManager[Served]:
    """Import what `name` says as MODULE:OBJECT, and call it."""
    return resolve_name(name)(*arguments)


def open_alone(name: str, *arguments: Any) -> AbstractContextManager[Served]:
    return nullcontext(Alone((resolve_name(name)(*arguments),)))


def serve_alone(load: str, name: str, setup: Setup) -> Factory:
    return partial(open_alone, load, name, setup.threads, setup.pair)


def serve_modes(threads: int, modes: Sequence[ServedMode], pair: Pair | None = None) -> Factory:
    """Serve modes of the orchestrator in one process, over one pair."""
    return partial(open_served, "benchmarks.peers.ours:InProcess", threads, tuple(modes), pair or Pair())
