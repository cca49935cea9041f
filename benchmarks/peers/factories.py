"""What is served by a process of its own; torch and transformers are imported there, never in the parent."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from benchmarks import bars
from benchmarks.pair import Pair
from benchmarks.systems import System
from specsplit.core import defaults

if TYPE_CHECKING:
    from benchmarks.peers.ours import InProcess
    from benchmarks.peers.ours_remote import Loopback, Services

Way = Literal["generate", "assisted", "assisted-constant", "lookup-4", "lookup-10"]
"""How transformers is used."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The bounds of a tree."""

    nodes: int = defaults.DEFAULT_NODES
    depth: int = defaults.DEFAULT_DEPTH
    branching: int = defaults.DEFAULT_BRANCHING

    @property
    def name(self) -> str:
        return f"{self.nodes}/{self.depth}/{self.branching}"


@dataclass(frozen=True, slots=True)
class ServedMode:
    """A mode of the orchestrator under the name of its system."""

    name: str
    mode: str
    shape: Shape = field(default=Shape())
    lookup: bool = True


@dataclass(frozen=True, slots=True)
class Group:
    """Systems that share a process and whatever model they hold."""

    systems: Sequence[System]


@dataclass(frozen=True, slots=True)
class Server(Group):
    """A server somewhere as a system."""

    told: dict[str, object]

    def dialect(self) -> dict[str, object]:
        """Return how it is asked."""
        return self.told


@dataclass(frozen=True, slots=True)
class ServeModes:
    """Modes in one process, over one pair."""

    threads: int
    modes: tuple[ServedMode, ...]
    pair: Pair = field(default=Pair())

    def __call__(self) -> InProcess:
        """Load the pair."""
        from benchmarks.peers.ours import InProcess

        return InProcess(self.threads, self.modes, self.pair)


@dataclass(frozen=True, slots=True)
class ServeOurs:
    """Plain decoding, and pingpong with each shape; `shapes` are by the names of their systems."""

    threads: int
    shapes: tuple[tuple[str, Shape], ...]

    def __call__(self) -> InProcess:
        """Load the pair."""
        trees = tuple(ServedMode(name, "pingpong", shape) for name, shape in self.shapes)
        return ServeModes(self.threads, (ServedMode(bars.PLAIN, "plain"), *trees))()


@dataclass(frozen=True, slots=True)
class ServeLoopback:
    """A mode with workers in processes of their own."""

    threads: int
    mode: ServedMode
    pair: Pair = field(default=Pair())

    def __call__(self) -> Loopback:
        """Start the workers."""
        from benchmarks.peers.ours_remote import Loopback

        return Loopback(self.mode, self.threads, self.pair)


@dataclass(frozen=True, slots=True)
class ServeServices:
    """A mode with workers that somebody else started; `addresses` are by role."""

    mode: ServedMode
    addresses: tuple[tuple[str, str], ...]

    def __call__(self) -> Services:
        """Connect to the workers."""
        from benchmarks.peers.ours_remote import Services

        return Services(self.mode, dict(self.addresses))


@dataclass(frozen=True, slots=True)
class ServeBareForward:
    """The target alone, driven by the thread that loads it."""

    threads: int
    name: str = bars.BARE
    pair: Pair = field(default=Pair())

    def __call__(self) -> AbstractContextManager[Group]:
        """Load the target."""
        from benchmarks.peers.bare_forward import BareForward

        return nullcontext(Group([BareForward(self.threads, self.name, self.pair)]))


@dataclass(frozen=True, slots=True)
class ServeTransformers:
    """All the ways to run transformers, over one instance of the target; `ways` are by the names of their systems."""

    threads: int
    ways: tuple[tuple[str, Way], ...] = (
        (bars.GENERATE, "generate"),
        (f"{bars.ASSISTED_PREFIX}, default", "assisted"),
        (f"{bars.ASSISTED_PREFIX}, constant 4", "assisted-constant"),
        (f"{bars.LOOKUP_PREFIX}, 4", "lookup-4"),
        (f"{bars.LOOKUP_PREFIX}, 10", "lookup-10"),
    )
    pair: Pair = field(default=Pair())

    def __call__(self) -> AbstractContextManager[Group]:
        """Load the pair as transformers does."""
        from benchmarks.peers import transformers_assisted, transformers_generate, transformers_prompt_lookup
        from benchmarks.peers.transformers_model import TransformersSystem, load

        options = {
            **transformers_generate.WAYS,
            **transformers_assisted.WAYS,
            **transformers_prompt_lookup.WAYS,
        }
        target = load("target", self.pair)
        systems = [TransformersSystem(name, target, self.threads, **options[way](self.pair)) for name, way in self.ways]
        return nullcontext(Group(systems))


@dataclass(frozen=True, slots=True)
class ServeCompletions:
    """A server of the OpenAI completions protocol."""

    name: str
    url: str
    model: str | None = None
    """None for the first one that it names."""

    def __call__(self) -> AbstractContextManager[Server]:
        """Ask the server which model it has and what it takes."""
        from benchmarks.peers.openai_completions import connect

        system = connect(self.name, self.url, self.model)
        return nullcontext(Server([system], system.dialect.to_dict()))
