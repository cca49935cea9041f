"""One stage: what it keeps, rolls back and refuses, seen from the packets that it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specsplit.core.errors import InvalidPacket, InvalidSettings, StageBehind, StaleEpoch, WorkerClosed
from specsplit.core.types import SessionParams
from specsplit.model.attention.paths import slot_rows
from specsplit.stages.chain.stage import StageEngine
from specsplit.stages.packet import COORDINATOR, HeadRequest, KeepList, Packet, PacketSession, PayloadType, StepKind
from specsplit.stages.shard.loader import LoadedShard, ShardOptions, ShardSpec, load_shard
from specsplit.stages.shard.payload import from_payload, to_payload
from specsplit.stages.slot_state import decode_state, encode_state
from tests.support.model_zoo import FAMILIES, save_model

H = 32
CONTEXT = 160
SLOT_ROWS = slot_rows(CONTEXT + 128)
UNNEEDED = 128
"""The first row that a few tokens' whole blocks and whole pages leave."""
_shards: dict[str, LoadedShard] = {}


@pytest.fixture(scope="module", autouse=True)
def loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = save_model(tmp_path_factory.mktemp("stage") / "llama", FAMILIES["llama"](), 1)
    specs = {"middle": ShardSpec(1, 2), "other": ShardSpec(0, 1), "all": ShardSpec(0, 3, True, True)}
    for name, spec in specs.items():
        _shards[name] = load_shard(str(folder), spec, ShardOptions(max_sessions=3, context=CONTEXT, threads=1))


def stage_of(name: str = "middle") -> StageEngine:
    """Return a stage over memory that holds garbage."""
    for block in (*_shards[name].runner.cache.keys, *_shards[name].runner.cache.values):
        block.normal_(generator=torch.Generator().manual_seed(1))
    return StageEngine(_shards[name])


@pytest.fixture
async def stage() -> AsyncIterator[StageEngine]:
    stage = stage_of()
    yield stage
    await stage.aclose()


def states(first: int, count: int) -> Tensor:
    """Return hidden states that stand for the tokens first, first + 1, ..."""
    return torch.stack([torch.randn(H, generator=torch.Generator().manual_seed(first + i)) for i in range(count)])


def share(slot: int, start: int, count: int, token: int, **changes: Any) -> PacketSession:
    """Return rows of the tokens `token`, `token` + 1, ..., whose prefix hash is simply the token."""
    values = {"base_hash": token - 1 if start else 0, "hashes": tuple(range(token, token + count)), **changes}
    return PacketSession(slot=slot, epoch=values.pop("epoch", 1), start=start, num_logits=count, **values)


def packet(request_id: int, *sessions: PacketSession, **changes: Any) -> Packet:
    hidden = torch.cat([states(session.hashes[0], session.num_tokens) for session in sessions])
    values = {"stage_from": COORDINATOR, "stage_to": 0, "payload": to_payload(hidden), **changes}
    return Packet(request_id, StepKind.VERIFY, H, PayloadType.FP32, sessions=sessions, **values)


async def ask(stage: StageEngine, packet: Packet) -> Tensor:
    answer = await stage.forward(packet)
    return from_payload(answer.payload, torch.float32, answer.num_rows, H).clone()


async def straight(count: int) -> Tensor:
    """Return the last row of `count` tokens in one packet through a fresh stage over the same layers."""
    stage = stage_of()
    rows = await ask(stage, packet(1, share(0, 0, count, 100)))
    await stage.aclose()
    return rows[-1]


def assert_equal(ours: Tensor, truth: Tensor) -> None:
    assert (ours - truth).abs().max() <= 1e-5


TREE = {"parents": (-1, -1, 0, 1, 2), "hashes": (104, 70, 105, 71, 106)}
"""Behind the tokens 100 to 103: 104, 105 and 106 are rows 0, 2 and 4."""


def tree(start: int = 4, **changes: Any) -> Packet:
    session = share(0, start, 5, 104, **TREE, **changes)
    hidden = torch.cat([states(token, 1) for token in TREE["hashes"]])
    return packet(2, session, payload=to_payload(hidden))


