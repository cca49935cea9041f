"""Mode stream: the target goes on by itself, and is sent nodes as they are grown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specsplit.core.types import ROOT, Proposal, Verdict
from specsplit.limits import FIRST_FOUND
from specsplit.orchestrator.sources.base import RoundResult, SpeculationInput
from specsplit.orchestrator.sources.speculator import Speculator, TreeSource
from specsplit.orchestrator.target_client import TargetClient, renumbered
from specsplit.speculation.round_plan import RoundPlan
from specsplit.speculation.token_tree import ROOT_INDEX, SpeculationTree, num_forks
from specsplit.telemetry import spans


class StreamSource(TreeSource):
    """Waits for commits, never for the draft; feeds the target's stream with the tree's new nodes."""

    def __init__(self, speculator: Speculator, target: TargetClient) -> None:
        super().__init__(speculator)
        self._target = target
        self._is_concurrent = False
        """Whether the draft was at work when the last wait for a commit began."""

    async def first_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Let draft and target take in the prompt at the same time, and return the first commit."""
        self._grow(plan)
        return await self._next_commit()

    async def next_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Grow nodes for the target's next steps without waiting, and return its next commit."""
        # With a commit already here, nodes below the present root would only come late: take the commit first.
        if not self._target.has_commit:
            if plan.limit is not None:
                self._speculator.look_up(plan.limit)  # not trimmed here: the target verifies those worth their rows
            self._grow(plan)
        return await self._next_commit()

    def _grow(self, plan: RoundPlan) -> None:
        """Have the draft grow the tree in the background; every answer is sent to the target as it comes."""
        background, budget = self._speculator.background, plan.budget
        if background is None:
            return
        background.on_nodes = self._target.push
        if budget is None:
            background.stop()  # an earlier decision may still have the draft at work
            if plan.probe is not None:
                background.probe(plan.probe)
        else:
            background.grow(budget, self._speculator.stats.times.count_steps_away(max(budget.max_new_nodes, 2)))
        self._is_concurrent = background.is_running

    async def _next_commit(self) -> SpeculationInput:
        committing = self._target.next_commit(self)
        if spans.is_on:
            number = self._target.contract.events.round
            committing = spans.around(committing, "commit", _span_attributes, round=number)
        return self._scored(await committing)

    def _scored(self, commit: Verdict) -> SpeculationInput:
        """Return what the target verified as a round's input, with the verdict in the numbers of that input."""
        # Stream numbers name the tree's nodes from before this commit, since it is rooted anew only after it.
        named = _named(commit.verified)
        nodes = _sent_nodes(self._speculator.tree, named)
        assert nodes is not None, "the target client has asked `has_sent`"
        number_of = dict(zip(named, range(1, len(named) + 1), strict=True))
        speculation = self._speculator.make_input(nodes, 1, commit=commit)
        if commit.found is not None:
            speculation = _with_found(speculation, commit.found, number_of)
        accepted = tuple([number_of[number] for number in commit.accepted])
        verified = tuple(range(1, len(speculation.depths) + 1))
        return replace(speculation, commit=renumbered(commit, accepted, verified))

    # The stream takes its nodes from here; see `target_client.NodeFeed`.

    def take_unsent(self, first_node: int) -> tuple[Proposal, bool]:
        """Return the draft's nodes not yet sent, numbered from `first_node`, and whether it is at work on more."""
        background = self._speculator.background
        is_more_coming = background is not None and background.is_growing
        return self._speculator.tree.take_unsent(first_node), is_more_coming

    def forget_sent(self) -> None:
        """Count all nodes as unsent: the stream begins anew."""
        self._speculator.tree.forget_sent()

    def has_sent(self, commit: Verdict) -> bool:
        """Return whether the commit's nodes are a tree of those sent, and its path spells its tokens."""
        # Nodes that the target found itself were checked when the commit was decoded.
        tree, path = self._speculator.tree, _named(commit.accepted)
        if _sent_nodes(tree, _named(commit.verified)) is None:
            return False
        return [tree.sent_numbers[node] for node in tree.nodes.walk(commit.token_ids[: len(path)])] == path

    def observe(self, result: RoundResult) -> None:
        """Learn from a commit, and root the tree anew."""
        speculator, verdict = self._speculator, result.verdict
        if verdict.timings.num_tokens == 1 + len(verdict.verified):  # otherwise the step took in text as well
            forks = num_forks(result.speculation.proposal.parents)
            times = speculator.stats.times
            times.observe_step(verdict.timings, is_concurrent=self._is_concurrent, num_forks=forks)
        speculator.waits.end_round(had_nodes=True)
        speculator.advance(result, is_streamed=True)

    async def leave(self) -> None:
        """Close the stream; the target keeps the session's slot for unary rounds."""
        if self._speculator.background is not None:
            self._speculator.background.on_nodes = None
        await self._target.close_stream(keeps_slot=True)


def _named(numbers: Sequence[int]) -> list[int]:
    """Return the numbers that the client gave, without those of nodes that the target found."""
    return [number for number in numbers if number < FIRST_FOUND]


def _sent_nodes(tree: SpeculationTree, numbers: Sequence[int]) -> list[int] | None:
    """Return the nodes with these numbers in the stream; None if they are no tree of sent nodes, parents first."""
    node_of = {number: node for node, number in enumerate(tree.sent_numbers) if number}
    parents, known, nodes = tree.nodes.parents, {ROOT_INDEX}, list[int]()
    for number in numbers:
        node = node_of.get(number)
        if node is None or node in known or parents[node] not in known:
            return None
        known.add(node)
        nodes.append(node)
    return nodes


def _with_found(speculation: SpeculationInput, found: Proposal, number_of: dict[int, int]) -> SpeculationInput:
    """Return the input with the nodes that the target found itself, and add their numbers to `number_of`."""
    proposal, depths = speculation.proposal, [*speculation.depths]
    parents = [*proposal.parents]
    for number, parent in enumerate(found.parents, FIRST_FOUND):
        above = number_of.get(parent, ROOT)
        parents.append(above)
        depths.append(depths[above - 1] + 1 if above else 1)
        number_of[number] = len(parents)
    whole = replace(
        proposal,
        token_ids=(*proposal.token_ids, *found.token_ids),
        parents=tuple(parents),
        log_probs=(*proposal.log_probs, *found.log_probs),
    )
    return replace(speculation, proposal=whole, depths=depths, num_found=len(found))


def _span_attributes(commit: Verdict) -> dict[str, spans.Attribute]:
    return {"nodes": len(commit.verified), "accepted": len(commit.accepted)}
