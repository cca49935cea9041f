"""A coordinator that computes nothing takes its stages as they are, whatever its own processor would do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specsplit.core.errors import PeerMismatch
from specsplit.core.sections import StageSettings, TargetSettings
from specsplit.model import processor
from specsplit.model.backends import rounded_weights
from specsplit.model.loader import load_model
from specsplit.rpc.clients import RemoteVerifier
from specsplit.stages.check import check_stages
from specsplit.stages.loading import load_coordinator
from specsplit.stages.serve import serving_chain
from specsplit.stages.wire.remote_chain import RemoteChain
from specsplit.target.engine import TargetEngine
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.packs import require_packs
from tests.support.remote_chains import expected_of, served
from tests.support.rounds import plain_text
from tests.support.rpc_servers import LOOPBACK
from tests.support.small_target import PARAMS, PROMPT, shards, spare
from tests.support.stage_processes import served_stages


async def test_its_processor_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_packs("int8")
    folder = str(save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, dtype=torch.bfloat16))
    shape: dict[str, Any] = {"model": folder, "dtype": "int8", "context": 160, "threads": 1}
    engine = TargetEngine(load_model(folder, role="target", dtype="int8", context=160, threads=1, record=False))
    text = await plain_text(engine, PROMPT, PARAMS, 8)
    await engine.aclose()
    with served_stages(*(StageSettings(layers=layers, **shape) for layers in ("0:1", "1:3"))) as addresses:
        settings = TargetSettings(stages=tuple(addresses), listen=LOOPBACK, **shape)
        assert all(check.is_equal for check in await asyncio.to_thread(check_stages, settings))
        has_bf16 = processor.computes(torch.bfloat16)
        monkeypatch.setattr(processor, "computes", lambda dtype: not has_bf16)
        monkeypatch.setattr(rounded_weights, "has_int8_products", lambda: False)
        coordinator = await asyncio.to_thread(load_coordinator, settings)
        async with serving_chain(coordinator, settings) as server:
            verifier = RemoteVerifier(server.address)
            assert await plain_text(verifier, PROMPT, PARAMS, 8) == text
            await verifier.aclose()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
async def test_spares_compute_in_what_the_stages_do(dtype: str) -> None:
    async with served([*shards().stages, spare(1)]) as hosts:
        for host in hosts:
            host.claims |= {"dtype": "int8", "hidden_dtype": "bf16"}
        hosts[-1].claims["hidden_dtype"] = dtype
        *stages, standing_by = [host.address for host in hosts]
        link = RemoteChain(stages, [standing_by], replace(expected_of(shards()), dtype="int8", hidden_dtype=None))
        try:
            if dtype == "fp32":
                with pytest.raises(
                    PeerMismatch, match=f"{standing_by} computes with int8 weights in fp32, not in bf16"
                ):
                    await link.connect()
            else:
                await link.connect()
                assert {stage.computed_dtype for stage in link.identities} == {"bf16"}
        finally:
            await link.aclose()
