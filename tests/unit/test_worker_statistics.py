"""What a worker says of itself while it runs: how full its memory is, for `top`, pings and Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specsplit.core.types import Proposal, SessionParams
from specsplit.engine.session import SessionTable
from specsplit.target.engine import TargetEngine
from specsplit.telemetry.prometheus import WorkerMetrics
from specsplit.telemetry.statistics import StatisticsRole, WorkerStatistics
from tests.support.hash_model import hash_model
from tests.support.metrics import Samples, names, samples_of, value
from tests.support.rounds import script


async def opened(target: TargetEngine, key: str, length: int) -> None:
    ids = [3 + len(key)] * length
    await target.verify(script(SessionParams(), ids, 0, 1, key), Proposal(1, length - 1))


@dataclass
class Counting:
    """A worker with these counts."""

    role: StatisticsRole
    counts: WorkerStatistics

    def statistics(self) -> WorkerStatistics:
        return self.counts


def page_of(role: StatisticsRole, statistics: WorkerStatistics, *others: Counting) -> Samples:
    return samples_of(WorkerMetrics([Counting(role, statistics), *others]).page().decode())


def kv_usage(statistics: WorkerStatistics) -> float:
    return value(page_of("target", statistics), "specsplit:kv_cache_usage_perc")


async def test_short_texts_in_every_slot_fill_the_kv_cache() -> None:
    model, _ = hash_model("target", max_sessions=4, context=400)
    target = TargetEngine(model)
    await opened(target, "a", 12)
    assert kv_usage(target.worker_statistics()) == 1 / 4
    for key in ("bb", "ccc", "dddd"):
        await opened(target, key, 12)
    statistics = target.worker_statistics()
    assert 0 < statistics.used_bytes < statistics.budget_bytes / 2, "there is memory, and no slot"
    assert kv_usage(statistics) == 1
    await target.aclose()


async def test_long_texts_fill_the_kv_cache_before_its_slots() -> None:
    model, _ = hash_model("target", max_sessions=4, context=96, row_limit=128)
    target = TargetEngine(model)
    await opened(target, "a", 64)
    statistics = target.worker_statistics()
    assert statistics.num_slots_used / statistics.num_slots == 1 / 4
    assert kv_usage(statistics) == statistics.used_bytes / statistics.budget_bytes > 1 / 2
    await target.aclose()


async def test_a_kv_cache_of_which_nothing_is_known_is_empty() -> None:
    assert kv_usage(WorkerStatistics()) == 0
    assert kv_usage(WorkerStatistics(num_slots=4, num_slots_used=1)) == 1 / 4


async def test_warm_slots_of_a_stage_are_no_sessions_and_leave_room() -> None:
    """A stage cannot tell rows of ended sessions, whose slots are free for new ones, from those of open sessions."""
    held = WorkerStatistics(layers=(0, 12), num_slots=4, num_slots_used=4, used_bytes=1, budget_bytes=8)
    page = page_of("stage", held)
    assert value(page, "specsplit:kv_cache_usage_perc") == 1 / 8
    assert names(page).isdisjoint({"specsplit:num_requests_running", "specsplit:num_slots_warm"})


async def test_a_page_of_two_workers_of_one_model_names_the_role_of_each_sample() -> None:
    draft = Counting("draft", WorkerStatistics(model="embedded", num_slots=3))
    page = page_of("target", WorkerStatistics(model="embedded", num_slots=4), draft)
    for name in ("num_slots", "build_info"):
        assert {value(page, f"specsplit:{name}", role=role) for role in ("target", "draft")} in ({3, 4}, {1})
    shared = WorkerMetrics([Counting("target", draft.counts), draft], has_vllm_names=True)
    assert value(samples_of(shared.page().decode()), "vllm:num_requests_running", role="target") == 0, "and no draft's"
    alone = page_of("target", WorkerStatistics(model="embedded", num_slots=4))
    assert ("specsplit:num_slots", frozenset({("model_name", "embedded")})) in alone


class ChangingRows(list[int]):
    """Rows by slot; whoever reads them while another thread takes a slot is interrupted by that."""

    def __init__(self, rows: list[int], take: Callable[[], object]) -> None:
        super().__init__(rows)
        self._take: Callable[[], object] | None = take

    def __getitem__(self, index: Any) -> Any:
        take, self._take = self._take, None
        if take is not None:
            take()
        return super().__getitem__(index)


def test_the_rows_of_warm_slots_may_change_while_they_are_read() -> None:
    model, _ = hash_model("target", max_sessions=3, context=96)
    sessions = SessionTable(model)
    for key in ("a", "bb", "ccc"):
        turn = script(SessionParams(), [3 + len(key)] * 32, 0, 1, key)
        session = sessions.enter(turn, None)
        session.extend(turn.tail)
        session.answer = "an answer"
        sessions.leave(session)
        sessions.close(key)
    slots = sessions.slots
    assert slots.num_warm == 3
    slots.rows.reserved = ChangingRows(slots.rows.reserved, lambda: slots.take(32))
    assert slots.num_warm_rows > 0
    assert slots.num_warm == 2, "one was given up meanwhile"
