"""A stage with the head asks a GPU for the best of its rows, as an engine asks for those of a whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specsplit.core.types import SamplingParams, SessionParams
from specsplit.model.attention.metadata import SequenceInput
from specsplit.sampling.row_search import search_of
from specsplit.stages.chain.stage import StageEngine
from specsplit.stages.packet import COORDINATOR, HeadRequest, Packet, PacketSession, PayloadType, StepKind
from specsplit.stages.shard.loader import ShardOptions, ShardSpec, load_shard
from tests.support.model_zoo import FAMILIES, save_model

HOT = SessionParams(SamplingParams(temperature=0.7, top_p=0.9), seed=5)
PENALTIES = SessionParams(SamplingParams(presence_penalty=1.5))
REQUESTS = [HeadRequest(SessionParams()), HeadRequest(HOT), HeadRequest(PENALTIES), HeadRequest(HOT, (7,)), None]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_a_gpu_is_asked_for_what_each_session_picks_by(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    options = ShardOptions(max_sessions=len(REQUESTS), context=64, threads=1, record=False)
    shard = load_shard(str(folder), ShardSpec(0, 3, has_embedding=True, has_head=True), options)
    rows, asked = shard.runner.rows, list[Any]()

    def noted(sequences: Sequence[SequenceInput], hidden: Tensor | None = None) -> Tensor:
        asked.extend(sequence.head_request for sequence in sequences)
        monkeypatch.setattr(shard.runner, "device", torch.device("cpu"))
        return rows(sequences, hidden)

    monkeypatch.setattr(shard.runner, "rows", noted)
    monkeypatch.setattr(shard.runner, "device", torch.device(device))
    sessions = tuple(
        PacketSession(slot, 1, 0, hashes=(1,), token_ids=(9,), num_logits=1, head_request=request)
        for slot, request in enumerate(REQUESTS)
    )
    stage = StageEngine(shard)
    packet = Packet(1, StepKind.VERIFY, shard.hidden_size, PayloadType.FP32, COORDINATOR, 0, sessions=sessions)
    answer = await stage.forward(packet)
    await stage.aclose()
    assert [len(session.picks) for session in answer.sessions] == [1, 1, 1, 0, 0]
    greedy, hot = search_of(SamplingParams(), 0, 0), search_of(HOT.sampling, 5, 0)
    assert asked == ([greedy, hot, None, None, None] if device == "cuda" else [None] * 5)
