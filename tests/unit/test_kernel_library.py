"""The kernels for CPUs as files: compiled once, kept, loaded from nobody else; and models where there are none."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specsplit.model import processor
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.kernels import library
from specsplit.model.kernels.library import (
    KINDS,
    build,
    build_all,
    digest_at_first,
    has_byte_products,
    has_pair_products,
    kernel_digest,
)
from specsplit.model.loader import load_model
from tests.support.model_zoo import FAMILIES, save_model

IDS = random.Random(7).choices(range(60), k=90)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Let the kernels be found or compiled anew in each test, where this machine compiles them."""
    if not kernel_digest():
        pytest.skip("this machine compiles no kernel")
    digest_at_first.cache_clear()
    yield
    digest_at_first.cache_clear()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the sources and nothing compiled beside them, or kept in the user's cache."""
    folder = tmp_path / "sources"
    shutil.copytree(library.FOLDER, folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setattr(library, "FOLDER", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a script compile that writes how it was called where the result is wanted; the rest takes six seconds."""
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\nfor to; do :; done\necho "$@" | sed "s/ -o .*//; s/[^ ]*[.]o//g" > "$to"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return script


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_without_them_a_model_computes_with_torchs_operators(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_model(tmp_path / family, FAMILIES[family](), seed=1, with_tokenizer=False))

    def loaded() -> tuple[Tensor, str, str]:
        runner = load_model(folder, role="target", threads=1, dtype="fp32").runner
        logits = runner.forward([SequenceInput(0, 0, IDS, num_logits=9)])[0]
        again = runner.forward([SequenceInput(0, 85, IDS[85:90], parents=[-1, 0, 1, 2, 3], num_logits=5)])[0]
        assert runner.exactness != "bits" or torch.equal(logits[4:], again)
        return logits, runner.exactness, runner.numerics

    with_kernel = loaded()
    digest_at_first.cache_clear()
    monkeypatch.setenv("SPECSPLIT_CPU_KERNEL", "0")
    without = loaded()
    assert not kernel_digest()
    assert (with_kernel[0] - without[0]).abs().max() <= 1e-4 * without[0].abs().max()
    assert with_kernel[1] == without[1]
    assert with_kernel[1] != "bits" or with_kernel[2] != without[2], "workers with and without it are told apart"


@pytest.mark.parametrize(
    ("compiler", "reason"), [("false", "false fails"), ("/no/compiler", "No such file"), ("'", "No closing quot")]
)
def test_a_machine_that_compiles_nothing_says_so(
    compiler: str, reason: str, sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        assert not kernel_digest()
    assert "torch's operators compute, which are slower" in caplog.text
    assert reason in caplog.text


def test_what_was_compiled_is_kept_and_nobody_elses_is_loaded(
    sources: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "specsplit" / "kernels"
    loaded = list[Path]()
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)

    def digest_anew() -> str:
        digest_at_first.cache_clear()
        return kernel_digest()

    digest = digest_anew()
    assert digest
    (kept,) = folder.iterdir()
    compiler.unlink()
    assert digest_anew() == digest
    assert loaded[1:] == [kept]
    beside = kept.rename(sources / kept.name)
    assert digest_anew() == digest, "an image has them beside the sources"
    assert loaded[2:] == [beside]
    beside.chmod(0o777)
    assert not digest_anew(), "others could have written it"
    beside.chmod(0o755)
    beside.write_bytes(beside.read_bytes()[:50])
    assert not digest_anew(), "half a file would kill the process"
    assert len(loaded) == 3


@pytest.mark.parametrize(
    ("lacks", "capability", "options"),
    [
        ("", "AVX512", {"-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"}),
        ("avx512_bf16", "AVX512", {"-march=x86-64-v4", "-mavx512vnni"}),
        ("avx512_vnni", "AVX512", {"-march=x86-64-v4"}),
        ("avx512bw", "AVX512", {"-march=x86-64-v3"}),
        ("", "AVX2", {"-march=x86-64-v3"}),
    ],
)
def test_a_processor_has_the_kernels_of_its_instructions(
    lacks: str, capability: str, options: set[str], sources: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops, "load_library", str)
    has = {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe", "avx512_vnni", "avx512_bf16"}
    has |= {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    monkeypatch.setattr(processor, "instructions", lambda: frozenset(has - {lacks}))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert has_byte_products() is ("-mavx512vnni" in options)
    assert has_pair_products() is ("-mavx512bf16" in options)
    assert kernel_digest()
    (made,) = library.FOLDER.parent.glob("specsplit/kernels/*.so")
    assert {option for option in made.read_text().split() if option.startswith("-m")} == options


def test_what_does_not_load_is_compiled_anew(
    sources: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[Path]()

    def load(path: Path) -> None:
        tried.append(path)
        if len(tried) == 2:
            raise OSError("no such symbol")

    monkeypatch.setattr(torch.ops, "load_library", load)
    digest = kernel_digest()
    digest_at_first.cache_clear()
    assert kernel_digest() == digest
    assert len(tried) == 3
    assert len([*(tmp_path / "specsplit" / "kernels").iterdir()]) == 1


@pytest.mark.slow
def test_an_image_has_the_same_for_every_kind_of_processor(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build_all(sources)
    assert len({path.name for path in made}) == len(KINDS)
    assert all(path.parent == sources for path in made)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(sources, elsewhere)
    monkeypatch.setattr(library, "FOLDER", elsewhere)
    assert build("AVX2", tmp_path / "other").name == made[0].name


def test_without_a_place_to_keep_them_they_are_compiled_each_time(
    sources: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = list[Path]()
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert kernel_digest()
    assert len(loaded) == 1
    assert not loaded[0].exists()
