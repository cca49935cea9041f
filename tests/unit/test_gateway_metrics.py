"""What the gateway counts for the answers to one request: how they end, and when the first of them begins."""

from __future__ import annotations

import asyncio

import pytest

from specsplit.core.errors import NoFreeSlot
from specsplit.gateway.metrics import Metrics
from specsplit.orchestrator.request import Chunk
from tests.support.metrics import samples_of, value

MODEL = "small"
BEGUN, ENDED = Chunk((1,), (False,), ()), Chunk((2,), (False,), (), "length")


def counted(metrics: Metrics, name: str, **labels: str) -> float:
    return value(samples_of(metrics.page().decode()), f"specsplit:{name}", **labels)


def check_ends(metrics: Metrics, **expected: float) -> None:
    found = {end: counted(metrics, "request_success_total", finished_reason=end) for end in ("length", "abort")}
    found["failed"] = counted(metrics, "request_failed_total")
    assert {end: count for end, count in found.items() if count} == expected
    assert counted(metrics, "num_requests_running") == counted(metrics, "num_requests_waiting") == 0


def answer_until(error: BaseException, metrics: Metrics, chunks: list[list[Chunk]]) -> None:
    """Count answers of these chunks, and then an error."""
    with metrics.following(MODEL, [3] * len(chunks)) as answers:
        for answer, own in zip(answers, chunks, strict=True):
            for chunk in own:
                answer.add(chunk)
        raise error


@pytest.mark.parametrize(
    ("error", "end"), [(asyncio.CancelledError(), "abort"), (GeneratorExit(), "abort"), (NoFreeSlot("full"), "failed")]
)
async def test_a_client_that_leaves_is_no_failure(error: BaseException, end: str) -> None:
    metrics = Metrics(models=[MODEL])
    with pytest.raises(type(error)):
        answer_until(error, metrics, [[BEGUN, ENDED], [BEGUN], [BEGUN], []])
    check_ends(metrics, length=1, **{end: 2})


async def test_a_refused_request_counts_once() -> None:
    metrics = Metrics(models=[MODEL])
    with pytest.raises(NoFreeSlot):
        answer_until(NoFreeSlot("full"), metrics, [[]] * 64)
    check_ends(metrics, failed=1)


async def test_a_request_has_one_time_to_its_first_token() -> None:
    metrics = Metrics(models=[MODEL])
    with metrics.following(MODEL, [3, 3]) as (first, second):
        for answer in (second, first):
            answer.add(BEGUN)
            answer.add(ENDED)
    assert counted(metrics, "time_to_first_token_seconds_count") == 1
    assert counted(metrics, "e2e_request_latency_seconds_count") == counted(metrics, "prompt_tokens_total") / 3 == 2
    check_ends(metrics, length=2)
