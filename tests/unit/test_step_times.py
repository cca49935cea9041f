"""Workers measure their forwards when they begin, tell them with their identity, and `auto` begins with that."""

from __future__ import annotations

import math

import pytest

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import Identity
from specsplit.draft.engine import DraftEngine
from specsplit.engine import measure as step_times
from specsplit.model.loader import Role
from specsplit.rpc import codec
from specsplit.speculation.statistics import SpeculationStats
from specsplit.speculation.step_times import StepTimes
from specsplit.target.engine import TargetEngine
from tests.support.hash_model import hash_model

IDENTITY = Identity(role="target", model="m", vocab_size=8, vocab_hash="v", context=64, max_nodes=16)
TIMES = ((1, 0.010), (5, 0.015), (17, 0.030))


@pytest.mark.parametrize("role", ["draft", "target"])
async def test_an_engine_tells_its_step_times_once_it_has_measured(role: Role):
    model, runner = hash_model(role, max_sessions=2, context=64)
    engine = TargetEngine(model) if role == "target" else DraftEngine(model)
    assert (await engine.ping()).step_times == ()
    await engine.measure()
    measured = (await engine.ping()).step_times
    rows = [count for count, _ in measured]
    assert rows == sorted(set(rows))
    assert rows[0] == 1
    assert rows[-1] <= min(model.context, model.node_limit + 1)
    assert all(0 < seconds < math.inf for _, seconds in measured)
    assert engine.num_sessions == 0
    assert not runner.violations
    await engine.aclose()


async def test_a_slow_model_is_measured_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch):
    model, _ = hash_model("target", max_sessions=1, context=64)
    engine = TargetEngine(model)
    monkeypatch.setattr(step_times, "BUDGET_S", 0.0)
    await engine.measure()
    assert [rows for rows, _ in (await engine.ping()).step_times] == [1]
    await engine.aclose()


def test_step_times_travel_with_the_identity():
    sent = codec.decode_identity(codec.encode_identity(IDENTITY, "1"))
    assert sent.step_times == ()
    message = codec.encode_identity(Identity(**{**_fields(), "step_times": TIMES}), "1")
    came = codec.decode_identity(message).step_times
    assert [rows for rows, _ in came] == [rows for rows, _ in TIMES]
    assert [seconds for _, seconds in came] == pytest.approx([seconds for _, seconds in TIMES])


def _fields() -> dict[str, object]:
    return {name: getattr(IDENTITY, name) for name in IDENTITY.__dataclass_fields__}


@pytest.mark.parametrize("times", [[(0, 0.1)], [(2, 0.1), (1, 0.1)], [(1, 0.1), (1, 0.1)], [(1, math.nan)], [(1, 0.0)]])
def test_step_times_that_cannot_be_are_refused(times: list[tuple[int, float]]):
    message = codec.encode_identity(Identity(**{**_fields(), "step_times": tuple(times)}), "1")
    with pytest.raises(InvalidRequest, match="step times"):
        codec.decode_identity(message)


def test_what_workers_measured_is_where_an_experience_begins():
    stats = SpeculationStats()
    assert stats.decide((), _limits(), has_draft=False) is None
    stats.times.adopt(Identity(**{**_fields(), "step_times": TIMES}), None)
    assert stats.times.has_seen_plain
    assert stats.times.verify is not None
    assert dict(TIMES).items() <= stats.times.verify.grid.items()
    decision = stats.decide(("pingpong",), _limits(), has_draft=True)
    assert decision is not None
    assert {plan.mode for plan in decision.alternatives} == {"plain"}, "no draft has proposed anything yet"
    # What was learned since is not thrown away for what was measured at the start.
    for _ in range(9):
        stats.times.verify.observe(1, 0.020)
    stats.times.adopt(Identity(**{**_fields(), "step_times": TIMES}), None)
    assert stats.times.verify.seconds(1) > 0.015


def _limits():
    from specsplit.speculation.cost_model import Limits

    return Limits()


def test_rows_beyond_the_grid_cost_though_corrections_made_its_end_flat():
    times = StepTimes({1: 0.006, 17: 0.010, 33: 0.011})
    for _ in range(9):  # seventeen sessions decode plainly, and the next point follows by half
        times.observe(17, 0.022)
    assert times.grid[17] == times.grid[33]
    assert times.seconds(528) > 10 * times.seconds(33)


