"""What works less well than it could is said, and changes nothing in the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsplit.assembly.models import Models
from specsplit.model.loader import LoadedModel, load_model
from specsplit.model.runner import Runner
from specsplit.speculation.options import Speculation
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.pipelines import PLAIN, request, run

PROMPT = (5, 9, 2, 7, 11, 3)
TREE = Speculation(mode="pingpong", lookup=False, nodes=6, depth=3, branching=2)


def load(folder: Path, role: str, *, context: int = 64) -> LoadedModel:
    if not folder.exists():
        save_model(folder, FAMILIES["llama"](), seed=1)
    return load_model(str(folder), role=role, context=context, threads=1)  # type: ignore[arg-type]


def test_nothing_is_said_of_a_pair_at_its_best(tmp_path: Path) -> None:
    assert Models(load(tmp_path / "llama", "target"), load(tmp_path / "llama", "draft")).degraded == []


def test_a_forward_that_is_not_recorded_is_said_and_gives_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "record", lambda *_: False)
        target = load(tmp_path / "llama", "target")
    assert not target.runner.is_recorded
    assert "could not be recorded" in Models(target, None).degraded[0]
    wanted = [request(PROMPT, tokens=30)]
    recorded = run(load(tmp_path / "llama", "target"), None, PLAIN, wanted)
    assert run(target, None, PLAIN, wanted)[0].token_ids == recorded[0].token_ids


@pytest.mark.parametrize("context", [31, 40])
def test_a_draft_of_a_shorter_context_has_a_window_or_helps_until_there(tmp_path: Path, context: int) -> None:
    target, draft = load(tmp_path / "llama", "target"), load(tmp_path / "llama", "draft", context=context)
    degraded = Models(target, draft).degraded
    wanted = [request(PROMPT, tokens=50)]
    plain, speculative = run(target, None, PLAIN, wanted)[0], run(target, draft, TREE, wanted)[0]
    assert speculative.token_ids == plain.token_ids
    num_trees = speculative.speculative_decoding.num_spec_steps
    if context == 40:
        assert not degraded
        assert num_trees >= speculative.num_rounds - 1  # the last one has room for its bonus token alone
    else:
        assert "31 tokens is shorter than the target's 64, and too short for a window" in degraded[0]
        assert 0 < num_trees < speculative.num_rounds
