"""One round: plan it, obtain a token tree, have it verified in one target call, commit the tokens, learn from it.

The round's plan names a mode, and a mode is a `Source` of trees. The prompt is a round without a tree. `Tally` counts
the rounds here; `Answer` (text.py) turns the tokens into text.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from specsplit.core.defaults import Mode
from specsplit.core.errors import Overloaded
from specsplit.core.types import Timings, TokenLogProb, Verdict
from specsplit.orchestrator.draft_client import DraftClient
from specsplit.orchestrator.request import Chunk, RoundFacts, SpeculativeDecoding
from specsplit.orchestrator.sources.base import RoundResult, Source
from specsplit.orchestrator.target_client import TargetClient
from specsplit.orchestrator.text import Answer
from specsplit.speculation.cost_model import RoundMode
from specsplit.speculation.round_plan import RoundPlanner
from specsplit.speculation.statistics import SpeculationStats
from specsplit.telemetry import spans
from specsplit.telemetry.session_log import session_id


@dataclass(frozen=True, slots=True)
class SessionWorkers:
    """A session's views of its workers, and what is known about them."""

    target: TargetClient
    draft: DraftClient | None
    """None if there is no draft, or the session's mode never asks one."""
    stats: SpeculationStats


class Rounds:
    """The rounds of one session. `mode` is the user's; `sources` has one for every mode that the planner may choose."""

    def __init__(
        self,
        mode: Mode,
        workers: SessionWorkers,
        planner: RoundPlanner,
        sources: Mapping[RoundMode, Source],
        answer: Answer,
        tally: Tally,
    ) -> None:
        self.number = 0
        self.mode: Mode = mode
        self.answer = answer
        self.tally = tally
        self.logprobs: list[TokenLogProb] = []
        """One for each of the answer's tokens if the request asked for them."""
        self.span = spans.OpenSpan("request", session=session_id(workers.target.contract.session))
        self._workers, self._planner, self._sources = workers, planner, sources
        self._source: Source | None = None

    def end_span(self, model: str, num_prompt_tokens: int) -> None:
        """End the span of the request, in the words of OpenTelemetry's conventions for generative models."""
        if spans.is_on:
            self.span.end(
                {
                    "gen_ai.request.model": model,
                    "gen_ai.usage.input_tokens": num_prompt_tokens,
                    "gen_ai.usage.output_tokens": len(self.answer.token_ids),
                }
            )

    async def next_chunk(self) -> Chunk:
        """Run one round, the prompt's first, and return what it adds to the answer."""
        number, events = self.number, self._workers.target.contract.events
        running = self._run()
        if spans.is_on:
            running = spans.around(running, "round", _round_attributes, self.span.context, round=number)
        result = await running
        path_length = self.tally.add(result)
        num_accepted = result.num_accepted
        cut = self.answer.take(result.verdict.token_ids, num_accepted)
        num_tokens = len(cut.token_ids)
        logprobs = result.verdict.log_probs[:num_tokens]
        self.logprobs += logprobs
        return Chunk(
            token_ids=cut.token_ids,
            accepted=(True,) * min(num_accepted, num_tokens) + (False,) * (num_tokens - num_accepted),
            pieces=cut.pieces,
            finish_reason=cut.finish_reason,
            logprobs=logprobs,
            degraded=events.current if events.phases else None,
            facts=RoundFacts(
                number=number,
                mode=result.mode,
                num_nodes=len(result.verdict.verified),
                num_accepted=num_accepted,
                verify_s=result.verify_s,
                decision=result.plan.decision,
                tree=result.speculation.proposal,
                verdict=result.verdict,
                path_length=path_length,
            ),
        )

    async def _run(self) -> RoundResult:
        """Run one round up to what it teaches: plan, tree, verify, commit, learn."""
        loop, target, stats, number = asyncio.get_running_loop(), self._workers.target, self._workers.stats, self.number
        began_s = loop.time()
        draft = self._workers.draft if not self._planner.num_resting else None  # a round that rests asks it nothing
        history, events = target.contract.history, target.contract.events
        events.round = number
        trouble = draft.trouble if draft is not None else None
        plan = self._planner.plan_round(
            len(history.ids),
            draft.context if draft is not None else sys.maxsize,
            has_draft=draft is not None and trouble is None and not draft.is_busy,
            num_to_read=draft.contract.num_to_read if draft is not None and self.mode == "auto" else 0,
        )
        decision = plan.decision if not plan.is_resting else None

        source = self._sources[plan.mode]
        if source is not self._source:
            if self._source is not None:
                await self._source.leave()
            self._source = source
        make_input = source.next_input if number else source.first_input
        try:
            speculation = await make_input(plan, target.next_node)
        except Overloaded as error:
            if error.limit != "streams" or self.mode != "auto":
                raise
            self._planner.leave_streams()  # the caller has as many open as one may have: rounds need none
            return await self._run()
        is_catching_up = draft is not None and draft.is_busy and draft.contract.lacks_long_text
        verdict = speculation.commit  # a streaming target has verified already
        if verdict is None:
            verifying = target.verify(speculation.proposal)
            if spans.is_on:
                num_nodes = len(speculation.proposal)
                verifying = spans.around(verifying, "verify", _verify_attributes, round=number, nodes=num_nodes)
            verdict = await verifying

        # From here to the end of the round nothing waits, so a cancelled request never leaves half a round.
        history.extend(verdict.token_ids)
        mode = "lookup" if speculation.is_looked_up else plan.mode
        result = RoundResult(number, plan, speculation, verdict, target.verify_s, mode, len(verdict.accepted), began_s)
        source.observe(result)
        if number:
            if decision is not None and not is_catching_up:  # else it could have no nodes, and says nothing of its mode
                stats.observe_round(decision, mode, len(verdict.token_ids), began_s, loop.time(), plan.num_rounds)
            if trouble is not None and self.mode in ("auto", "stream"):
                events.degrade("draft", trouble)  # other modes ask the draft, and report why that failed
        self.number = number + 1
        return result


