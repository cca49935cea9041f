"""A target measures when it starts what a token of the text adds to a forward, and `auto` reckons with that at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specsplit.core.types import Timings
from specsplit.draft.engine import DraftEngine
from specsplit.engine import measure
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.head_shape import HeadShape
from specsplit.model.kv_cache import KVCache
from specsplit.model.loader import Role
from specsplit.rpc import codec
from specsplit.speculation.constants import FORK_BASE, MEDIAN_WINDOW
from specsplit.speculation.worker_times import OverheadTimes, WorkerTimes
from specsplit.target.engine import TargetEngine
from tests.support.hash_model import hash_model
from tests.unit.test_speculation_stats import TARGET

TOKEN_S = 1e-5
STEP_S = 0.04


async def measured(monkeypatch: pytest.MonkeyPatch, role: Role, context: int, token_s: float) -> float:
    """Return what a worker tells whose forwards take so much longer for each token that they stand behind."""
    model, runner = hash_model(role, max_sessions=1, context=context)
    forward, now_s = runner.forward, [0.0]

    def timed(entries: Sequence[SequenceInput]) -> list[torch.Tensor]:
        now_s[0] += STEP_S + token_s * sum(entry.base_length for entry in entries)
        return forward(entries)

    monkeypatch.setattr(runner, "forward", timed)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    engine = TargetEngine(model) if role == "target" else DraftEngine(model)
    await engine.measure()
    identity = await engine.ping()
    assert engine.num_sessions == 0
    assert not runner.violations
    assert identity.step_times[0] == (1, pytest.approx(STEP_S))
    await engine.aclose()
    return identity.text_token_s


async def test_a_target_tells_what_a_token_of_the_text_adds(monkeypatch: pytest.MonkeyPatch):
    assert await measured(monkeypatch, "target", 1024, TOKEN_S) == pytest.approx(TOKEN_S)


@pytest.mark.parametrize(
    ("role", "context", "token_s"), [("draft", 1024, TOKEN_S), ("target", 400, TOKEN_S), ("target", 1024, 1e-7)]
)
async def test_what_is_not_measured_or_next_to_nothing_is_not_told(
    monkeypatch: pytest.MonkeyPatch, role: Role, context: int, token_s: float
):
    assert await measured(monkeypatch, role, context, token_s) == 0.0


def test_a_text_of_zeros_holds_memory_as_another_does_and_is_clean():
    shape = HeadShape(2, 4)
    cache = KVCache([(shape, shape)], 2, 600, dtype=torch.float32, device=torch.device("cpu"))
    cache.keys[0].fill_(math.inf)
    cache.fill_rows(1, 512)
    assert not cache.keys[0][1, :, :512].any()
    assert cache.keys[0][0].isinf().all()


@pytest.mark.parametrize(("sent", "believed"), [(0.25, 0.25), (-1.0, 0.0), (math.inf, 0.0), (math.nan, 0.0)])
def test_it_travels_and_nonsense_is_not_believed(sent: float, believed: float):
    message = codec.encode_identity(replace(TARGET, text_token_s=sent), "1")
    assert codec.decode_identity(message).text_token_s == believed


def test_what_is_told_counts_behind_any_text_without_a_round():
    times = WorkerTimes()
    times.adopt(replace(TARGET, text_token_s=TOKEN_S), None)
    for length in (100, 4000, 20):
        times.behind(length)
        assert times.sessions_s == pytest.approx(length * TOKEN_S)
        assert times.plain.seconds(length) == pytest.approx(0.010 + length * TOKEN_S)


def test_one_slow_round_with_a_tree_or_behind_it_is_not_blamed_on_trees():
    beside = OverheadTimes()
    beside.observe_round(0.001, 0.0, "plain")
    for course in ("tree", "behind tree"):
        beside.observe_round(0.021, 0.0, course)
        assert beside.tree_s(1.0) == 0.0
    for _ in range(MEDIAN_WINDOW):
        beside.observe_round(0.003, 0.0, "tree")
    assert beside.tree_s(1.0) == pytest.approx(0.002)


def plain_round(times: WorkerTimes, length: int, step_s: float = 0.010) -> None:
    """Count a plain round behind so many tokens, as sessions do."""
    seconds = step_s + length * TOKEN_S
    timings = Timings(num_forwards=1, num_tokens=1, step_rows=1, device_ms=1e3 * seconds)
    times.behind(length, timings)
    times.observe_round(timings, seconds, 0.0, "plain", is_concurrent=False)


def test_a_session_is_not_judged_by_the_text_of_another_one():
    times = WorkerTimes()
    times.adopt(replace(TARGET, text_token_s=TOKEN_S), None)
    assert times.verify is not None
    for _ in range(4):
        times.behind(8000)  # another session plans its first round, and waits for a slot then
        for length in range(100, 108):
            plain_round(times, length)
        assert times.verify.seconds(1) == pytest.approx(0.010, rel=0.01)


@pytest.mark.parametrize(("told_s", "believed_s"), [(TOKEN_S, TOKEN_S), (4 * TOKEN_S, TOKEN_S), (0.0, TOKEN_S)])
def test_a_start_that_something_disturbed_is_corrected_by_rounds(told_s: float, believed_s: float):
    times = WorkerTimes()
    times.adopt(replace(TARGET, text_token_s=told_s), None)
    for length in range(4000, 4020):
        plain_round(times, length)
    assert times.text_s == pytest.approx(4019 * believed_s, rel=0.01)


def test_what_a_branch_reads_is_counted_once():
    """It was measured behind FORK_BASE tokens, if it was; behind as many it takes no more than that."""
    times = WorkerTimes()
    times.adopt(replace(TARGET, text_token_s=TOKEN_S, fork_s=0.003), None)
    assert times.verify is not None
    for length, more_s in ((FORK_BASE, 0.0), (20, 0.0), (FORK_BASE + 1000, 1000 * TOKEN_S)):
        times.behind(length)
        assert times.verify.fork_s == pytest.approx(0.003 + more_s)
    unmeasured = WorkerTimes()
    unmeasured.adopt(replace(TARGET, text_token_s=TOKEN_S), None)
    unmeasured.behind(500)
    assert unmeasured.verify is not None
    assert unmeasured.verify.fork_s == pytest.approx(500 * TOKEN_S)


def test_branches_that_share_the_text_are_as_dear_behind_any():
    identity = codec.decode_identity(codec.encode_identity(replace(TARGET, branches_share_text=True), "1"))
    times = WorkerTimes()
    times.adopt(replace(identity, text_token_s=TOKEN_S, fork_s=0.003), None)
    times.behind(8_000)
    assert times.verify is not None
    assert times.verify.fork_s == pytest.approx(0.003)