async def test_a_stage_keeps_the_rows_that_the_next_packet_names(stage: StageEngine) -> None:
    await ask(stage, packet(1, share(0, 0, 4, 100)))
    await ask(stage, tree(keep=KeepList(1, (0, 1, 2, 3))))
    rows = await ask(stage, packet(3, share(0, 7, 1, 107, keep=KeepList(2, (0, 2, 4)))))
    assert_equal(rows[-1], await straight(8))
    assert stage.statistics.num_tokens == 4 + 5 + 1


async def test_a_keep_list_of_another_attempt_is_ignored(stage: StageEngine) -> None:
    await ask(stage, packet(1, share(0, 0, 4, 100)))
    await ask(stage, tree(keep=KeepList(1, (0, 1, 2, 3))))
    with pytest.raises(StageBehind) as raised:
        await ask(stage, packet(3, share(0, 7, 1, 107, keep=KeepList(99, (0, 2, 4)))))
    assert raised.value.have == {0: 4}
    rows = await ask(stage, packet(4, share(0, 4, 4, 104, keep=KeepList(99, (0, 2, 4)))))
    assert_equal(rows[-1], await straight(8))


async def test_a_repeated_packet_changes_nothing(stage: StageEngine) -> None:
    await ask(stage, packet(1, share(0, 0, 4, 100)))
    step = tree(keep=KeepList(1, (0, 1, 2, 3)))
    assert_equal(await ask(stage, step), await ask(stage, step))
    rows = await ask(stage, packet(3, share(0, 7, 1, 107, keep=KeepList(2, (0, 2, 4)))))
    assert_equal(rows[-1], await straight(8))


async def test_a_lower_start_rolls_back(stage: StageEngine) -> None:
    await ask(stage, packet(1, share(0, 0, 9, 50)))
    await ask(stage, packet(2, share(0, 0, 6, 100)))
    rows = await ask(stage, packet(3, share(0, 3, 5, 103, keep=KeepList(2, (0, 1, 2, 3, 4, 5)))))
    assert_equal(rows[-1], await straight(8))


async def test_equal_length_never_hides_other_rows(stage: StageEngine) -> None:
    await ask(stage, packet(1, share(0, 0, 4, 50)))
    with pytest.raises(StageBehind) as raised:
        await ask(stage, packet(2, share(0, 4, 4, 104, keep=KeepList(1, (0, 1, 2, 3)))))
    assert raised.value.have == {0: 0}
    assert_equal((await ask(stage, packet(3, share(0, 0, 8, 100))))[-1], await straight(8))


async def test_one_session_that_is_behind_holds_nothing_of_the_others_back(stage: StageEngine) -> None:
    await ask(stage, packet(1, share(0, 0, 4, 100), share(1, 0, 4, 200)))
    await stage.end(1)
    keep = KeepList(1, (0, 1, 2, 3))
    both = (share(0, 4, 4, 104, keep=keep), share(1, 4, 4, 204, keep=keep))
    with pytest.raises(StageBehind) as raised:
        await ask(stage, packet(2, *both))
    assert raised.value.have == {1: 0}
    assert stage.statistics.num_tokens == 8
    rows = await ask(stage, packet(3, both[0], share(1, 0, 8, 200)))
    assert_equal(rows[3], await straight(8))


async def test_a_lower_epoch_is_refused_and_changes_nothing(stage: StageEngine) -> None:
    await ask(stage, packet(1, share(0, 0, 4, 100, epoch=5)))
    with pytest.raises(StaleEpoch):
        await ask(stage, packet(2, share(1, 0, 2, 300), share(0, 0, 2, 50, epoch=4)))
    rows = await ask(stage, packet(3, share(0, 4, 4, 104, epoch=5, keep=KeepList(1, (0, 1, 2, 3)))))
    assert_equal(rows[-1], await straight(8))


