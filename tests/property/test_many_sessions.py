"""Many sessions at once over real models, in every dtype: each has the bits that it has alone, whatever it shares.

Sessions of all modes, lengths, samplings and priorities share slots, steps that are too short for their trees, rows of
equal beginnings, and memory that is too little, so that some are preempted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.types import SamplingParams
from specsplit.draft.engine import DraftEngine
from specsplit.engine import slots as engine_slots
from specsplit.model.attention.paths import slot_rows
from specsplit.model.loader import LoadedModel, load_model
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.speculation.options import Speculation
from specsplit.speculation.step_times import StepTimes
from specsplit.target.engine import TargetEngine
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.packs import FORMATS, require_bits
from tests.support.pipelines import PATIENT, PLAIN, run
from tests.support.rounds import random_prompt

CONTEXT, NUM_SLOTS = 200, 12
ROWS = slot_rows(CONTEXT + 128)
"""Rows of one full session, which are all that there is for these."""
LINEAR = StepTimes({1: 0.001, 33: 0.033})
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1),
    SamplingParams(temperature=0.7, top_k=20),
)
QUICK = ("bf16", 7)
CASES = [
    case if case == QUICK else pytest.param(*case, marks=pytest.mark.slow)
    for case in product(FORMATS, (1, 2, 7, 16, 48))
]
_folders = TemporaryDirectory()


@cache
def load(dtype: str, role: Any, *, is_short: bool) -> LoadedModel:
    """Return a model whose slots hold one full session together if `is_short`, else one each."""
    folder = Path(_folders.name) / "llama"
    if not folder.exists():
        save_model(folder, FAMILIES["llama"](), seed=5)
    options: Any = {"dtype": dtype, "max_sessions": NUM_SLOTS, "context": CONTEXT, "record": False, "threads": 1}
    return load_model(str(folder), role=role, kv_rows=ROWS if is_short else None, **options)


def requests(count: int) -> list[Request]:
    """Return requests of which some begin alike and most grow beyond what they reserve at first."""
    rng, trunk = random.Random(count), random_prompt(40)
    return [
        Request(
            prompt_ids=(*trunk[: rng.choice([20, 30, 40])], *random_prompt(rng.randint(1, 15))),
            max_new_tokens=rng.randint(20, 60),
            sampling=rng.choice(SAMPLINGS),
            seed=rng.getrandbits(64),
            choice=rng.randint(0, 2),
            ignore_eos=True,
            priority=rng.randint(0, 9),
            caller=rng.choice(["", "anna", "boris"]),
        )
        for _ in range(count)
    ]


async def at_once(target: TargetEngine, draft: DraftEngine, tokenizer: Any, several: Sequence[Request]) -> list[Result]:
    modes: tuple[Mode, ...] = get_args(Mode)
    owners = [
        Orchestrator(target, draft, tokenizer, Speculation(mode=mode, nodes=6, depth=3), retry_policy=PATIENT)
        for mode in modes
    ]
    tasks = [owners[number % len(owners)].generate(request) for number, request in enumerate(several)]
    results = await asyncio.gather(*tasks)
    for owner in owners:
        await owner.aclose()
    return results


@pytest.mark.parametrize(("dtype", "count"), CASES)
def test_sessions_at_once_have_their_texts_in_every_dtype(
    dtype: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_slots, "HEADROOM_ROWS", 8)  # sessions are let in with little room to grow
    whole, several = load(dtype, "target", is_short=False), requests(count)
    require_bits(whole.runner, dtype)
    alone = run(whole, None, PLAIN, several)

    async def main() -> list[Result]:
        target = TargetEngine(load(dtype, "target", is_short=True))
        draft = DraftEngine(load(dtype, "draft", is_short=True))
        for engine in (target, draft):
            engine.open_queue(64)
            engine.pace_steps(LINEAR)
        results = await at_once(target, draft, whole.tokenizer, several)
        for engine in (target, draft):
            engine.check_integrity()
            held = engine.statistics()
            assert (held.sessions.num_sessions, held.sessions.num_slots_used, held.work.num_sessions) == (0, 0, 0)
            assert held.memory.num_free == held.memory.num_rows
        if count >= 7:
            held = target.statistics()
            assert held.memory.num_preempted >= 1
            assert held.sessions.num_reused_tokens >= 16
            assert target.counts.num_accepted >= 1
            assert target.worker_statistics().steps.num_sequences > 1.2 * target.worker_statistics().steps.num_steps
        await target.aclose()
        await draft.aclose()
        return results

    results = asyncio.run(main())
    assert [result.exactness for result in results] == ["bits"] * count
    assert [result.token_ids for result in results] == [result.token_ids for result in alone]
