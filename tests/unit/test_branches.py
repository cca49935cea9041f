"""What a further branch of a tree costs a verify: measured at the start, weighed in plans and in what is verified."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsplit.core.types import Budget, Identity, Timings
from specsplit.draft.engine import DraftEngine
from specsplit.model.attention.metadata import SequenceInput
from specsplit.rpc import codec
from specsplit.speculation.cost_model import Costs, Limits, Profile, RoundMode, choose_plan, round_s
from specsplit.speculation.options import Speculation
from specsplit.speculation.step_times import StepTimes
from specsplit.speculation.token_tree import ROOT_INDEX, TokenTree, num_forks
from specsplit.speculation.worker_times import DraftTimes, WorkerTimes
from specsplit.target.engine import TargetEngine
from specsplit.target.held_tree import HeldTree
from specsplit.target.stream_scheduler import StreamScheduler
from tests.support.hash_model import hash_model

CURVE = ((1, 0.010), (5, 0.011), (17, 0.014))
PROFILE = Profile((0.6, 0.6), (0.4,))
LIMITS = Limits((1, 2, 3, 4, 6, 8), max_depth=6, branching=2)
RATE = 100.0


def times(fork_s: float) -> StepTimes:
    return StepTimes.from_start(CURVE, fork_s)


def costs(fork_s: float) -> Costs:
    return Costs(times(fork_s), DraftTimes(StepTimes({1: 1e-3})))


def tree_of(parents: list[int], probabilities: list[float]) -> TokenTree:
    tree = TokenTree()
    for node, (parent, probability) in enumerate(zip(parents, probabilities, strict=True)):
        tree.add(parent, node, math.log(probability))
    return tree


def test_a_plan_branches_where_that_is_free_and_not_where_it_is_dear():
    free, dear = (choose_plan({"pingpong": PROFILE}, costs(fork_s), LIMITS) for fork_s in (0.0, 0.02))
    assert (free.mode, free.branching) == ("pingpong", 2)
    assert (dear.mode, dear.branching, dear.nodes) == ("pingpong", 1, dear.depth)
    assert dear.tokens_per_s < free.tokens_per_s


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({}, (4, 3, 1)),
        ({"nodes": 8}, (8, 8, 1)),
        ({"nodes": 200}, (200, 64, 1)),
        ({"nodes": 8, "depth": 5}, (8, 5, 1)),
        ({"nodes": 8, "branching": 2}, (8, 3, 2)),
    ],
)
def test_a_chain_by_default_has_as_many_levels_as_nodes(given: dict[str, int], bounds: tuple[int, int, int]):
    speculation = Speculation(mode="pingpong", **given)
    dear, free = (Identity("target", "m", 8, "v", 64, 16, step_times=CURVE, fork_s=fork_s) for fork_s in (0.002, 0.0))
    assert speculation.for_target(dear).bounds == Budget(*bounds)
    assert speculation.for_target(free) == speculation


@settings(deadline=None)
@given(st.floats(0.01, 1), st.floats(0, 0.5), st.floats(1e-6, 0.02))
def test_a_plan_lies_between_the_best_chain_and_free_branches(first: float, catch: float, fork_s: float):
    profiles: dict[RoundMode, Profile] = {"pingpong": Profile((first,), (catch,))}
    found = choose_plan(profiles, costs(fork_s), LIMITS).tokens_per_s
    chain = choose_plan(profiles, costs(0.0), Limits(tuple(range(1, 7)), max_depth=6, branching=1))
    free = choose_plan(profiles, costs(0.0), replace(LIMITS, nodes=tuple(range(1, 9))))
    assert chain.tokens_per_s * (1 - 1e-9) <= found <= free.tokens_per_s * (1 + 1e-9)


def test_each_further_branch_takes_its_time():
    assert round_s("pingpong", 4, 2, costs(0.003), num_forks=2) == pytest.approx(
        round_s("pingpong", 4, 2, costs(0.0)) + 0.006
    )


def test_the_branches_of_all_sessions_of_a_step_are_paid_for():
    alone, many = costs(0.003), replace(costs(0.003), num_sessions=4)
    free = replace(costs(0.0), num_sessions=4)
    assert round_s("pingpong", 4, 2, many, num_forks=1) == pytest.approx(round_s("pingpong", 4, 2, free) + 0.012)
    assert (alone.fork_s, many.fork_s) == (0.003, 0.012)


def test_a_sibling_goes_only_with_what_is_worth_a_branch():
    tree = tree_of([-1, 0, 1, -1, 3, 4], [0.7, 0.9, 0.9, 0.2, 0.95, 0.9])
    ranked = tree.by_probability(range(6))
    assert tree.worth_verifying(ranked, times(0.0), RATE) == ranked
    assert tree.worth_verifying(ranked, times(0.005), RATE) == ranked, "the three are worth 0.56 tokens, a branch 0.5"
    assert tree.worth_verifying(ranked, times(0.006), RATE) == [0, 1, 2]


@settings(deadline=None)
@given(st.data(), st.floats(0, 0.02))
def test_what_is_left_is_a_tree_that_gains_no_less(data: st.DataObject, fork_s: float):
    count = data.draw(st.integers(1, 9))
    parents = [data.draw(st.integers(ROOT_INDEX, node - 1)) for node in range(count)]
    probabilities = [data.draw(st.floats(0.3, 0.99)) for _ in range(count)]
    tree = tree_of(parents, probabilities)
    ranked = tree.by_probability(range(count))
    flat = StepTimes.from_start(((1, 0.010), (17, 0.010)), fork_s)  # so that nodes cost nothing but their branches
    chosen = tree.worth_verifying(ranked, flat, RATE)
    assert all(parents[node] in (ROOT_INDEX, *chosen) for node in chosen)

    def gain(nodes: list[int]) -> float:
        tokens = sum(math.exp(tree.path_log_probs[node]) for node in nodes)
        return tokens - RATE * fork_s * num_forks([parents[node] for node in nodes])

    path, at = list[int](), ROOT_INDEX
    for node in ranked:
        if parents[node] == at:
            path.append(node)
            at = node
    assert gain(list(chosen)) >= max(gain(ranked), gain(path)) - 1e-9


def test_what_branches_take_does_not_slow_the_rows():
    identity = Identity("target", "m", 8, "v", 64, 16, step_times=CURVE, fork_s=0.002)
    worker = WorkerTimes()
    worker.adopt(identity, None)
    assert worker.verify is not None
    before = worker.verify.seconds(5)
    for _ in range(12):
        timings = Timings(device_ms=15.0, num_forwards=1, num_tokens=5, batch_size=1)
        worker.observe_round(timings, 0.016, 0.0, "tree", is_concurrent=False, num_forks=2)
        worker.observe_step(timings, is_concurrent=True, num_forks=2)
    assert worker.verify.seconds(5) == pytest.approx(before)
    assert worker.verify_concurrent is not None
    assert worker.verify_concurrent.seconds(5) == pytest.approx(before)


def test_a_stream_verifies_a_branch_only_if_it_pays():
    held, nodes = HeldTree(0, 64), TokenTree()
    nodes.add(ROOT_INDEX, 5, math.log(0.8))
    nodes.add(ROOT_INDEX, 6, math.log(0.1))
    held.take(nodes.proposal([0, 1], 1, 0))
    ranked, _ = held.ranked(8)
    assert len(StreamScheduler(CURVE, 64, 0.0).choose(held, ranked)) == 2
    assert len(StreamScheduler(CURVE, 64, 0.02).choose(held, ranked)) == 1


async def test_a_target_measures_what_a_branch_takes_and_says_so(monkeypatch: pytest.MonkeyPatch):
    for role, context, is_measured in (("target", 512, True), ("target", 64, False), ("draft", 512, False)):
        model, runner = hash_model(role, max_sessions=1, context=context)
        seen, forward = list[SequenceInput](), runner.forward

        def noted(
            entries: Sequence[SequenceInput],
            seen: list[SequenceInput] = seen,
            forward: Callable[[Sequence[SequenceInput]], list[torch.Tensor]] = forward,
        ) -> list[torch.Tensor]:
            seen.extend(entries)
            return forward(entries)

        monkeypatch.setattr(runner, "forward", noted)
        engine = TargetEngine(model) if role == "target" else DraftEngine(model)
        await engine.measure()
        identity = await engine.ping()
        assert any(entry.parents is not None for entry in seen) is is_measured
        assert 0 <= identity.fork_s < math.inf
        assert not runner.violations
        await engine.aclose()


@pytest.mark.parametrize(("sent", "believed"), [(0.25, 0.25), (-1.0, 0.0), (math.inf, 0.0), (math.nan, 0.0)])
def test_what_a_branch_takes_travels_and_nonsense_is_not_believed(sent: float, believed: float):
    identity = Identity("target", "m", 8, "v", 64, 16, fork_s=sent)
    assert codec.decode_identity(codec.encode_identity(identity, "1")).fork_s == believed
