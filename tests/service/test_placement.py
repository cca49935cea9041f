"""One of draft and target in this process and the other elsewhere, over real sockets: the text of plain decoding."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specsplit import Pipeline
from specsplit.cli.main import main
from specsplit.core.defaults import Mode
from specsplit.core.errors import VocabularyMismatch
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import DraftService
from tests.support.caches import use_cache
from tests.support.fakes import FakeDraft
from tests.support.processes import LIMIT_S, WorkerProcess

PROMPT = "def add(a, b):"
MODES: dict[str, list[Mode]] = {
    "draft": ["auto", "pingpong", "overlap", "stream"],
    "target": ["auto", "pingpong", "overlap", "plain"],
}
"""Modes by the role that is here."""
SAMPLED = {"max_new_tokens": 24, "temperature": 0.8, "seed": 3}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WorkerProcess]]:
    folder = tmp_path_factory.mktemp("workers")
    started = {role: WorkerProcess(role, folder, "--drain", "2") for role in ("target", "draft")}
    yield started
    for worker in started.values():
        worker.close()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(tmp_path_factory.getbasetemp() / "cache", monkeypatch)


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    """The tokens of plain decoding in one process."""
    with Pipeline(mode="plain") as pipeline:
        return pipeline.generate(PROMPT, **SAMPLED).token_ids  # pyright: ignore[reportArgumentType]


def placed(here: str, workers: dict[str, WorkerProcess]) -> dict[str, str]:
    """Return the settings that place one role here and the other with its worker."""
    there = "target" if here == "draft" else "draft"
    return {f"{here}_model": "embedded", there: workers[there].address}


def options(here: str, workers: dict[str, WorkerProcess]) -> list[str]:
    pairs = placed(here, workers).items()
    return [part for name, value in pairs for part in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.parametrize("here", ["draft", "target"])
def test_requests_at_once_have_the_text_of_plain_decoding(
    here: str, workers: dict[str, WorkerProcess], expected: tuple[int, ...]
):
    with Pipeline(**placed(here, workers), draft_patience=LIMIT_S) as pipeline, ThreadPoolExecutor(4) as threads:  # type: ignore[arg-type]
        running = [threads.submit(pipeline.generate, PROMPT, mode=mode, **SAMPLED) for mode in MODES[here]]
        results = [future.result() for future in running]
    assert [result.token_ids for result in results] == [expected] * 4
    pingpong = results[1]
    assert pingpong.speculative_decoding.num_accepted_draft_tokens > 0
    assert pingpong.draft_forwards > 0
    assert pingpong.degraded == ()
    # Bytes travel on the one link that there is.
    assert pingpong.wire is not None
    counted = pingpong.wire.to_dict()
    assert isinstance(counted, dict)
    assert json.dumps(counted[here]) == json.dumps({"sent_bytes": 0, "received_bytes": 0})


@pytest.mark.parametrize("here", ["draft", pytest.param("target", marks=pytest.mark.slow)])
def test_the_command_and_the_doctor_take_one_here_and_one_elsewhere(
    here: str, workers: dict[str, WorkerProcess], expected: tuple[int, ...], tmp_path: Path, capfd: Capture
):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": PROMPT, **SAMPLED}) + "\n" for _ in range(3)))
    files = ["--prompts-file", str(source), "--output", str(output), "--concurrency", "3"]
    assert main(["orchestrate", *options(here, workers), *files]) == 0, capfd.readouterr().err
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert {answer["id"] for answer in answers} == {1, 2, 3}
    assert [answer["token_ids"] for answer in answers] == [list(expected)] * 3
    capfd.readouterr()
    assert main(["doctor", *options(here, workers), "--json"]) == 0
    checks: list[dict[str, Any]] = json.loads(capfd.readouterr().out)["checks"]
    found = {check["name"]: check["detail"] for check in checks}
    assert found["vocabulary"] == "the same for draft and target"
    there = "target" if here == "draft" else "draft"
    assert found[there].startswith(workers[there].address)
    assert found[here].startswith("embedded: ")


async def test_a_draft_elsewhere_of_another_vocabulary_is_refused():
    async with serving("127.0.0.1:0", [DraftService(FakeDraft())]) as strange:
        pipeline = await asyncio.to_thread(Pipeline, "embedded", draft=strange.address)
        async with pipeline:
            with pytest.raises(VocabularyMismatch, match="and the target embedded have different vocabularies"):
                await pipeline.agenerate(PROMPT)
            assert len((await pipeline.agenerate(PROMPT, mode="plain", max_new_tokens=2)).token_ids) == 2


@pytest.mark.slow
def test_a_draft_elsewhere_that_dies_midway_costs_speed_only(tmp_path: Path):
    worker = WorkerProcess("draft", tmp_path)
    try:
        with Pipeline("embedded", draft=worker.address, mode="pingpong") as pipeline:
            whole = pipeline.generate(PROMPT, mode="plain", max_new_tokens=400, ignore_eos=True)
            stream = pipeline.stream(PROMPT, max_new_tokens=400, ignore_eos=True)
            chunks = [next(stream) for _ in range(5)]
            worker.kill()
            chunks += stream
        result = chunks[-1].result
        assert result is not None
        assert result.token_ids == whole.token_ids
        assert {phase.worker for phase in result.degraded} == {"draft"}
    finally:
        worker.close()
