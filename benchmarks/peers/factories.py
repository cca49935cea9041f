"""Makers of what a process of its own serves; torch and transformers are imported there, never in the parent.

Each maker returns a picklable factory, a function of this module with its arguments bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial

from benchmarks.pair import Pair
from benchmarks.peers.modes import ServedMode
from benchmarks.processes import Factory, Served
from benchmarks.systems import System


@dataclass(frozen=True, slots=True)
class Group:
    """Systems that share a process and whatever model they hold."""

    systems: Sequence[System]
    facts: Mapping[str, object] | None = None

    def dialect(self) -> dict[str, object]:
        """Return how a server is asked."""
        return dict(self.facts or {})


def serve_modes(threads: int, modes: Sequence[ServedMode], pair: Pair | None = None) -> Factory:
    """Serve modes in one process, over one pair."""
    return partial(_modes, threads, tuple(modes), pair or Pair())


def _modes(threads: int, modes: Sequence[ServedMode], pair: Pair) -> AbstractContextManager[Served]:
    from benchmarks.peers.ours import InProcess

    return InProcess(threads, modes, pair)


def serve_loopback(threads: int, mode: ServedMode, pair: Pair | None = None) -> Factory:
    """Serve a mode with workers in processes of their own."""
    return partial(_loopback, threads, mode, pair or Pair())


def _loopback(threads: int, mode: ServedMode, pair: Pair) -> AbstractContextManager[Served]:
    from benchmarks.peers.ours_remote import Loopback

    return Loopback(mode, threads, pair)


def serve_services(mode: ServedMode, addresses: Mapping[str, str]) -> Factory:
    """Serve a mode with workers that somebody else started; `addresses` are by role."""
    return partial(_services, mode, dict(addresses))


def _services(mode: ServedMode, addresses: Mapping[str, str]) -> AbstractContextManager[Served]:
    from benchmarks.peers.ours_remote import Services

    return Services(mode, addresses)


def serve_bare_forward(threads: int, name: str, pair: Pair | None = None) -> Factory:
    """Serve the target alone, driven by the thread that loads it."""
    return partial(_bare_forward, threads, name, pair or Pair())


def _bare_forward(threads: int, name: str, pair: Pair) -> AbstractContextManager[Served]:
    from benchmarks.peers.bare_forward import BareForward

    return nullcontext(Group([BareForward(threads, name, pair)]))


def serve_transformers(threads: int, ways: Mapping[str, str], pair: Pair | None = None) -> Factory:
    """Serve ways to run transformers over one instance of the target; `ways` are by the names of their systems."""
    return partial(_transformers, threads, dict(ways), pair or Pair())


def _transformers(threads: int, ways: Mapping[str, str], pair: Pair) -> AbstractContextManager[Served]:
    from benchmarks.peers.transformers_ways import WAYS, TransformersSystem, load

    target = load("target", pair)
    return nullcontext(
        Group([TransformersSystem(name, target, threads, WAYS[way](pair)) for name, way in ways.items()])
    )


def serve_completions(name: str, url: str, model: str | None = None) -> Factory:
    """Serve a server of the OpenAI completions protocol; without `model` the first one that it names."""
    return partial(_completions, name, url, model)


def _completions(name: str, url: str, model: str | None) -> AbstractContextManager[Served]:
    from benchmarks.peers.openai_completions import connect

    system = connect(name, url, model)
    return nullcontext(Group([system], asdict(system.dialect)))