def test_times_that_were_measured_beside_other_work_are_corrected_at_once():
    measured = {1: 0.040, 2: 0.045, 5: 0.050, 17: 0.090}
    disturbed, quick = StepTimes(measured), {1: 0.0007, 2: 0.0009, 17: 0.0020}
    for rows, seconds in quick.items():  # of other sizes each, so that no point has been seen three times
        disturbed.observe(rows, seconds)
    assert all(disturbed.seconds(rows) < 0.05 * seconds for rows, seconds in measured.items())
    slower = StepTimes(measured)
    for rows, seconds in measured.items():
        slower.observe(rows, 2 * seconds)
    assert slower.grid == pytest.approx(measured), "slower ones may be an odd moment"


def test_a_size_that_was_slow_long_ago_is_as_slow_as_those_seen():
    measured = {1: 0.010, 2: 0.011, 5: 0.014, 9: 0.018, 17: 0.026}
    times = StepTimes(measured)
    for _ in range(20):  # other work slows the machine, and the plan falls back to plain decoding
        times.observe(5, 0.140)
    for _ in range(8):
        times.observe(1, 0.010)
    assert times.seconds(5) > 0.1, "what was seen of it is believed first"
    for _ in range(200):
        times.observe(1, 0.010)
    assert times.seconds(5) < 0.018
    assert times.seconds(1) == pytest.approx(0.010)
    times.observe(5, 0.014)
    assert times.seconds(5) == pytest.approx(0.014, rel=0.02), "one quick forward is proof"


def test_fewer_rows_are_not_believed_slower_than_more_that_are_seen():
    """Else all sizes were about as slow, and the largest tree seemed to cost nothing."""
    times = StepTimes({1: 0.010, 2: 0.011, 5: 0.014, 9: 0.018, 17: 0.026})
    for _ in range(12):
        times.observe(5, 0.140)
    for _ in range(12):
        times.observe(17, 0.026)
    assert times.seconds(5) < 0.022


def test_what_a_size_was_forgiven_in_vain_says_nothing_of_the_others():
    times = StepTimes({1: 0.010, 2: 0.011, 5: 0.014, 9: 0.018, 17: 0.026})
    for _ in range(40):
        times.observe(5, 0.014)
    for _ in range(20):
        times.observe(17, 0.052)  # as the rows of this model take, whatever the start said
    for _ in range(400):
        times.observe(5, 0.014)
    assert times.seconds(17) < 0.035
    before = times.seconds(5)
    for _ in range(20):
        times.observe(17, 0.052)
    assert times.seconds(17) == pytest.approx(0.052, rel=0.05)
    assert times.seconds(5) == pytest.approx(before, rel=0.1)


def test_one_quick_forward_of_a_draft_that_is_seldom_asked_is_proof():
    times = StepTimes({1: 0.001, 5: 0.002})
    for _ in range(9):
        times.observe(1, 0.010)
    times.observe(1, 0.001)
    assert times.seconds(1) > 0.005
    times.observe(1, 0.001, is_rare=True)
    assert times.seconds(1) == pytest.approx(0.001)


def test_noise_after_a_disturbance_leads_no_other_size_down():
    measured = {1: 0.010, 2: 0.011, 5: 0.014, 9: 0.018, 17: 0.026}
    times = StepTimes(measured)
    for _ in range(20):
        times.observe(5, 0.140)
    for _ in range(200):
        times.observe(1, 0.010)
    for number in range(400):
        times.observe(5, 0.014 * (1.05, 0.95, 1.0, 1.08, 0.93)[number % 5])
    assert times.seconds(17) == pytest.approx(0.026, rel=0.1)


def test_probes_lead_no_other_size_of_a_draft_astray():
    times = StepTimes({1: 0.0010, 2: 0.0011, 5: 0.0015, 9: 0.0020})
    for number in range(200):
        times.observe(2, 0.0011 * (1.1, 0.9, 1.0, 1.15, 0.95)[number % 5], is_rare=True)
    assert times.seconds(2) == pytest.approx(0.0011, rel=0.1)
    assert times.seconds(9) == pytest.approx(0.0020, rel=0.1)
