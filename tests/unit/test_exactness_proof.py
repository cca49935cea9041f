"""The proof that rows have the same bits: done once for each machine and model, and refuted where they do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specsplit.model import processor
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends import packed_linear
from specsplit.model.exactness import Provable, fingerprint, settle
from specsplit.model.loader import load_model
from specsplit.model.proofs import Proofs
from specsplit.model.runner import Runner
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.packs import require_bits, require_packs


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that this test's proofs are kept in."""
    require_packs("fp32")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specsplit"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)


def load(folder: Path, *, record: bool = False, dtype: str = "fp32", max_sessions: int = 2, **others: Any) -> Runner:
    options: dict[str, Any] = {"record": record, "dtype": dtype, "max_sessions": max_sessions, **others}
    return load_model(str(folder), role="target", threads=1, **options).runner


def proofs(user_cache: Path) -> dict[str, str]:
    return json.loads((user_cache / "proofs.json").read_text())


UNPROVED = 3
"""Forwards of a load that finds its proof in the cache, at most: the comparison with transformers, in three parts."""


def test_a_proof_is_done_once(folder: Path, user_cache: Path, tmp_path: Path) -> None:
    """For all copies of a model, wherever they are, and anew for others of its shape."""
    first = load(folder)
    require_bits(first, "fp32")
    assert first.num_forwards > UNPROVED
    assert list(proofs(user_cache).values()) == [""]
    second = load(folder)
    require_bits(second, "fp32")
    assert second.num_forwards == 0  # the very files were compared before, too
    assert second.numerics == first.numerics != ""
    copy = load(save_model(tmp_path / "copy", FAMILIES["llama"](), seed=1, with_tokenizer=False))
    assert (copy.exactness, copy.num_forwards) == ("bits", UNPROVED)
    other = load(save_model(tmp_path / "other", FAMILIES["llama"](), seed=2, with_tokenizer=False))
    assert other.num_forwards > UNPROVED
    assert list(proofs(user_cache).values()) == [""] * 2


def test_what_is_computed_otherwise_is_proved_for_itself(folder: Path, user_cache: Path, tmp_path: Path) -> None:
    require_packs("bf16")
    load(folder)
    assert load(folder, record=True).num_forwards > UNPROVED
    assert load(folder, dtype="bf16").num_forwards > UNPROVED
    assert load(save_model(tmp_path, FAMILIES["qwen3"](), seed=1, with_tokenizer=False)).num_forwards > UNPROVED
    assert list(proofs(user_cache).values()) == [""] * 4


def test_few_or_short_slots_prove_nothing_for_more(folder: Path, user_cache: Path) -> None:
    """With one slot there is no other session beside, and a short one holds less of the proof's text."""
    slots = [(1, 32), (2, 32), (2, 64)]
    for max_sessions, context in slots:
        assert load(folder, max_sessions=max_sessions, context=context).num_forwards > UNPROVED
    assert list(proofs(user_cache).values()) == [""] * len(slots)
    assert load(folder, max_sessions=5, context=64).num_forwards == UNPROVED  # compared anew, not proved


_DAMAGED = [b"", b"{", b"[1, 2]", b'"bits"', b"\xff\xfe\x00", b"null", b"{}", b"[" * 100_000]


@pytest.mark.parametrize("content", _DAMAGED, ids=lambda content: repr(content[:8]))
def test_a_cache_that_is_damaged_is_written_anew(content: bytes, folder: Path, user_cache: Path) -> None:
    user_cache.mkdir(parents=True)
    (user_cache / "proofs.json").write_bytes(content)
    runner = load(folder)
    assert (runner.exactness, runner.num_forwards > UNPROVED) == ("bits", True)
    assert list(proofs(user_cache).values()) == [""]


@pytest.mark.parametrize("entry", [None, 3, True, ["bits"]])
def test_an_entry_that_is_no_reason_is_proved_anew(entry: object, folder: Path, user_cache: Path) -> None:
    load(folder)
    (key,) = proofs(user_cache)
    (user_cache / "proofs.json").write_text(json.dumps({key: entry, "another": "stays"}))
    assert load(folder).num_forwards > UNPROVED
    assert proofs(user_cache) == {key: "", "another": "stays"}


