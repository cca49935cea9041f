"""A slot is address space and rows are memory: what is planned, what pages hold, and what the user is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specsplit.assembly.models import Models, load_worker, load_worker_pair, short_of_rows
from specsplit.core.errors import ContextExceeded, InvalidSettings, OutOfMemory
from specsplit.core.sections import DraftSettings, TargetSettings
from specsplit.core.types import Identity, Proposal, SamplingParams
from specsplit.model import memory
from specsplit.model.address_space import AddressSpace
from specsplit.model.attention.paths import slot_rows
from specsplit.model.kv_plan import KVRequest, plan_kv
from specsplit.model.loader import load_model
from specsplit.model.memory_size import parse_memory, parse_size, shown_memory
from specsplit.orchestrator.request import Request
from specsplit.stages.identity import StageIdentity
from specsplit.stages.memory import chain_memory
from specsplit.target.engine import TargetEngine
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.rounds import params_of, random_prompt, script

CPU = torch.device("cpu")
PAGE = 4096


def pages_held(tensor: torch.Tensor) -> int:
    """Return how many pages of a tensor hold memory of their own."""
    first = tensor.data_ptr() // PAGE
    count = -(-tensor.numel() * tensor.element_size() // PAGE)
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(8 * first)
        entries = pagemap.read(8 * count)
    present = 1 << 63
    return sum(bool(int.from_bytes(entries[at : at + 8], "little") & present) for at in range(0, len(entries), 8))


@pytest.mark.parametrize(
    ("text", "size"),
    [("0.85", 0.85), (".5", 0.5), ("1", 1.0), (None, None)],
)
def test_a_size_of_a_cache_may_be_a_fraction(text: str | None, size: float | None):
    assert parse_memory(text) == size
    assert isinstance(parse_memory(text), type(size))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 << 30),
        ("8GB", 8 * 10**9),
        ("8Gi", 8 << 30),
        ("512Mi", 512 << 20),
        ("1.5 ki", 1536),
        ("512MiB", 512 << 20),
        ("1.5 kib", 1536),
        ("1.5 kb", 1500),
        (" 2TB ", 2 * 10**12),
    ],
)
def test_sizes_are_binary_with_an_i_and_decimal_without(text: str, num_bytes: int):
    for size in (parse_memory(text), parse_size(text, "--memory")):
        assert (size, type(size)) == (num_bytes, int)


@pytest.mark.parametrize(
    "text", ["", "8", "8 apples", "0", "0.0", "0GiB", "-1GiB", "1.5", "nan", "1e9KiB", "GiB", "8GiB8GiB", "8G", "8i"]
)
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(InvalidSettings, match=r"^kv_memory must be a size such as 8GiB or 8GB, or a fraction"):
        parse_memory(text)
    with pytest.raises(InvalidSettings, match=f"^--memory must be a size such as 24GiB or 24GB, not {text or 'empty'}"):
        parse_size(text, "--memory")


def test_only_a_cache_may_be_a_fraction_of_what_is_free():
    with pytest.raises(InvalidSettings, match=r"not 0\.85\."):
        parse_size("0.85", "--memory")


def test_bytes_are_shown_as_a_user_reads_them():
    assert [shown_memory(size) for size in (12, 1536, 8 << 30)] == ["12 bytes", "1.5 KiB", "8.0 GiB"]


def request(**changes: object) -> KVRequest:
    given: dict[str, object] = {"context": 4096, "node_limit": 128, "max_sessions": 4, **changes}
    return KVRequest(**given)  # type: ignore[arg-type]


def test_a_budget_is_planned_in_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 30)
    assert plan_kv(1000, request(), CPU).row_limit is None
    plan = plan_kv(1000, request(kv_memory=8_000_000, max_sessions=99), CPU)
    assert (plan.context, plan.num_slots, plan.row_limit) == (4096, 99, 8000)
    assert plan_kv(1000, request(kv_memory=0.5, max_sessions=9999), CPU).row_limit == (1 << 29) // 1000
    assert plan_kv(1000, request(kv_rows=7000), CPU).row_limit == 7000
    assert plan_kv(1, request(kv_memory=1 << 28), CPU).row_limit == 4 * slot_rows(4096 + 128), "no more than all"


def test_a_context_that_nobody_chose_is_what_the_budget_holds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 30)
    plan = plan_kv(1000, request(kv_memory=2_000_000), CPU)
    assert plan.context < 4096
    assert plan.context % 64 == 0
    assert plan.row_limit is not None
    assert plan.capacity <= plan.row_limit <= 2000


def test_what_can_never_fit_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 30)
    for wanted, sentence in (
        (
            request(kv_memory=2_000_000, is_context_chosen=True),
            r"4096 tokens.* 4608 rows of 1000 bytes.*--context 1",
        ),
        (request(kv_memory=100_000), "holds 100 rows; use more memory"),
        (request(kv_memory=2 << 30), "2.0 GiB is more than cpu has free, which is 1.0 GiB"),
    ):
        with pytest.raises(OutOfMemory, match=sentence):
            plan_kv(1000, wanted, CPU)
    with pytest.raises(OutOfMemory, match=r"holds every KV slot in full.*use --sessions 2"):
        plan_kv(1000, request(kv_memory=9_500_000), torch.device("cuda"))


def test_a_gpu_has_as_many_slots_as_its_budget_holds_if_nobody_chose(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 30)
    gpu, budget = torch.device("cuda"), 9_500_000
    plan = plan_kv(1000, request(kv_memory=budget, min_sessions=1), gpu)
    assert (plan.num_slots, plan.row_limit) == (2, 2 * slot_rows(4096 + 128))
    assert plan_kv(1000, request(kv_memory=budget, min_sessions=1, max_sessions=1), gpu).num_slots == 1
    with pytest.raises(OutOfMemory, match=r"3 sessions of .*use --sessions 2"):
        plan_kv(1000, request(kv_memory=budget, min_sessions=3), gpu)
    assert plan_kv(1000, request(kv_memory=budget, min_sessions=1), CPU).num_slots == 4


def test_a_prompt_beyond_the_budget_is_refused_with_the_arithmetic():
    identity = Identity("target", "m", 300, "", 1024, 128, kv_bytes_per_token=1000, kv_bytes=2_000_000)
    with pytest.raises(ContextExceeded, match=r"2000 tokens.* 128 nodes all .* 1.9 MiB .* 1000 bytes a token.*kv-mem"):
        Request(prompt_ids=(5,) * 2000).check_fits(identity)


def stage(**changes: int) -> StageIdentity:
    return StageIdentity("m", 4, 0, 2, True, False, 8, 300, "fp32", 4096, 128, 4, 0, "", "", **changes)


def test_a_chain_has_the_rows_of_its_smallest_stage():
    stages = [stage(kv_bytes_per_token=100, kv_rows=9000), stage(kv_bytes_per_token=300, kv_rows=7000)]
    assert (chain_memory(stages, 4, 4608, None).num_rows, chain_memory(stages, 4, 4608, None).row_bytes) == (7000, 400)
    assert chain_memory(stages, 1, 4608, None).num_rows == 4608
    assert chain_memory(stages, 4, 4608, 2_000_000).num_rows == 5000
    assert chain_memory([stage(), *stages], 4, 4608, None).row_bytes == 0, "a stage of an older release"
    with pytest.raises(OutOfMemory, match=r"4608 rows of 400 bytes over all stages.*holds 2500"):
        chain_memory(stages, 4, 4608, 1_000_000)
    with pytest.raises(InvalidSettings, match="a stage is of a release"):
        chain_memory([stage(), *stages], 4, 4608, 2_000_000)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300)), max_size=6))
def test_rows_that_are_given_back_are_zeros_and_the_others_stay(moves: list[tuple[int, int]]):
    shape = (2, 3, 2, 300, 24)  # 96 bytes a row: no row begins with a page but by chance
    space = AddressSpace(shape, torch.float32, CPU)
    space.tensor.fill_(1.0)
    for slot, start in moves:
        space.give_back(slot, start)
    for slot in range(3):
        kept = min((start for which, start in moves if which == slot), default=300)
        assert bool((space.tensor[:, slot, :, :kept] == 1).all())
        assert bool(torch.isin(space.tensor[:, slot], torch.tensor([0.0, 1.0])).all())


def test_pages_hold_memory_while_their_rows_do():
    space = AddressSpace((2, 4, 2, 4096, 32), torch.float32, CPU)
    assert pages_held(space.tensor) == 0
    space.tensor[:, 1, :, :64] = 1
    assert pages_held(space.tensor) == 2 * 2 * 64 * 128 // PAGE
    space.give_back(1, 32)
    assert pages_held(space.tensor) == 2 * 2 * 32 * 128 // PAGE
    space.give_back(1, 0)
    assert pages_held(space.tensor) == 0


def test_more_may_be_reserved_than_the_machine_has():
    space = AddressSpace((2, 64, 8, (400 << 30) // (2 * 64 * 8 * 256), 128), torch.bfloat16, CPU)
    space.tensor[1, 63, 7, -1] = 1
    assert float(space.tensor[1, 63, 7, -1].sum()) == 128


async def test_sixteen_short_sessions_fit_the_memory_of_one_long_one(tmp_path: Path):
    config = FAMILIES["llama"]()
    config.max_position_embeddings = context = 262_144
    save_model(tmp_path, config, seed=3, with_tokenizer=False)
    rows = slot_rows(context + 128)
    tiny = load_model(str(tmp_path), role="target", threads=1, context=2, record=False).kv_bytes_per_token
    model = load_model(
        str(tmp_path),
        role="target",
        threads=1,
        context=context,
        max_sessions=16,
        kv_memory=rows * tiny,
        record=False,
    )
    assert model.runner.cache.row_limit == rows
    assert model.runner.cache.num_slots * model.runner.cache.capacity == 16 * rows
    target = TargetEngine(model)
    prompts = [[number, *random_prompt(1023)] for number in range(3, 19)]
    turns = [
        script(params_of(SamplingParams(), 1024), ids, 0, 1, f"long {number}") for number, ids in enumerate(prompts)
    ]
    verdicts = await asyncio.gather(*(target.verify(turn, Proposal(1, 1023)) for turn in turns))
    assert len(verdicts) == target.statistics().sessions.num_slots_used == 16
    held = target.statistics().memory
    assert held.num_preempted == 0
    assert 16 * 1024 <= held.num_reserved <= held.num_touched <= rows / 8
    pages = sum(pages_held(block[slot]) for block in (*model.runner.cache.keys,) for slot in range(16))
    assert pages * PAGE <= held.touched_bytes
    for turn in turns:
        await target.close(turn.session)
    await target.aclose()


def test_where_many_sessions_do_not_fit_the_error_says_how_many_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000 << 10)
    # 950 KiB are 950 rows, of which a session takes 256.
    for max_sessions, fitting in ((4, "--context 64 or --sessions 3 fits"), (100, "--sessions 3 fits")):
        with pytest.raises(OutOfMemory, match=f"for {max_sessions} sessions .* 0.0 GiB free; {fitting}\\.$"):
            memory.require_kv(1 << 10, 128, 128, max_sessions, CPU)
    memory.require_kv(1 << 10, 128, 128, 3, CPU)
    with pytest.raises(OutOfMemory, match=r"free; --sessions 1 with --context 768 fits\.$"):
        memory.require_kv(1 << 10, 2000, 128, 3000, CPU)
    memory.require_kv(1 << 10, 768, 128, 1, CPU)
    with pytest.raises(OutOfMemory, match=r"free; use a smaller model\.$"):
        memory.require_kv(1 << 30, 128, 128, 3, CPU)


def test_a_draft_plans_with_the_memory_that_its_target_leaves(monkeypatch: pytest.MonkeyPatch):
    """Rows take memory as they are written, so a target's look free to the draft that is loaded next."""
    alone = {"model": "embedded", "context": 1024, "sessions": 4, "record": False, "threads": 1}
    target = TargetSettings.model_validate(alone)
    needed = load_worker("target", target).runner.cache.reserved_bytes
    free = [int(needed * 1.6)]
    monkeypatch.setattr(memory, "unused_bytes", lambda: free)
    as_large = DraftSettings.model_validate({**alone, "context": None, "kv_memory": f"{needed // 1024}KiB"})
    load_worker("draft", as_large)
    with pytest.raises(OutOfMemory, match=r"has free, which is .*, beside .* that the target's KV cache may take"):
        load_worker_pair(target, as_large)
    full = TargetSettings.model_validate({**alone, "sessions": 6})
    with pytest.raises(OutOfMemory, match=r"free, beside .* that the target's KV cache may take; --context"):
        load_worker_pair(full, DraftSettings.model_validate({**alone, "context": 4096, "sessions": 4}))
    free[0] = int(needed * 2.2)
    load_worker_pair(target, as_large)


def test_a_draft_beside_a_large_budget_has_fewer_rows_and_says_so(monkeypatch: pytest.MonkeyPatch):
    common = {"model": "embedded", "context": 1024, "record": False, "threads": 1}
    target = TargetSettings.model_validate({**common, "sessions": 64, "kv_memory": "0.85"})
    draft = DraftSettings.model_validate({**common, "sessions": 64})
    monkeypatch.setattr(memory, "unused_bytes", lambda: [200 << 20])
    large, small = load_worker_pair(target, draft)
    cache, beside = large.runner.cache, small.runner.cache
    assert beside.row_limit * beside.row_bytes <= 0.15 * (200 << 20)
    assert slot_rows(1024) <= beside.row_limit < cache.row_limit
    sentence = short_of_rows(large, small)
    assert sentence is not None
    assert f"{beside.row_limit} tokens of all sessions and the target for {cache.row_limit}" in sentence
    assert sentence in Models(large, small).degraded
    target = TargetSettings.model_validate({**common, "sessions": 64, "kv_memory": "16MiB"})
    assert short_of_rows(*load_worker_pair(target, draft)) is None
