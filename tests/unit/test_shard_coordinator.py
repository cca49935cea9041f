"""What a coordinator says of a model is what a target in one process says of it, and what its stages say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3Config

from specsplit.core.errors import InvalidRequest, ModelNotFound
from specsplit.core.sections import TargetSettings
from specsplit.model.loader import load_model
from specsplit.stages.loading import load_coordinator
from specsplit.stages.shard.chain_model import load_chain_model
from tests.support.chains import Shards, opened
from tests.support.known_configs import GEMMA_3_4B
from tests.support.model_zoo import FAMILIES, byte_tokenizer, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("coordinator") / "llama", FAMILIES["llama"](), 1)


async def test_the_identity_is_that_of_the_whole_model(folder: Path) -> None:
    whole = load_model(str(folder), role="target", context=160, max_sessions=4, record=False)
    shards = Shards.load(folder, 3, [1], "stages")
    async with opened(shards) as chain:
        assert await chain.target.ping() == whole.identity
        assert await chain.target.tokenizer_files() == whole.tokenizer_files
    assert {stage.config_hash for stage in shards.stages} == {shards.model.config_hash}
    assert shards.model.num_layers == 3


def test_what_cannot_be_loaded_is_refused(folder: Path) -> None:
    for changes in ({"dtype": "fp8"}, {"max_sessions": 0}, {"context": 1 << 20}):
        with pytest.raises(InvalidRequest):
            load_chain_model(str(folder), **changes)  # type: ignore[arg-type]
    with pytest.raises(ModelNotFound):
        load_chain_model(str(folder / "nowhere"))


def test_stages_on_gpus_have_the_dtype_of_a_config_around_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    Gemma3Config.from_dict(GEMMA_3_4B).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    settings = TargetSettings(model=str(tmp_path), stages=("127.0.0.1:1",), device="cuda")
    assert load_coordinator(settings).model.dtype == torch.bfloat16
