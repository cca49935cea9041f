"""The token tree of a draft without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specsplit.core.types import ROOT


@dataclass
class FakeTree:
    """The draft's nodes below the slot's last token: number -> (parent number or ROOT, token, depth, prefix hash)."""

    nodes: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    grown: set[int] = field(default_factory=set)
    log_probs: dict[int, float] = field(default_factory=dict)
    """The draft's estimate for each node, given its parent's acceptance."""

    def reroot(self, token_ids: Sequence[int]) -> FakeTree:
        """Return the subtree that hangs below `token_ids`; empty if they are not in the tree."""
        at = ROOT
        for token in token_ids:
            at = next((n for n, (parent, child, *_) in self.nodes.items() if parent == at and child == token), -1)
        kept = FakeTree(grown={ROOT} if at in self.grown else set())
        name = {at: ROOT}
        for number, (parent, token, depth, prefix) in self.nodes.items():
            if parent in name and number not in name:
                name[number] = number
                kept.nodes[number] = (name[parent], token, depth - len(token_ids), prefix)
                kept.log_probs[number] = self.log_probs[number]
                kept.grown |= {number} & self.grown
        return kept

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Give nodes other numbers."""
        name = lambda number: numbers.get(number, number)  # noqa: E731
        self.nodes = {name(number): (name(parent), *rest) for number, (parent, *rest) in self.nodes.items()}  # type: ignore[misc]
        self.log_probs = {name(number): log_prob for number, log_prob in self.log_probs.items()}
        self.grown = {name(number) for number in self.grown}

    def path_log_prob(self, number: int) -> float:
        return self.log_probs[number] + self.path_log_prob(self.nodes[number][0]) if number != ROOT else 0.0

    def path(self, number: int) -> list[int]:
        tokens: list[int] = []
        while number != ROOT:
            number, token, *_ = self.nodes[number]
            tokens.append(token)
        return tokens[::-1]
