"""What a worker says of itself while it runs: how full its memory is, for `top`, pings and Prometheus."""

from __future__ import annotations

from specsplit.core.types import Proposal, SessionParams
from specsplit.target.engine import TargetEngine
from specsplit.telemetry.prometheus import WorkerMetrics
from specsplit.telemetry.statistics import WorkerStatistics
from tests.support.hash_model import hash_model
from tests.support.metrics import samples_of, value
from tests.support.rounds import script


async def opened(target: TargetEngine, key: str, length: int) -> None:
    ids = [3 + len(key)] * length
    await target.verify(script(SessionParams(), ids, 0, 1, key), Proposal(1, length - 1))


def kv_usage(statistics: WorkerStatistics) -> float:
    page = WorkerMetrics("target", lambda: statistics).page().decode()
    return value(samples_of(page), "specsplit:kv_cache_usage_perc")


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
