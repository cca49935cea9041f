"""The formulas of the limit against values worked out by hand, and the measurement of their inputs on a small model."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace

import pytest

from benchmarks import limits, summary
from benchmarks.limits import Costs, Inputs, limits_by_name, reached, read_costs
from tests.support.bench_runs import made_file, made_header, round_records

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
    assert limits_by_name(INPUTS)["AR"] == pytest.approx(125.0)
    assert limits_by_name(INPUTS)["L0"] == pytest.approx(3 / (0.004 + 0.006 + 0.010))
    assert limits_by_name(INPUTS)["L1"] == pytest.approx(3 / (0.016 + 0.5 * 0.004))
    assert limits_by_name(INPUTS)["L1_streamed"] == pytest.approx(3 / (0.010 + 0.5 * 0.0 + 0.5 * 0.010))
    assert limits_by_name(INPUTS)["L2"] == pytest.approx(300.0)


def test_a_slow_draft_bounds_the_overlap_and_the_roof():
    slow = replace(INPUTS, level_s=0.010)
    assert limits_by_name(slow)["L1"] == pytest.approx(3 / (0.040 + 0.5 * 0.040))
    assert limits_by_name(slow)["L1_streamed"] == pytest.approx(3 / (0.010 + 0.5 * 0.036 + 0.5 * 0.046))
    assert limits_by_name(slow)["L2"] == pytest.approx(3 / 2 / 0.010)


def test_the_limits_of_the_first_modes_are_one_for_a_fast_draft():
    inputs = replace(INPUTS, hit_rate=0.0)
    assert limits_by_name(inputs)["L1"] == pytest.approx(limits_by_name(inputs)["L0"])
    assert limits_by_name(inputs)["L1_streamed"] == pytest.approx(limits_by_name(inputs)["L0"])


def test_plain_decoding_has_no_draft_to_wait_for():
    plain = Inputs(1.0, 0.0, 0.0, 0.008, 0.008, 0.0, 0.0)
    assert (
        limits_by_name(plain)["L0"]
        == limits_by_name(plain)["L2"]
        == limits_by_name(plain)["AR"]
        == pytest.approx(125.0)
    )


def test_the_fractions_are_what_was_measured_over_the_limit():
    found = reached(INPUTS, 75.0, may_stream=False)
    assert found["phi0"] == pytest.approx(75 / 150)
    assert found["phi1"] == pytest.approx(75 / (3 / 0.018))
    assert found["phi2"] == pytest.approx(75 / 300)
    assert reached(INPUTS, 75.0, may_stream=True)["phi1"] == pytest.approx(75 / 200)
    assert found["inputs"] == {"A": 3.0, "D": 4.0, "t_d": 0.001, "t_v_n": 0.010, "t_v_1": 0.008, "r": 0.006, "h": 0.5}


def test_a_mode_that_may_stream_is_held_to_the_higher_limit():
    far = replace(INPUTS, level_s=0.010, round_trip_s=0.030)
    assert limits_by_name(far)["L1_streamed"] < limits_by_name(far)["L1"]
    assert reached(far, 20.0, may_stream=True)["phi1"] == pytest.approx(20 / limits_by_name(far)["L1"])


@pytest.mark.parametrize(("rows", "seconds"), [(1, 1.0), (0.5, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (6, 6.0)])
def test_verify_times_lie_on_the_lines_between_the_measured_ones(rows: float, seconds: float):
    assert Costs({1: 1.0, 2: 2.0, 4: 4.0}, None, 0.0, 8).verify_seconds(rows) == pytest.approx(seconds)


def test_verify_times_never_fall_beyond_the_grid():
    assert Costs({1: 2.0, 2: 1.0}, None, 0.0, 8).verify_seconds(9) == 1.0


def test_costs_survive_their_json():
    costs = Costs({1: 1.0, 2: 2.0}, 0.5, 0.1, 8)
    assert read_costs(json.loads(json.dumps(asdict(costs)))) == costs


def test_levels_that_lookup_gave_and_no_forward_made_are_not_counted():
    header = made_header(1, pingpong="pingpong")
    records = round_records(0, header)
    for record in records[:2]:
        record["draft_forwards"] = 3
    found = summary.summarise(made_file(header, records).run())["pingpong"]["limits"]
    assert found["inputs"]["D"] == pytest.approx(3 / 5)


@pytest.mark.parametrize(("mode", "is_free"), [("auto", True), ("stream", True), ("overlap", False)])
def test_the_modes_that_may_stream_are_held_to_the_streamed_limit(mode: str, is_free: bool):
    header = made_header(1, **{mode: mode})
    records = round_records(0, header)
    for record in records[:2]:
        record["speculative_decoding"] |= {"num_ahead_rounds": 5, "num_kept_rounds": 5}
    found = summary.summarise(made_file(header, records).run())[mode]["limits"]
    assert found["L1_streamed"]["median"] > found["L1"]["median"]
    bound = found["L1_streamed" if is_free else "L1"]["median"]
    assert found["phi1"]["median"] == pytest.approx(found["tokens_per_s"]["median"] / bound)


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
