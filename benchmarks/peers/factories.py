"""Which process serves which systems; torch and transformers are imported there, never in the parent."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.systems import System

if TYPE_CHECKING:
    from benchmarks.peers.ours import InProcess
    from benchmarks.peers.ours_remote import Loopback


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The bounds of a tree."""

    nodes: int
    depth: int
    branching: int

    @property
    def name(self) -> str:
        return f"{self.nodes}/{self.depth}/{self.branching}"


@dataclass(frozen=True, slots=True)
class Group:
    """Systems that share a process and whatever model they hold."""

    systems: Sequence[System]


@dataclass(frozen=True, slots=True)
class ServeOurs:
    """Plain decoding, and pingpong with each shape; `shapes` are by the names of their systems."""

    threads: int
    shapes: tuple[tuple[str, Shape], ...]

    def __call__(self) -> InProcess:
        """Load the pair."""
        from benchmarks.peers.ours import InProcess

        return InProcess(self.threads, self.shapes)


@dataclass(frozen=True, slots=True)
class ServeLoopback:
    """Pingpong with workers in processes of their own."""

    threads: int
    shape: Shape

    def __call__(self) -> Loopback:
        """Start the workers."""
        from benchmarks.peers.ours_remote import Loopback

        return Loopback(self.threads, self.shape)


@dataclass(frozen=True, slots=True)
class ServeBareForward:
    """The target alone, driven by the thread that loads it."""

    threads: int

    def __call__(self) -> AbstractContextManager[Group]:
        """Load the target."""
        from benchmarks.peers.bare_forward import BareForward

        return nullcontext(Group([BareForward(self.threads)]))


@dataclass(frozen=True, slots=True)
class ServeTransformers:
    """All the ways to run transformers, over one instance of the target."""

    threads: int

    def __call__(self) -> AbstractContextManager[Group]:
        """Load the pair as transformers does."""
        from benchmarks.peers import transformers_assisted, transformers_generate, transformers_prompt_lookup
        from benchmarks.peers.transformers_model import load

        target = load("target")
        peers = (transformers_generate, transformers_assisted, transformers_prompt_lookup)
        return nullcontext(Group([system for peer in peers for system in peer.systems(target, self.threads)]))