def test_a_cache_that_cannot_be_written_is_none(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        runner = load(folder)
        assert (runner.exactness, runner.num_forwards > UNPROVED) == ("bits", True)


def test_a_folder_in_place_of_the_cache_is_left_alone(folder: Path, user_cache: Path) -> None:
    (user_cache / "proofs.json").mkdir(parents=True)
    assert load(folder).exactness == "bits"
    assert (user_cache / "proofs.json").is_dir()
    # Nothing half written is left beside it.
    assert {path.name for path in user_cache.iterdir()} == {"comparisons.json", "proofs.json", "widths.json"}


def test_a_user_without_a_home_has_no_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert load(folder).exactness == "bits"


def test_the_cache_forgets_what_is_oldest(folder: Path, user_cache: Path) -> None:
    user_cache.mkdir(parents=True)
    (user_cache / "proofs.json").write_text(json.dumps({f"key {number}": "" for number in range(1000)}))
    load(folder)
    kept = list(proofs(user_cache))
    assert len(kept) < 1000
    assert kept[-2] == "key 999"
    assert load(folder).num_forwards <= UNPROVED


def test_the_cache_keeps_what_is_used(user_cache: Path) -> None:
    cache = Proofs("proofs.json")
    cache.put("used", "")
    for number in range(1000):
        cache.put(f"key {number}", "")
        assert cache.get("used") == ""
    assert 1 < len(proofs(user_cache)) < 1000


def test_processes_that_write_at_once_leave_a_whole_file(user_cache: Path) -> None:
    def write(name: int) -> None:
        for number in range(50):
            Proofs("proofs.json").put(f"{name} {number}", "")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    found = proofs(user_cache)
    assert set(found.values()) == {""}
    assert [path.name for path in user_cache.iterdir()] == ["proofs.json"]


def test_products_that_differ_with_the_rows_are_near_ties(
    folder: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = packed_linear.packed_product

    def packed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return right(x, weight, bias) * (1 + 1e-6 * (x.shape[-2] > 8))

    monkeypatch.setattr(packed_linear, "packed_product", packed_product)
    for num_forwards in (UNPROVED, 0):
        runner = load(folder)
        assert runner.exactness == "near ties"
        assert runner.exactness_reason == "products of 64 x 32 differ with the number of rows on this machine"
        assert runner.num_forwards == num_forwards
    assert list(proofs(user_cache).values()) == [runner.exactness_reason]


def test_a_model_whose_rows_differ_is_said_to_have_near_ties(
    folder: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum whose order follows the number of rows, in one of its layers; served it is all the same."""
    right = packed_linear.product

    def product(x: Tensor, packs: list[Tensor], width: int, bias: Tensor | None) -> Tensor:
        return right(x, packs, width, bias) * (1 + 1e-6 * (x.shape[-1] == 48 and x.shape[-2] > 8))

    monkeypatch.setattr(packed_linear, "product", product)
    first = load(folder)
    assert first.exactness == "near ties"
    assert first.exactness_reason == "a row differs in a prefill of another width on this machine"
    again = load(folder)
    assert (again.exactness, again.exactness_reason) == (first.exactness, first.exactness_reason)
    assert again.num_forwards == 0


def is_narrow_chain(step: Sequence[SequenceInput]) -> bool:
    return 1 < len(step[0].token_ids) < 200 and step[0].parents is None and len(step) == 1


def is_token(step: Sequence[SequenceInput]) -> bool:
    # What comes in chunks is compared before, and has chunks of one token as well.
    return len(step[0].token_ids) == 1 and step[0].base_length > 200


def is_one_token_of_many(step: Sequence[SequenceInput]) -> bool:
    return is_token(step) and step[0].base_length == 240


def is_tree(step: Sequence[SequenceInput]) -> bool:
    return step[0].parents is not None


def is_crowd(step: Sequence[SequenceInput]) -> bool:
    return len(step) > 1


@pytest.mark.parametrize(
    ("is_other", "words"),
    [
        (is_narrow_chain, "in a prefill of another width"),
        (is_token, "alone"),
        (is_one_token_of_many, "alone"),
        (is_tree, "in a tree"),
        (is_crowd, "beside other sessions"),
    ],
)
def test_every_way_to_differ_is_tried(
    is_other: Callable[[Sequence[SequenceInput]], bool], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(folder)
    right = runner.proof_rows
    differing: list[int] = []

    def proof_rows(step: Sequence[SequenceInput]) -> Tensor:
        rows = right(step)
        if is_other(step):
            differing.append(len(rows))
            rows = rows.clone()
            rows[-1, 0] = torch.nextafter(rows[-1, 0], torch.tensor(1e9))
        return rows

    monkeypatch.setattr(runner, "proof_rows", proof_rows)
    forget(monkeypatch)
    settle(runner, "0" * 16)
    assert differing
    assert (runner.exactness, runner.exactness_reason) == ("near ties", f"a row differs {words} on this machine")


@pytest.mark.parametrize(
    ("is_other", "words"), [(is_narrow_chain, "in a prefill of another width"), (is_tree, "in a tree")]
)
def test_keys_and_values_are_compared_as_well(
    is_other: Callable[[Sequence[SequenceInput]], bool], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer's show in no row but in those to come."""
    runner = load(folder)
    right = runner.proof_rows

    def proof_rows(step: Sequence[SequenceInput]) -> Tensor:
        rows = right(step)
        if is_other(step):
            row = step[0].base_length + step[0].num_tree_rows - 1
            runner.cache.values[-1][0, 0, row, 0] += 1e-3
        return rows

    monkeypatch.setattr(runner, "proof_rows", proof_rows)
    forget(monkeypatch)
    settle(runner, "0" * 16)
    assert (runner.exactness, runner.exactness_reason) == ("near ties", f"a row differs {words} on this machine")


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the proofs of before behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")


def test_a_gpu_is_said_to_have_near_ties() -> None:
    runner = SimpleNamespace(device=torch.device("cuda"), exactness="near ties", exactness_reason="", numerics="")
    settle(cast(Provable, runner), "0" * 16)
    assert runner.exactness == "near ties"
    assert runner.exactness_reason == "on a GPU the order of sums follows the number of rows"


def test_a_fingerprint_names_what_the_bits_follow_from(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {fingerprint(torch.float32), fingerprint(torch.bfloat16)}
    with monkeypatch.context() as patch:
        patch.setattr(processor, "description", lambda: "x86_64 GenuineIntel Xeon avx2 fma")
        seen.add(fingerprint(torch.float32))
        patch.setattr(processor, "description", lambda: "x86_64 GenuineIntel Xeon avx2 avx512f fma")
        seen.add(fingerprint(torch.float32))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        seen.add(fingerprint(torch.float32))
    variables = {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
        "DNNL_DEFAULT_FPMATH_MODE": "BF16",
        "MKL_CBWR": "COMPATIBLE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "default",
    }
    for name, value in variables.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            seen.add(fingerprint(torch.float32))
    assert len(seen) == 5 + len(variables)
    assert fingerprint(torch.float32) in seen
    assert all(len(digits) == 16 and int(digits, 16) >= 0 for digits in seen)