async def test_a_higher_epoch_takes_over_what_is_committed_and_nothing_else(stage: StageEngine) -> None:
    await ask(stage, packet(1, share(0, 0, 4, 100)))
    await ask(stage, packet(2, share(0, 4, 2, 104, keep=KeepList(1, (0, 1, 2, 3)))))
    with pytest.raises(StageBehind) as raised:
        await ask(stage, packet(3, share(0, 6, 2, 106, epoch=2, keep=KeepList(2, (0, 1)))))
    assert raised.value.have == {0: 4}
    assert_equal((await ask(stage, packet(4, share(0, 4, 4, 104, epoch=2))))[-1], await straight(8))


async def test_what_a_later_epoch_forgets_does_not_count_though_it_is_infinite(stage: StageEngine) -> None:
    await ask(stage, packet(1, share(0, 0, 7, 100)))
    await ask(stage, packet(2, share(0, 7, 2, 107, keep=KeepList(1, tuple(range(7))))))
    cache = _shards["middle"].runner.cache
    for block in (*cache.keys, *cache.values):
        block[0, :, 7:] = torch.inf
    assert_equal((await ask(stage, packet(3, share(0, 7, 1, 107, epoch=2))))[-1], await straight(8))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_hidden_states_that_are_not_finite_are_refused(stage: StageEngine, value: float) -> None:
    await ask(stage, packet(1, share(0, 0, 4, 100)))
    hidden = states(104, 4)
    hidden[2, 5] = value
    keep = KeepList(1, (0, 1, 2, 3))
    with pytest.raises(InvalidPacket, match="not finite"):
        await ask(stage, packet(2, share(0, 4, 4, 104, keep=keep), payload=to_payload(hidden)))
    assert_equal((await ask(stage, packet(3, share(0, 4, 4, 104, keep=keep))))[-1], await straight(8))


