"""How speculation did in one HTTP request: vLLM's per-request statistics, and the trace of a chunk's round."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from specsplit.core.ports import Tokenizer
from specsplit.orchestrator.request import Chunk, RoundFacts

Detail = Literal["none", "summary", "detailed"]


class SpeculationRecord:
    """The rounds with a drafted token, of all answers to one request, in the order in which they ended."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        """Tokens drafted along a round's path, and how many of them were accepted."""
        self.num_tree_nodes = 0

    def add(self, facts: RoundFacts | None) -> None:
        """Count a round."""
        if facts is not None and facts.path_length:
            self.steps.append((facts.path_length, facts.num_accepted))
            self.num_tree_nodes += facts.num_nodes

    def to_dict(self, detail: Detail) -> dict[str, Any]:
        """Return the statistics in vLLM's shape; `num_tree_nodes` is ours, since a round drafts a tree."""
        num_steps = len(self.steps)
        num_drafted, num_accepted = sum(drafted for drafted, _ in self.steps), sum(kept for _, kept in self.steps)
        longest = max((drafted for drafted, _ in self.steps), default=0)
        lengths = sorted({drafted for drafted, _ in self.steps})
        summary = {
            "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else 1.0,
            "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
            "acceptance_histogram": self._histogram(longest),
            "acceptance_histogram_by_draft_length": {str(n): self._histogram(n, only=n) for n in lengths},
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": num_drafted,
            "num_spec_tokens": longest,
            "num_tree_nodes": self.num_tree_nodes,
        }
        if detail == "detailed":
            summary["per_step_drafted"] = [drafted for drafted, _ in self.steps]
            summary["per_step_accepted"] = [kept for _, kept in self.steps]
        return summary

    def _histogram(self, longest: int, only: int | None = None) -> list[int]:
        """Return how many rounds accepted 0, 1, ... `longest` tokens; `only` those that drafted so many."""
        counts = Counter(kept for drafted, kept in self.steps if only in (None, drafted))
        return [counts[kept] for kept in range(longest + 1)]


def trace_of(chunk: Chunk, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return which of a chunk's tokens were drafted, and what its round drafted, kept and rejected."""
    tokens = [
        {"id": token_id, "text": tokenizer.token_text(token_id), "drafted": drafted}
        for token_id, drafted in zip(chunk.token_ids, chunk.accepted, strict=True)
    ]
    facts = chunk.facts
    # A token can be part of a character; the pieces join to the chunk's text.
    pieces = [{"text": text, "drafted": drafted} for text, drafted in chunk.pieces]
    trace: dict[str, Any] = {"tokens": tokens, "pieces": pieces}
    if facts is not None:
        trace["round"] = {
            "number": facts.number,
            "mode": facts.mode,
            "num_drafted": facts.path_length,
            "num_accepted": facts.num_accepted,
            "verify_ms": round(facts.verify_s * 1e3, 3),
            "nodes": _nodes(facts, tokenizer),
        }
    if chunk.degraded is not None:
        trace["degraded"] = chunk.degraded
    return trace


def _nodes(facts: RoundFacts, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the verified nodes of a round's tree; `parent` is an index into the list, -1 below the last token."""
    tree, accepted = facts.tree, frozenset(facts.verdict.accepted)
    nodes: list[dict[str, Any]] = []
    places: dict[int, int] = {}
    for number in sorted(facts.verdict.verified):
        index = number - tree.first_node
        if not 0 <= index < len(tree):
            continue  # a streaming target was sent it with an earlier tree
        places[number] = len(nodes)
        token_id = tree.token_ids[index]
        nodes.append(
            {
                "id": token_id,
                "text": tokenizer.token_text(token_id),
                "parent": places.get(tree.parents[index], -1),
                "accepted": number in accepted,
            }
        )
    return nodes
