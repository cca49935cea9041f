"""Count what rounds offered and what was accepted, before any stop cuts the tokens.

Fed by the pipeline once per round; published in the result.
"""

from __future__ import annotations

from specsplit.core.types import Timings
from specsplit.orchestrator.request import SpeculativeDecoding
from specsplit.orchestrator.round import RoundResult
from specsplit.speculation.cost_model import RoundMode


class Tally:
    """The counts of one request; `max_depth` is how deep trees are meant to be, 0 without speculation."""

    def __init__(self, max_depth: int) -> None:
        self.target_forwards = 0
        self.draft_forwards = 0
        self.rounds_by_mode: dict[RoundMode, int] = {}
        self.num_rounds = -1  # the prompt's round is not counted
        self.target_device_ms = 0.0
        self.draft_device_ms = 0.0
        self.draft_waited_ms = 0.0
        self._num_ahead = self._num_kept = 0
        self._nodes = 0
        self._path_nodes = 0
        self._histogram = [0] * (max_depth + 1 if max_depth else 0)
        self._tested = [0] * max_depth

    def add(self, outcome: RoundResult) -> None:
        """Count one round."""
        verified = outcome.verdict.timings
        self.target_forwards += verified.num_forwards
        self.num_rounds += 1
        if self.num_rounds:
            self.rounds_by_mode[outcome.mode] = self.rounds_by_mode.get(outcome.mode, 0) + 1
            self.target_device_ms += verified.device_ms
        drafted = outcome.offer.proposal.timings
        if drafted.num_forwards:
            self.add_drafted(drafted)
        self.draft_waited_ms += outcome.offer.waited_device_ms
        if outcome.offer.is_kept is not None:
            self._num_ahead += 1
            self._num_kept += outcome.offer.is_kept
        if outcome.verdict.verified:
            self._add_tree(outcome)

    def add_drafted(self, drafted: Timings) -> None:
        """Count what the draft did."""
        self.draft_forwards += drafted.num_forwards
        self.draft_device_ms += drafted.device_ms

    def _add_tree(self, outcome: RoundResult) -> None:
        path_length = path_depth(outcome)
        num_accepted = outcome.num_accepted
        while len(self._tested) < path_length:
            self._histogram.append(0)
            self._tested.append(0)
        self._nodes += len(outcome.verdict.verified)
        self._path_nodes += path_length
        self._histogram[num_accepted] += 1
        for depth in range(min(num_accepted + 1, path_length)):
            self._tested[depth] += 1

    def summary(self) -> SpeculativeDecoding:
        """Return the counts as published; a round that accepted k nodes accepted one at every depth up to k."""
        histogram = self._histogram
        accepted_by_depth = tuple(sum(histogram[depth:]) for depth in range(1, len(histogram)))
        return SpeculativeDecoding(
            num_spec_steps=sum(histogram),
            num_draft_tokens=self._nodes,
            num_path_tokens=self._path_nodes,
            num_accepted_draft_tokens=sum(accepted_by_depth),
            acceptance_histogram=tuple(histogram),
            tested_by_depth=tuple(self._tested),
            accepted_by_depth=accepted_by_depth,
            num_ahead_rounds=self._num_ahead,
            num_kept_rounds=self._num_kept,
        )


def path_depth(outcome: RoundResult) -> int:
    """Return the length of the longest path of scored nodes that begins with the accepted ones."""
    proposal, verdict, depths = outcome.offer.proposal, outcome.verdict, outcome.offer.depths
    first, accepted = proposal.first_node, verdict.accepted
    if not accepted:
        return max(depths[number - first] for number in verdict.verified)
    below = {accepted[-1]}
    deepest = len(accepted)
    for number in verdict.verified:
        if proposal.parents[number - first] in below:
            below.add(number)
            deepest = max(deepest, depths[number - first])
    return deepest
