"""transformers' models come without what serving does not need, and whoever needs it gets it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("scipy")

_HEAVY = "{'torch._dynamo', 'torch.distributed.tensor', 'torch.distributed.checkpoint', 'sympy', 'scipy', 'sklearn'}"
_LIBRARY = f"""
import sys
from specsplit import Pipeline
with Pipeline(mode="plain", context=64) as pipeline:
    assert pipeline.generate("x =", max_new_tokens=2).token_ids
assert not {_HEAVY} & set(sys.modules), {_HEAVY} & set(sys.modules)
"""
_ASKED_FOR = """
import specsplit.model.loader
import copy, pickle
import numpy, torch
from transformers import masking_utils
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.distributed import sharding_utils, tensor_parallel, utils
from transformers.loss import loss_for_object_detection
assert not isinstance(torch.ones(1), sharding_utils.DTensor)

style = tensor_parallel.ALL_PARALLEL_STYLES["colwise"]
layout = style.output_layouts
copied = copy.deepcopy(style).output_layouts
sent = pickle.loads(pickle.dumps(style)).output_layouts
with masking_utils.TransformGetItemToIndex():
    row = torch.vmap(lambda place: torch.arange(3)[place])(torch.arange(3))
assert row.tolist() == [0, 1, 2]
assert torch.compile(lambda x: x + 1, backend="eager")(row).tolist() == [1, 2, 3]
assert torch._dynamo.config.suppress_errors is False
assert loss_for_object_detection.linear_sum_assignment(numpy.eye(2))[1].tolist() == [1, 0]

import torch.distributed
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
spread = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
assert isinstance(spread, sharding_utils.DTensor) and utils.is_dtensor(spread)
assert issubclass(DTensor, sharding_utils.DTensor) and not issubclass(dict, sharding_utils.DTensor)
assert not utils.is_dtensor(torch.ones(2))
assert layout == Shard(-1) and layout.dim == -1 and {layout: 1}[Shard(-1)] == 1
assert type(copied) is type(sent) is Shard and copied == sent == layout
assert isinstance(torch.ones(1), torch.Tensor | sharding_utils.DTensor) and sharding_utils.DTensor.__name__ == "DTensor"
assert PagedAttentionCache.update.__wrapped__, "it is kept out of compiled graphs"
torch.distributed.destroy_process_group()  # its threads may end the process otherwise
"""
_OTHERS = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from specsplit.model.spared_imports import import_lean
import_lean("transformers_of_others")
import transformers_of_others as other
assert other.found == [False]
assert other.Own.__mro__[1].__module__ == "torch.distributed.tensor"
from torch.distributed.tensor import DTensor
assert issubclass(other.Own, DTensor)
assert other.Policy | None is not None
assert other.policy.param_dtype is None
assert sys.modules["torch._dynamo"].__file__
import scipy
assert other.version == scipy.__version__ and other.kept.__version__ == scipy.__version__
import torch._dynamo
assert torch._dynamo.config.cache_size_limit == 77
import_lean("odd_transformers")
import odd_transformers
assert odd_transformers.names
"""
_OTHER_MODULE = """
import threading
import scipy as kept
import torch._dynamo
torch._dynamo.config.cache_size_limit = 77
version = kept.__version__
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy
policy = Policy()
found = []
thread = threading.Thread(target=lambda: found.append(torch._dynamo.config.suppress_errors))
thread.start()
thread.join()
from torch.distributed.tensor import DTensor
class Own(DTensor):
    pass
"""
_ODD_MODULE = """
import torch.distributed.checkpoint as package
names = list(package.__all__) if hasattr(package, "__all__") else list(package.__file__)
"""


def _run(program: str, *arguments: str, **variables: str) -> None:
    command, environment = [sys.executable, "-c", program, *arguments], {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr


def test_a_library_takes_neither_compiler_nor_what_training_imports() -> None:
    _run(_LIBRARY)


def test_what_transformers_was_spared_is_there_for_those_who_ask() -> None:
    _run(_ASKED_FOR)


@pytest.mark.slow
def test_another_transformers_may_ask_for_more(tmp_path: Path) -> None:
    (tmp_path / "transformers_of_others.py").write_text(_OTHER_MODULE)
    (tmp_path / "odd_transformers.py").write_text(_ODD_MODULE)
    _run(_OTHERS, str(tmp_path))


@pytest.mark.slow
def test_one_of_several_processes_is_spared_nothing() -> None:
    _run("import sys, specsplit.model.loader; assert 'torch.distributed.tensor' in sys.modules", RANK="0")
