"""What drafting ahead is worth on the embedded pair, in virtual time: the machine has no say in it."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path

import pytest

from specsplit.core.defaults import DEFAULT_BRANCHING, DEFAULT_DEPTH, DEFAULT_NODES
from specsplit.core.types import SamplingParams
from specsplit.model.loader import LoadedModel, load_model
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Mode, Request, Result
from specsplit.speculation.options import Speculation
from tests.support.timed_engines import Pace, timed_pair
from tests.support.virtual_time import LoopClock, run_virtual

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "data" / "code_prompts.jsonl"
SLOW_TARGET = Pace(verify_s=0.025, level_s=0.0015)
FAR_TARGET = Pace(verify_s=0.025, level_s=0.0015, round_trip_s=0.01)


@cache
def model(role: str) -> LoadedModel:
    return load_model("embedded", role=role, dtype="fp32", threads=1)  # type: ignore[arg-type]


@cache
def measured(mode: Mode, pace: Pace, temperature: float = 0.0) -> list[Result]:
    """Return what came of three prompts, 48 tokens each, drafted by the draft alone."""
    tokenizer = model("target").tokenizer
    assert tokenizer is not None
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:3]
    requests = [
        Request(
            prompt_ids=tuple(tokenizer.encode(json.loads(line)["prompt"])),
            max_new_tokens=48,
            ignore_eos=True,
            sampling=SamplingParams(temperature=temperature),
            seed=seed,
        )
        for seed, line in enumerate(lines)
    ]
    shape = Speculation(mode=mode, nodes=DEFAULT_NODES, depth=DEFAULT_DEPTH, branching=DEFAULT_BRANCHING, lookup=False)

    async def main() -> list[Result]:
        async with timed_pair(model("target"), model("draft"), pace) as (target, draft):
            owner = Orchestrator(target, draft, tokenizer, shape, clock=LoopClock())
            results = [await owner.generate(request) for request in requests]
            await owner.aclose()
            await asyncio.sleep(0)
            return results

    return run_virtual(main, max_turns=1_000_000)


def rate(results: list[Result]) -> float:
    return sum(len(result.token_ids) - 1 for result in results) / sum(result.timings.decode_s for result in results)


def hit_rate(results: list[Result]) -> float:
    counts = [result.speculative_decoding for result in results]
    return sum(count.num_kept_rounds for count in counts) / sum(count.num_ahead_rounds for count in counts)


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 0.8), (1.0, 0.6)])
def test_most_outcomes_are_in_the_tree_when_the_verdict_comes(temperature: float, least: float) -> None:
    assert hit_rate(measured("overlap", SLOW_TARGET, temperature)) >= least


def test_overlap_takes_the_draft_off_the_critical_path() -> None:
    gain = rate(measured("overlap", SLOW_TARGET)) / rate(measured("pingpong", SLOW_TARGET))
    assert gain >= 1.05  # the draft's three levels are a sixth of a round


def test_stream_takes_the_round_trip_off_the_critical_path() -> None:
    far, near = measured("stream", FAR_TARGET), measured("pingpong", SLOW_TARGET)
    assert rate(far) >= 0.95 * rate(near)
    assert rate(far) >= 1.3 * rate(measured("pingpong", FAR_TARGET))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["overlap", "stream"])
def test_the_text_is_that_of_plain_decoding(mode: Mode, temperature: float) -> None:
    pace = FAR_TARGET if mode == "stream" else SLOW_TARGET
    plain = measured("plain", SLOW_TARGET, temperature)
    assert [result.token_ids for result in measured(mode, pace, temperature)] == [each.token_ids for each in plain]