class Tally:
    """Counts the rounds of one request; tokens that a stop condition cuts off are counted, too.

    The histograms begin with places for `max_depth` levels, 0 without speculation; a deeper tree adds places.
    """

    def __init__(self, max_depth: int) -> None:
        self.num_rounds = -1  # the prompt's round is not counted
        self.rounds_by_mode: dict[RoundMode, int] = {}
        self.target_forwards = 0
        self.draft_forwards = 0
        self.target_device_ms = 0.0
        self.draft_device_ms = 0.0
        self.draft_waited_ms = 0.0
        self.num_reused = 0
        self._num_ahead = self._num_kept = 0
        self._trees = _TreeCounts([0] * (max_depth + 1 if max_depth else 0), [0] * max_depth)

    def add(self, result: RoundResult) -> int:
        """Count one round, and return the length of its path."""
        verified, speculation = result.verdict.timings, result.speculation
        self.target_forwards += verified.num_forwards
        if self.num_rounds < 0:  # what is sent again to another worker, or after a preemption, was no one's prompt
            self.num_reused = result.verdict.num_reused
        self.num_rounds += 1
        if self.num_rounds:
            self.rounds_by_mode[result.mode] = self.rounds_by_mode.get(result.mode, 0) + 1
            self.target_device_ms += verified.device_ms
        drafted = speculation.proposal.timings
        self.draft_forwards += drafted.num_forwards
        self.draft_device_ms += drafted.device_ms
        self.draft_waited_ms += speculation.waited_device_ms
        if speculation.is_kept is not None:
            self._num_ahead += 1
            self._num_kept += speculation.is_kept
        return self._trees.add(result) if result.verdict.verified else 0

    def add_drafted(self, drafted: Timings) -> None:
        """Count work of the draft whose nodes came after the last round's tree was made."""
        self.draft_forwards += drafted.num_forwards
        self.draft_device_ms += drafted.device_ms

    def summary(self) -> SpeculativeDecoding:
        """Return the counts as published; a round that accepted k nodes accepted one at every depth up to k."""
        trees = self._trees
        histogram = trees.histogram
        accepted_by_depth = tuple(sum(histogram[depth:]) for depth in range(1, len(histogram)))
        return SpeculativeDecoding(
            num_spec_steps=sum(histogram),
            num_draft_tokens=trees.num_nodes,
            num_path_tokens=trees.num_path_nodes,
            num_accepted_draft_tokens=sum(accepted_by_depth),
            acceptance_histogram=tuple(histogram),
            tested_by_depth=tuple(trees.tested),
            accepted_by_depth=accepted_by_depth,
            num_ahead_rounds=self._num_ahead,
            num_kept_rounds=self._num_kept,
        )


@dataclass(slots=True)
class _TreeCounts:
    """Counts of the rounds with at least one scored node."""

    histogram: list[int]
    """Rounds by the number of accepted nodes."""
    tested: list[int]
    """Per depth, the rounds in which the target scored a node there whose parent it accepted."""
    num_nodes: int = 0
    num_path_nodes: int = 0

    def add(self, result: RoundResult) -> int:
        path_length = path_depth(result)
        while len(self.tested) < path_length:
            self.histogram.append(0)
            self.tested.append(0)
        self.num_nodes += len(result.verdict.verified)
        self.num_path_nodes += path_length
        self.histogram[result.num_accepted] += 1
        for depth in range(min(result.num_accepted + 1, path_length)):
            self.tested[depth] += 1
        return path_length


def path_depth(result: RoundResult) -> int:
    """Return the length of the longest path of scored nodes that begins with the accepted ones."""
    proposal, verdict, depths = result.speculation.proposal, result.verdict, result.speculation.depths
    first, accepted = proposal.first_node, verdict.accepted
    if not accepted:
        if len(verdict.verified) == len(depths):
            return max(depths)
        return max([depths[number - first] for number in verdict.verified])
    below = {accepted[-1]}
    deepest = len(accepted)
    for number in verdict.verified:
        if proposal.parents[number - first] in below:
            below.add(number)
            deepest = max(deepest, depths[number - first])
    return deepest


def _round_attributes(result: RoundResult) -> dict[str, spans.Attribute]:
    return {"nodes": len(result.speculation.proposal), "accepted": result.num_accepted}


def _verify_attributes(verdict: Verdict) -> dict[str, spans.Attribute]:
    return {"accepted": len(verdict.accepted), "forwards": verdict.timings.num_forwards}
