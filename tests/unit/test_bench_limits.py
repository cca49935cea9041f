"""The formulas of the limit against values worked out by hand, and the measurement of their inputs on a small model."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace

import pytest

from benchmarks import limits
from benchmarks.limits import Costs, Inputs, reached, read_costs

INPUTS = Inputs(
    tokens_per_round=3.0,
    num_levels=4.0,
    level_s=0.001,
    verify_s=0.010,
    verify_one_s=0.008,
    round_trip_s=0.006,
    hit_rate=0.5,
)


def test_the_limits_are_the_formulas_of_the_design():
    assert limits.autoregressive(INPUTS) == pytest.approx(125.0)
    assert limits.pingpong(INPUTS) == pytest.approx(3 / (0.004 + 0.006 + 0.010))
    assert limits.overlapped(INPUTS) == pytest.approx(3 / (0.016 + 0.5 * 0.004))
    assert limits.streamed(INPUTS) == pytest.approx(3 / (0.010 + 0.5 * 0.0 + 0.5 * 0.010))
    assert limits.roof(INPUTS) == pytest.approx(300.0)


def test_a_slow_draft_bounds_the_overlap_and_the_roof():
    slow = replace(INPUTS, level_s=0.010)
    assert limits.overlapped(slow) == pytest.approx(3 / (0.040 + 0.5 * 0.040))
    assert limits.streamed(slow) == pytest.approx(3 / (0.010 + 0.5 * 0.036 + 0.5 * 0.046))
    assert limits.roof(slow) == pytest.approx(3 / 2 / 0.010)


def test_the_limits_of_the_first_modes_are_one_for_a_fast_draft():
    inputs = replace(INPUTS, hit_rate=0.0)
    assert limits.overlapped(inputs) == pytest.approx(limits.pingpong(inputs))
    assert limits.streamed(inputs) == pytest.approx(limits.pingpong(inputs))


def test_plain_decoding_has_no_draft_to_wait_for():
    plain = Inputs(1.0, 0.0, 0.0, 0.008, 0.008, 0.0, 0.0)
    assert limits.pingpong(plain) == limits.roof(plain) == limits.autoregressive(plain) == pytest.approx(125.0)


def test_the_fractions_are_what_was_measured_over_the_limit():
    found = reached(INPUTS, 75.0, is_streamed=False)
    assert found["phi0"] == pytest.approx(75 / 150)
    assert found["phi1"] == pytest.approx(75 / (3 / 0.018))
    assert found["phi2"] == pytest.approx(75 / 300)
    assert reached(INPUTS, 75.0, is_streamed=True)["phi1"] == pytest.approx(75 / 200)
    assert found["inputs"] == {"A": 3.0, "D": 4.0, "t_d": 0.001, "t_v_n": 0.010, "t_v_1": 0.008, "r": 0.006, "h": 0.5}


@pytest.mark.parametrize(("rows", "seconds"), [(1, 1.0), (0.5, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (6, 6.0)])
def test_verify_times_lie_on_the_lines_between_the_measured_ones(rows: float, seconds: float):
    assert Costs({1: 1.0, 2: 2.0, 4: 4.0}, None, 0.0, 8).verify_seconds(rows) == pytest.approx(seconds)


def test_verify_times_never_fall_beyond_the_grid():
    assert Costs({1: 2.0, 2: 1.0}, None, 0.0, 8).verify_seconds(9) == 1.0


def test_costs_survive_their_json():
    costs = Costs({1: 1.0, 2: 2.0}, 0.5, 0.1, 8)
    assert read_costs(json.loads(json.dumps(asdict(costs)))) == costs


def test_the_costs_of_a_pair_are_measured_through_its_ports():
    from benchmarks.peers import costs
    from specsplit.assembly.local import local_workers
    from specsplit.assembly.models import load_models
    from specsplit.assembly.workers import Workers
    from specsplit.core.sections import DraftSettings, TargetSettings
    from specsplit.core.settings import Settings

    settings = Settings(target=TargetSettings(context=64, threads=1), draft=DraftSettings(context=64, threads=1))

    async def measured() -> tuple[Costs, Costs]:
        async with local_workers(load_models(settings)) as workers:
            alone = Workers(workers.verifier, None, workers.tokenizer)
            here = await costs.measure(workers, 20, travels=False)
            return here, await costs.measure(alone, 10**6, travels=True)

    here, elsewhere = asyncio.run(measured())
    assert list(here.verify_s) == list(limits.ROWS)
    assert min(here.verify_s.values()) > 0
    assert here.level_s is not None
    assert here.level_s > 0 == here.round_trip_s
    assert elsewhere.level_s is None
    assert elsewhere.round_trip_s > 0
    assert (here.context_tokens, elsewhere.context_tokens) == (20, 64 - 33), "the largest tree must fit behind"
