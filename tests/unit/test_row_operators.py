"""Operators that take rows one by one: torch's numbers, the same bits in any company, and models that use them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb, rotate_half

from specsplit.model.backends.norms import Norms
from specsplit.model.backends.recorded_cpu import RecordedCpuBackend
from specsplit.model.kernels.library import kernel_digest
from specsplit.model.loader import load_model
from specsplit.model.threads import one_thread
from tests.support.model_zoo import FAMILIES, save_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORMS = {"rounded": LlamaRMSNorm, "whole": GptOssRMSNorm, "offset": Gemma3RMSNorm}
FORMS = list(NORMS)
SPACES = {torch.float32: 4e-7, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Between two numbers, relative to their size."""


@pytest.fixture(autouse=True)
def _has_kernel() -> None:
    if not kernel_digest():
        pytest.skip("this machine compiles no kernel")


def drawn(*sizes: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def require_near(ours: Tensor, truth: Tensor) -> None:
    """Require numbers that differ in their last bits at most, and in few places."""
    assert ours.dtype == truth.dtype
    errors = (ours.float() - truth.float()).abs()
    assert (errors <= 2 * SPACES[truth.dtype] * truth.float().abs() + 1e-7).all()
    assert truth.dtype == torch.float32 or (errors > 0).float().mean() < 0.02


@pytest.mark.parametrize("size", [8, 20, 128, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_norm_is_that_of_transformers(form: str, dtype: torch.dtype, size: int) -> None:
    module = NORMS[form](size, eps=1e-5).to(dtype)
    module.weight.data = drawn(size, dtype=dtype, seed=1)
    x = drawn(2, 7, 3, size, dtype=dtype).transpose(1, 2)
    ours = torch.ops.specsplit.rms_norm(x, module.weight, 1e-5, FORMS.index(form))
    require_near(ours, module(x).detach())
    for row in (0, 20, 41):
        alone = x.reshape(-1, size)[row : row + 1]
        assert torch.equal(
            torch.ops.specsplit.rms_norm(alone, module.weight, 1e-5, FORMS.index(form))[0], ours.reshape(-1, size)[row]
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_is_torchs(dtype: torch.dtype) -> None:
    x = torch.cat([drawn(6, 90, dtype=dtype) * 8, torch.tensor([[0.0, 100.0, -100.0]] * 6).to(dtype)], dim=1)
    gate = x[:, 3:]  # as one half of a product's outputs lies
    ours = torch.ops.specsplit.silu(gate)
    require_near(ours, F.silu(gate))
    assert torch.equal(torch.ops.specsplit.silu(gate[4:5]), ours[4:5])
    assert torch.ops.specsplit.silu(torch.tensor([torch.inf, torch.nan])).isnan().tolist() == [False, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_positions_have_the_bits_of_transformers(dtype: torch.dtype) -> None:
    q, k = (drawn(1, 9, heads, 24, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    cos, sin = (drawn(1, 9, 24, dtype=dtype, seed=seed) for seed in (1, 2))
    truth = apply_rotary_pos_emb(q, k, cos, sin)
    for x, rotated in zip((q, k), truth, strict=True):
        assert torch.equal(torch.ops.specsplit.rotate(x, cos[:, None], sin[:, None]), rotated)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype) -> None:
    x, weight = drawn(700, 160, dtype=dtype), drawn(160, dtype=dtype, seed=1)
    with one_thread():
        alone = torch.ops.specsplit.rms_norm(x, weight, 1e-5, 0), torch.ops.specsplit.silu(x)
    assert torch.equal(torch.ops.specsplit.rms_norm(x, weight, 1e-5, 0), alone[0])
    assert torch.equal(torch.ops.specsplit.silu(x), alone[1])


@pytest.mark.parametrize(
    ("family", "norms", "rotations"),
    [
        ("llama", 2, 2),
        ("qwen3", 4, 2),
        ("gemma3", 6, 2),
        ("phi3", 2, 2),
        ("gpt-oss", 2, 0),  # it rotates otherwise
        ("gpt2", 0, 0),
    ],
)
def test_a_recording_holds_them(family: str, norms: int, rotations: int, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    folder = save_model(tmp_path / family, config, seed=1, with_tokenizer=False)
    backend = load_model(str(folder), role="target", threads=1, dtype="fp32").runner.backend
    assert isinstance(backend, RecordedCpuBackend)
    code = str(backend.forward.inlined_graph)  # type: ignore[attr-defined]
    assert code.count("specsplit::rms_norm") == norms * config.num_hidden_layers + (norms > 0)
    assert code.count("specsplit::rotate") == rotations * config.num_hidden_layers


def test_a_norm_of_another_format_than_its_input_is_that_of_transformers() -> None:
    model = torch.nn.ModuleList([LlamaRMSNorm(16)])
    norms, x = Norms(model), drawn(3, 16, dtype=torch.bfloat16)
    assert len(norms) == 1
    truth = model[0](x)
    with norms.serving():
        assert torch.equal(model[0](x), truth)
    with pytest.raises(RuntimeError, match="another weight"):
        torch.ops.specsplit.rms_norm(x, torch.ones(16), 1e-6, 0)


def test_a_norm_of_another_kind_stays_as_it_is() -> None:
    class OddRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) + 0.5

    class PlainRMSNorm(LlamaRMSNorm):
        pass

    odd, plain = OddRMSNorm(16), PlainRMSNorm(16)
    model = torch.nn.ModuleList([odd, plain, torch.nn.Linear(16, 16)])
    norms = Norms(model)
    assert len(norms) == 1
    x = drawn(3, 16, dtype=torch.float32)
    with norms.serving():
        assert torch.equal(plain(x), torch.ops.specsplit.rms_norm(x, plain.weight, 1e-6, 0))
    assert "forward" not in vars(plain)


def test_a_model_that_rotates_otherwise_is_recorded_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **others: object) -> tuple[Tensor, ...]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return tuple(torch.add(x * cos, rotate_half(x) * sin, alpha=2) for x in (q, k))

    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", twice)
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    runner = load_model(str(folder), role="target", threads=1, dtype="fp32").runner
    assert runner.is_recorded
    assert isinstance(runner.backend, RecordedCpuBackend)
    assert "specsplit::rotate" not in str(runner.backend.forward.inlined_graph)  # type: ignore[attr-defined]
