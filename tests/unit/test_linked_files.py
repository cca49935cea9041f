"""Links in a model's folder are followed, and refused only where their contents would be sent out of it to others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specsplit import Pipeline
from specsplit.assembly.models import load_worker
from specsplit.core.errors import ModelDamaged
from specsplit.core.sections import TargetSettings
from specsplit.model.identity import read_tokenizer_files
from tests.support.model_zoo import FAMILIES, save_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of links, as downloads of the hub made them for years."""
    stored, linked = save_model(tmp_path / "stored", FAMILIES["llama"](), seed=1), tmp_path / "linked"
    linked.mkdir()
    for file in stored.iterdir():
        (linked / file.name).symlink_to(file)
    return linked


def test_a_link_out_of_the_folder_of_a_worker_is_refused_at_once(folder: Path) -> None:
    phases: list[str] = []
    words = r"config\.json of .* is a link that leads out of the model's folder"
    with pytest.raises(ModelDamaged, match=words):
        load_worker("target", TargetSettings(model=str(folder)), lambda phase, _: phases.append(phase))
    assert phases == ["config"]


def test_one_process_follows_links_out_of_the_folder(folder: Path) -> None:
    with Pipeline(str(folder), draft_model=str(folder)) as linked:
        assert len(linked.generate("a", max_new_tokens=4).token_ids) == 4


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", FAMILIES["llama"](), seed=1)
    before = read_tokenizer_files(folder, "it")
    (folder / "real").mkdir()
    shutil.move(folder / "tokenizer.json", folder / "real" / "t.json")
    (folder / "tokenizer.json").symlink_to("real/t.json")
    assert read_tokenizer_files(folder, "it") == before
