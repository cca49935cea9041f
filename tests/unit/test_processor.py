"""The processor as Linux tells it: its vector instructions, its name, and the number formats that it computes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import Gemma3Config, LlamaConfig

from specsplit.model import loader, processor
from tests.support.known_configs import GEMMA_3_4B

X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9R14
flags\t\t: fpu sse2 avx2 fma f16c{more}

processor\t: 1
vendor_id\t: another
flags\t\t: amx_bf16
"""
ARM = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd asimdhp sve bf16 i8mm
"""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Return what makes this another machine: the module, loaded anew with this /proc/cpuinfo, or without one."""

    def of(cpuinfo: str | None) -> ModuleType:
        def read_text(path: Path) -> str:
            assert str(path) == "/proc/cpuinfo"
            if cpuinfo is None:
                raise FileNotFoundError(path)
            return cpuinfo

        spec = importlib.util.spec_from_file_location("another_processor", processor.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", read_text)
            module.instructions()  # it reads the file once
        return module

    return of


def test_the_description_names_the_first_core_and_its_vector_instructions(machine) -> None:
    found = machine(X86.format(more=" avx512_bf16"))
    assert found.instructions() == {"avx2", "fma", "f16c", "avx512_bf16"}
    assert found.description().endswith("AuthenticAMD AMD EPYC 9R14 avx2 avx512_bf16 f16c fma")
    assert found.description() != machine(X86.format(more="")).description()


def test_the_order_of_flags_does_not_matter(machine) -> None:
    assert (
        machine(X86.format(more=" amx avx512f")).description() == machine(X86.format(more=" avx512f amx")).description()
    )


def test_another_architecture_names_its_features(machine) -> None:
    found = machine(ARM)
    assert found.instructions() == {"asimd", "asimdhp", "sve", "bf16", "i8mm"}
    assert all(found.computes(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16))


def test_a_system_that_tells_nothing_computes_fp32(machine) -> None:
    found = machine(None)
    assert found.instructions() == frozenset()
    assert found.description()
    assert [found.computes(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)] == [True, False, False]


@pytest.mark.parametrize(
    ("flag", "bf16", "fp16"),
    [
        ("", False, False),
        (" avx512f", False, False),
        (" avx512_bf16", True, False),
        (" amx_bf16", True, False),
        (" avx512_fp16", False, True),
    ],
)
def test_half_precision_is_computed_if_an_instruction_multiplies_it(flag: str, bf16: bool, fp16: bool, machine) -> None:
    found = machine(X86.format(more=flag))
    assert (found.computes(torch.bfloat16), found.computes(torch.float16)) == (bf16, fp16)


@pytest.mark.parametrize("computes", [True, False])
def test_the_default_dtype_is_the_checkpoints_if_it_is_computed_here(
    computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "computes", lambda dtype: computes or dtype == torch.float32)
    cpu = torch.device("cpu")
    for stored, expected in (
        (torch.bfloat16, torch.bfloat16 if computes else torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float32),
        (None, torch.float32),
    ):
        assert loader.as_dtype(None, cpu, LlamaConfig(dtype=stored)) == expected
    assert loader.as_dtype("bf16", cpu, LlamaConfig(dtype=torch.float32)) == torch.bfloat16
    assert loader.as_dtype(None, torch.device("cuda"), LlamaConfig(dtype=torch.bfloat16)) == "auto"


def test_the_dtype_of_a_whole_config_is_that_of_its_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "computes", lambda dtype: True)
    config, cpu = Gemma3Config.from_dict(GEMMA_3_4B), torch.device("cpu")
    assert config.get_text_config().dtype is None, "a wrapper that says it once"
    assert loader.as_dtype(None, cpu, config) == torch.bfloat16
    config.get_text_config().dtype = torch.float16
    assert loader.as_dtype(None, cpu, config) == torch.float16


@pytest.mark.parametrize(("width", "expected"), [(512, torch.float32), (576, torch.bfloat16)])
def test_a_small_draft_is_computed_in_fp32_by_default(
    width: int, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "computes", lambda dtype: True)
    cpu, config = torch.device("cpu"), LlamaConfig(dtype=torch.bfloat16, hidden_size=width)
    assert loader.as_dtype(None, cpu, config, "draft") == expected
    assert loader.as_dtype(None, cpu, config, "target") == torch.bfloat16
    assert loader.as_dtype("bf16", cpu, config, "draft") == torch.bfloat16
    assert loader.as_dtype(None, torch.device("cuda"), config, "draft") == "auto"