GOOD = share(0, 0, 2, 100)
REFUSED: dict[str, tuple[Sequence[PacketSession], dict[str, Any]]] = {
    "another stage": ([GOOD], {"stage_from": 0, "stage_to": 1}),
    "from the wrong one": ([GOOD], {"stage_from": 3}),
    "another slot": ([replace(GOOD, slot=3)], {}),
    "beyond the context": ([share(0, CONTEXT - 1, 2, 100)], {}),
    "a tree beyond the context": ([share(0, CONTEXT - 1, 3, 100, parents=(-1, -1, 0))], {}),
    "beyond the slot": ([share(0, 0, SLOT_ROWS + 1, 100, parents=(-1,) * (SLOT_ROWS + 1))], {}),
    "no hidden states": ([GOOD], {"payload": b""}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_does_not_fit_the_stage_is_refused_and_the_stage_lives(stage: StageEngine, name: str) -> None:
    sessions, changes = REFUSED[name]
    with pytest.raises(InvalidPacket):
        await stage.forward(packet(1, *sessions, **changes))
    assert_equal((await ask(stage, packet(2, share(0, 0, 8, 100))))[-1], await straight(8))


async def test_another_hidden_size_or_dtype_is_refused(stage: StageEngine) -> None:
    for other in (
        replace(packet(1, GOOD), hidden_size=H // 2, payload=b"\0" * 2 * 16 * 4),
        replace(packet(1, GOOD), dtype=PayloadType.FP16, payload=b"\0" * 2 * H * 2),
    ):
        with pytest.raises(InvalidPacket, match="does not fit"):
            await stage.forward(other)


async def test_a_keep_list_beyond_its_packet_is_refused_and_changes_nothing(stage: StageEngine) -> None:
    await ask(stage, packet(1, share(0, 0, 4, 100)))
    with pytest.raises(InvalidPacket, match="keep-list"):
        await ask(stage, packet(2, share(0, 5, 1, 105, keep=KeepList(1, (0, 1, 2, 3, 4)))))
    rows = await ask(stage, packet(3, share(0, 4, 4, 104, keep=KeepList(1, (0, 1, 2, 3)))))
    assert_equal(rows[-1], await straight(8))


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": ()},
        {"token_ids": (5, 320)},
        {"token_ids": (5, 6), "head_request": HeadRequest(SessionParams(), (320,))},
        {"token_ids": (5, 6), "parents": (-1, -1), "head_request": HeadRequest(SessionParams())},
    ],
    ids=["none", "outside", "scored outside", "two roots"],
)
async def test_token_ids_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    stage = stage_of("all")
    with pytest.raises(InvalidPacket):
        await stage.forward(packet(1, replace(GOOD, **changes), payload=b""))
    await stage.aclose()


async def test_a_stage_with_the_embedding_takes_no_hidden_states() -> None:
    stage = stage_of("all")
    with pytest.raises(InvalidPacket, match="token ids"):
        await stage.forward(packet(1, replace(GOOD, token_ids=(5, 6))))
    await stage.aclose()


async def test_a_stage_without_layers_is_refused() -> None:
    with pytest.raises(InvalidSettings):
        StageEngine(replace(_shards["middle"], spec=ShardSpec(0, 0, has_head=True)))


async def test_an_exported_slot_goes_on_elsewhere_as_if_nothing_had_happened(stage: StageEngine) -> None:
    await ask(stage, packet(1, share(1, 0, 4, 100)))
    await ask(
        stage,
        replace(
            tree(keep=KeepList(1, (0, 1, 2, 3))),
            sessions=(replace(tree().sessions[0], slot=1, keep=KeepList(1, (0, 1, 2, 3))),),
        ),
    )
    data = b"".join(encode_state(await stage.export_kv(1)))
    assert len(data) < 9 * _shards["middle"].kv_bytes_per_token + 300, "trimmed to its rows"
    fresh = stage_of()
    await fresh.import_kv(decode_state(data))
    rows = await ask(fresh, packet(3, share(1, 7, 1, 107, keep=KeepList(2, (0, 2, 4)))))
    await fresh.aclose()
    assert_equal(rows[-1], await straight(8))


async def test_an_exported_slot_that_does_not_fit_changes_nothing(stage: StageEngine) -> None:
    await ask(stage, packet(1, share(0, 0, 4, 100)))
    state = await stage.export_kv(0)
    values = from_payload(state.payload, torch.float32, len(state.payload) // 4).clone()
    values[3] = float("nan")
    for other in (
        replace(state, slot=3),
        replace(state, first_layer=0),
        replace(state, dtype=PayloadType.FP16),
        replace(state, payload=state.payload[:-4]),
        replace(state, payload=to_payload(values)),
    ):
        with pytest.raises(InvalidPacket):
            await stage.import_kv(other)
    rows = await ask(stage, packet(3, share(0, 4, 4, 104, keep=KeepList(1, (0, 1, 2, 3)))))
    assert_equal(rows[-1], await straight(8))


async def test_a_slot_that_has_ended_is_empty_and_has_no_epoch(stage: StageEngine) -> None:
    await ask(stage, packet(1, share(0, 0, 4, 100, epoch=7)))
    await stage.end(0)
    with pytest.raises(StageBehind):
        await ask(stage, packet(2, share(0, 4, 1, 104, epoch=7)))
    await stage.reset()
    assert_equal((await ask(stage, packet(3, share(0, 0, 8, 100, epoch=1))))[-1], await straight(8))
    assert (await stage.export_kv(2)).num_rows == 0


def held(slot: int) -> list[Tensor]:
    """Return where a slot of the middle stage holds anything but zeros, which is what memory given back reads as."""
    cache = _shards["middle"].runner.cache
    return [block[slot] != 0 for block in (*cache.keys, *cache.values)]


@pytest.mark.parametrize("is_late", [True, False])
async def test_a_slots_next_session_leaves_no_row_of_the_last_one_in_memory(
    stage: StageEngine, *, is_late: bool
) -> None:
    if not _shards["middle"].runner.cache.can_return:
        pytest.skip("no memory can be given back here")
    await stage.end(0, 0)
    await ask(stage, packet(2, share(0, 0, CONTEXT, 200)))
    assert all(block[:, UNNEEDED:].any() for block in held(0))
    if is_late:
        await ask(stage, packet(3, share(0, 0, 3, 100, epoch=2)))
        await stage.end(0, 1)
    else:
        await stage.end(0, 1)
        await ask(stage, packet(3, share(0, 0, 3, 100, epoch=2)))
    assert not any(block[:, UNNEEDED:].any() for block in held(0))
    assert_equal(
        (await ask(stage, packet(4, share(0, 3, 5, 103, epoch=2, keep=KeepList(3, (0, 1, 2))))))[-1], await straight(8)
    )


async def test_rows_of_another_session_are_given_back_where_they_are_found(stage: StageEngine) -> None:
    if not _shards["middle"].runner.cache.can_return:
        pytest.skip("no memory can be given back here")
    await ask(stage, packet(1, share(0, 0, 60, 200)))
    await ask(stage, packet(2, share(0, 60, 4, 260, keep=KeepList(1, tuple(range(60))))))
    with pytest.raises(StageBehind) as raised:
        await ask(stage, packet(3, share(0, 5, 1, 105, epoch=2)))
    assert raised.value.have == {0: 0}
    assert not any(block.any() for block in held(0))
    assert_equal((await ask(stage, packet(4, share(0, 0, 8, 100, epoch=2))))[-1], await straight(8))


async def quick_stage() -> StageEngine:
    """Return a stage that has computed a short packet, so that its loop takes the next one."""
    stage = stage_of()
    quick = StageEngine(_shards["middle"], at_once_s=60.0)
    await stage.aclose()
    await ask(quick, packet(1, share(0, 0, 4, 100)))
    return quick


async def test_the_loop_computes_a_short_packet_as_the_thread_does() -> None:
    stage = await quick_stage()
    following = packet(2, share(0, 4, 4, 104, keep=KeepList(1, (0, 1, 2, 3))))
    made = stage.forward_now(following)
    assert made is not None
    payload, truth = bytes(made.payload), stage_of()
    await ask(truth, packet(1, share(0, 0, 4, 100)))
    assert payload == bytes((await truth.forward(following)).payload)
    assert stage.statistics == truth.statistics
    assert stage.num_rows == truth.num_rows
    await stage.aclose()
    await truth.aclose()


async def test_the_loop_leaves_long_packets_to_the_thread_and_waits_for_it() -> None:
    short = packet(2, share(1, 0, 1, 100))
    for limit_s, rows_before, is_taken in ((60.0, 1, True), (60.0, 0, False), (0.0, 1, False), (1e-9, 1, False)):
        stage = StageEngine(_shards["middle"], at_once_s=limit_s)
        if rows_before:
            await ask(stage, packet(1, share(0, 0, rows_before, 100)))
        assert (stage.forward_now(short) is not None) == is_taken
        await stage.aclose()
    stage = await quick_stage()
    assert stage.forward_now(packet(3, share(1, 0, 33, 100))) is None
    behind = asyncio.ensure_future(stage.export_kv(0))
    await asyncio.sleep(0)
    assert stage.forward_now(short) is None
    await behind
    assert stage.forward_now(short) is not None
    await stage.aclose()


async def test_what_the_loop_refuses_leaves_the_slot_as_it_was() -> None:
    stage = await quick_stage()
    with pytest.raises(StageBehind):
        stage.forward_now(packet(2, share(0, 9, 1, 109)))
    with pytest.raises(InvalidPacket):
        stage.forward_now(packet(3, share(9, 0, 1, 100)))
    made = stage.forward_now(packet(4, share(0, 4, 4, 104, keep=KeepList(1, (0, 1, 2, 3)))))
    assert made is not None
    assert_equal(from_payload(made.payload, torch.float32, made.num_rows, H)[-1], await straight(8))
    assert stage.is_well
    await stage.aclose()
    with pytest.raises(WorkerClosed):
        stage.forward_now(packet(5, share(0, 0, 1, 100)))
