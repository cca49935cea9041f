"""What does not make up the wanted chain is refused in one sentence that names the address and the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specsplit.core.errors import InvalidRequest, PeerMismatch
from specsplit.core.types import PROTOCOL_VERSION
from specsplit.stages.identity import ExpectedChain, StageIdentity
from specsplit.stages.wire.messages import decode_identity, encode_identity

STAGE = StageIdentity(
    model="llama", num_layers=6, start=0, end=2, has_embedding=False, has_head=False, hidden_size=32, vocab_size=320,
    dtype="fp32", context=160, node_limit=128, num_slots=4, slot_bytes=1 << 20, config_hash="c", weights_hash="w",
)  # fmt: skip
WANTED = ExpectedChain("llama", 6, 32, 320, "fp32", 160, 128, 4, "coordinator", "c", lambda stage: "w")


def stages(*ranges: str, **changes: Any) -> list[tuple[str, StageIdentity]]:
    found: list[tuple[str, StageIdentity]] = []
    for index, layers in enumerate(ranges):
        start, end = map(int, layers.split(":"))
        found.append((f"host{index}:1", replace(STAGE, start=start, end=end, **changes)))
    return found


def with_ends(*found: tuple[str, StageIdentity]) -> list[tuple[str, StageIdentity]]:
    return [(address, replace(one, has_embedding=one.start == 0, has_head=one.end == 6)) for address, one in found]


@pytest.mark.parametrize("ranges", [("0:6",), ("0:2", "2:6"), ("0:1", "1:3", "3:5", "5:6")])
def test_a_full_cover_in_order_is_taken(ranges: tuple[str, ...]) -> None:
    WANTED.check_chain(stages(*ranges))
    replace(WANTED, ends="stages").check_chain(with_ends(*stages(*ranges)))


@pytest.mark.parametrize(
    ("ranges", "reason"),
    [
        ((), "at least one stage"),
        (("2:6", "0:2"), r"first stage, at host0:1, has layers 2:6 .*order of their layers"),
        (("0:2", "4:6", "2:4"), r"Layers 2:4 are missing between .*host0:1.* and host1:1"),
        (("0:4", "2:3", "4:6"), r"host0:1 \(layers 0:4\) and host1:1 \(layers 2:3\) overlap"),
        (("0:4", "4:6", "2:4"), r"host2:1 \(layers 2:4\) stands behind that at host1:1"),
        (("0:4", "3:6"), r"overlap"),
        (("0:2", "3:6"), r"Layers 2:3 are missing between the stages at host0:1 .* and host1:1"),
        (("0:2", "2:5"), r"Layers 5:6 are missing behind the last stage, at host1:1"),
    ],
)
def test_wrong_order_gaps_and_overlaps_are_refused(ranges: tuple[str, ...], reason: str) -> None:
    with pytest.raises(PeerMismatch, match=reason):
        WANTED.check_chain(stages(*ranges))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol_version": 99}, f"protocol version 99, not {PROTOCOL_VERSION}"),
        ({"config_hash": "other"}, r"another model \(llama, config other\)"),
        ({"hidden_size": 64}, "another model"),
        ({"num_layers": 8}, "another model"),
        ({"dtype": "bf16"}, "computes in bf16, not in fp32"),
        ({"dtype": "int8", "hidden_dtype": "fp32"}, "computes in int8, not in fp32; give both the same --dtype"),
        ({"hidden_dtype": "bf16"}, "computes with fp32 weights in bf16, not in fp32 as the rest of the chain"),
        ({"context": 100}, "a context of 100 tokens, but the coordinator needs 160"),
        ({"node_limit": 2}, "room for trees of 2 nodes, but the coordinator needs 128"),
        ({"num_slots": 1}, "1 slots, but the coordinator needs 4"),
        ({"weights_hash": "x"}, r"other weights for layers 0:6 \(x\) than the coordinator \(w\)"),
        ({"has_embedding": True}, "holds the embedding, which with ends = coordinator"),
        ({"has_head": True}, "holds the head, which with ends = coordinator"),
    ],
)
def test_a_stage_that_does_not_fit_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PeerMismatch, match=rf"The stage at host0:1 .*{reason}"):
        WANTED.check_chain(stages("0:6", **changes))


def test_stages_choose_one_dtype_where_the_coordinator_computes_nothing() -> None:
    open_to_any = replace(WANTED, dtype="int8", hidden_dtype=None)
    for dtype in ("bf16", "fp32"):
        open_to_any.check_chain(stages("0:2", "2:6", dtype="int8", hidden_dtype=dtype))
    first, (address, other) = stages("0:2", "2:6", dtype="int8", hidden_dtype="bf16")
    mixed = [first, (address, replace(other, hidden_dtype="fp32"))]
    with pytest.raises(PeerMismatch, match="host1:1 computes with int8 weights in fp32, not in bf16 as the rest of"):
        open_to_any.check_chain(mixed)


def test_ends_that_belong_on_stages_are_missed_there() -> None:
    for end, other in (("embedding", "has_head"), ("head", "has_embedding")):
        with pytest.raises(PeerMismatch, match=f"without the {end}"):
            replace(WANTED, ends="stages").check_chain(stages("0:6", **{other: True}))


def test_a_coordinator_without_weights_believes_its_stages() -> None:
    replace(WANTED, weights_hash=None).check_chain(stages("0:6", weights_hash="x"))


def test_an_identity_travels_whole_and_a_lying_one_is_refused() -> None:
    for stage in (STAGE, replace(STAGE, exactness="bits", numerics="0123456789abcdef", hidden_dtype="bf16")):
        assert decode_identity(encode_identity(stage)) == stage
    for lie in ({"start": 2}, {"end": 7}, {"model": "x" * 300}, {"numerics": "x" * 17}):
        with pytest.raises(InvalidRequest):
            decode_identity(encode_identity(replace(STAGE, **lie)))


def test_a_spare_needs_memory_for_the_rows_of_the_lost_stage() -> None:
    for rows, like in ((0, 900), (500, 500), (500, 0), (1280, 5000)):  # the chain itself needs no more: 4 slots of 320
        WANTED.check_memory("spare:1", replace(STAGE, kv_rows=rows), replace(STAGE, kv_rows=like))
    with pytest.raises(PeerMismatch, match="spare:1 has KV memory for 499 rows, and 500 are needed"):
        WANTED.check_memory("spare:1", replace(STAGE, kv_rows=499), replace(STAGE, kv_rows=500))
    with pytest.raises(PeerMismatch, match="1279 rows, and 1280 are needed"):
        WANTED.check_memory("spare:1", replace(STAGE, kv_rows=1279), replace(STAGE, kv_rows=5000))


def test_stages_that_are_believed_are_of_the_coordinators_commit() -> None:
    (stage,) = stages("0:6", model_revision="1" * 40)
    believing = replace(WANTED, weights_hash=None, model_revision="2" * 40)
    with pytest.raises(PeerMismatch, match=r"host0:1 has llama of revision 1{40}, and the coordinator of 2{40}; start"):
        believing.check_chain([stage])
    with pytest.raises(PeerMismatch, match="start both with the same --revision"):
        replace(believing, weights_hash=lambda _: "").check_chain([stage])
    replace(believing, model_revision="").check_chain([stage])
    replace(WANTED, model_revision="2" * 40).check_chain([stage])


def test_stages_that_are_believed_are_of_one_commit() -> None:
    first, second, third = stages("0:2", "2:4", "4:6")
    chain = [(at, replace(stage, model_revision=of)) for (at, stage), of in ((first, "1"), (second, ""), (third, "2"))]
    believing = replace(WANTED, weights_hash=None)
    with pytest.raises(PeerMismatch, match=r"host2:1 has llama of revision 2, and that at host0:1 of 1; start both"):
        believing.check_chain(chain)
    WANTED.check_chain(chain)
    replace(WANTED, weights_hash=lambda stage: "w" if stage.start == 4 else "").check_chain(chain)
    believing.check_chain([(at, replace(stage, model_revision="1")) for at, stage in chain])
