"""The package of transformers' models knows what it would have read itself, and is read no second time."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
from pathlib import Path
import transformers
from transformers.utils import import_utils

paths = []
read = import_utils.create_import_structure_from_path
import_utils.create_import_structure_from_path = lambda path: paths.append(path) or read(path)
{before}
from specsplit.model.model_heads import import_models, without_prefix

whole = import_utils.define_import_structure
import_models()
assert import_utils.define_import_structure is whole
import transformers.models
print(sum(str(path).endswith(("transformers/models", "models/__init__.py")) for path in paths))
own = import_utils.define_import_structure(transformers.models.__file__)
package = Path(transformers.__file__).parent / "models"
given = without_prefix(import_utils.define_import_structure(package, prefix="models"))
assert given == own
assert transformers.models._class_to_module["LlamaForCausalLM"] == "llama.modeling_llama"
from transformers import LlamaForCausalLM
import transformers.models.qwen3.modeling_qwen3
"""
_OTHERWISE = "import_utils.define_import_structure = import_utils.define_import_structure.__wrapped__"


@pytest.mark.parametrize(
    ("before", "times"),
    [("", "0"), pytest.param(_OTHERWISE, "1", marks=pytest.mark.slow)],
    ids=["known", "another transformers"],
)
def test_models_know_all_that_they_would_have_read(before: str, times: str) -> None:
    program = _PROGRAM.format(before=before)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    assert done.stdout.split() == [times]
