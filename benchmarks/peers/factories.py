"""Makers of what a process of its own serves; torch and transformers are imported there, never in the parent.

Each maker returns a picklable factory: the name of what the child imports, with its arguments bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any

from benchmarks.pair import Pair
from benchmarks.peers.modes import ServedMode
from benchmarks.processes import Factory, Served


@dataclass(frozen=True, slots=True)
class Group:
    """Systems that share a process and whatever model they hold."""

    systems: Sequence[Any]

    def dialect(self) -> dict[str, Any]:
        """Return how a server is asked; it is alone in its process."""
        return asdict(self.systems[0].dialect)


def _open(name: str, *arguments: Any) -> AbstractContextManager[Served]:
    """Import what `name` says as MODULE:OBJECT, and call it."""
    return resolve_name(name)(*arguments)


def _group(name: str, *arguments: Any) -> AbstractContextManager[Served]:
    return nullcontext(Group(resolve_name(name)(*arguments)))


def serve_modes(threads: int, modes: Sequence[ServedMode], pair: Pair | None = None) -> Factory:
    """Serve modes in one process, over one pair."""
    return partial(_open, "benchmarks.peers.ours:InProcess", threads, tuple(modes), pair or Pair())


def serve_loopback(threads: int, mode: ServedMode, pair: Pair | None = None) -> Factory:
    """Serve a mode with workers in processes of their own."""
    return partial(_open, "benchmarks.peers.ours_remote:Loopback", mode, threads, pair or Pair())


def serve_services(mode: ServedMode, addresses: Mapping[str, str]) -> Factory:
    """Serve a mode with workers that somebody else started; `addresses` are by role."""
    return partial(_open, "benchmarks.peers.ours_remote:Services", mode, dict(addresses))


def serve_bare_forward(threads: int, name: str, pair: Pair | None = None) -> Factory:
    """Serve the target alone, driven by the thread that loads it."""
    return partial(_group, "benchmarks.peers.bare_forward:load", threads, name, pair or Pair())


def serve_transformers(threads: int, ways: Mapping[str, str], pair: Pair | None = None) -> Factory:
    """Serve ways to run transformers over one instance of the target; `ways` are by the names of their systems."""
    return partial(_group, "benchmarks.peers.transformers_ways:load", threads, dict(ways), pair or Pair())


def serve_completions(name: str, url: str, model: str | None = None) -> Factory:
    """Serve a server of the OpenAI completions protocol; without `model` the first one that it names."""
    return partial(_group, "benchmarks.peers.openai_completions:load", name, url, model)
