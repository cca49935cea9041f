"""RoPE that is stretched: dynamic RoPE is exact up to the longest context, and YaRN goes as far as its factor says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers as tf

from specsplit.core.errors import InvalidRequest, ModelUnsupported
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import load_model
from specsplit.model.probe import refuse_by_config
from tests.support.known_configs import shape_of
from tests.support.model_zoo import build_model, save_model, small
from tests.support.tree_rows import PARENTS, random_ids, rows_of_transformers, text_and_tree_rows

LONGEST = 64
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS = {
    "llama": small(tf.LlamaConfig, max_position_embeddings=LONGEST, rope_parameters=DYNAMIC),
    "hunyuan": small(
        tf.HunYuanDenseV1Config,
        max_position_embeddings=LONGEST,
        rope_parameters={**DYNAMIC, "factor": 1.0, "alpha": 1000.0},
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("record", [True, False])
def test_dynamic_rope_is_exact_up_to_the_last_position(family: str, record: bool, tmp_path: Path) -> None:
    folder = save_model(tmp_path / family, CONFIGS[family](), seed=1, with_tokenizer=False)
    loaded = load_model(str(folder), role="target", context=LONGEST, threads=1, record=record)
    model = build_model(CONFIGS[family](), seed=1)
    ids, nodes = random_ids(LONGEST - 3, 1), random_ids(len(PARENTS), 2)
    truth = rows_of_transformers(model, ids, nodes)
    assert (text_and_tree_rows(loaded.runner, ids, nodes) - truth).abs().max() < 1e-5
    # Nodes beyond the last position, which no text can reach, change nothing for others.
    first, beyond = SequenceInput(0, 0, ids), SequenceInput(0, len(ids), [*nodes, *nodes], num_logits=8)
    rows = [loaded.runner.forward([step])[0] for step in (first, beyond)][1]
    text = rows_of_transformers(model, [*ids, *nodes[:3]], [])
    assert (rows[:3] - text[-3:]).abs().max() < 1e-5


def test_dynamic_rope_without_a_longest_context_is_refused() -> None:
    config = SimpleNamespace(model_type="it", rope_parameters=DYNAMIC, max_position_embeddings=None)
    config.get_text_config = lambda: config
    with pytest.raises(ModelUnsupported, match=r"beyond max_position_embeddings, which its config\.json does not give"):
        refuse_by_config(config)


def test_yarn_goes_as_far_as_its_factor_and_no_further(tmp_path: Path) -> None:
    """As Qwen's model cards say: the factor is given, and max_position_embeddings stays."""
    yarn = small(tf.Qwen3Config, max_position_embeddings=40, rope_parameters=YARN)
    folder = save_model(tmp_path / "qwen3", yarn(), seed=1, with_tokenizer=False)
    assert load_model(str(folder), role="target", threads=1, record=False).context == 40
    with pytest.raises(InvalidRequest, match="up to 128 tokens, so --context 129 is too long"):
        load_model(str(folder), role="target", context=129)
    runner = load_model(str(folder), role="target", context=128, threads=1).runner
    ids, nodes = random_ids(125, 1), random_ids(len(PARENTS), 2)
    truth = rows_of_transformers(build_model(yarn(), seed=1), ids, nodes)
    assert (text_and_tree_rows(runner, ids, nodes) - truth).abs().max() < 1e-5


def test_a_plan_knows_how_far_yarn_goes() -> None:
    config = small(tf.Qwen3Config, max_position_embeddings=40)().to_dict()
    assert shape_of(config).max_context == 40
    del config["rope_parameters"]
    assert shape_of({**config, "rope_scaling": YARN}).max_context == 128
