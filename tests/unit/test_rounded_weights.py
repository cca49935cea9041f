"""Weights rounded to 8 and 4 bits: which are, how far off they are, what they take, and that rows keep their bits."""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specsplit.cli import doctor
from specsplit.core.errors import DeviceUnavailable
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends import int4_weights, int8_weights, packed_linear, rounded_weights
from specsplit.model.backends.int4_weights import int4_codes, int4_product
from specsplit.model.backends.int8_weights import int8_codes, int8_product
from specsplit.model.backends.product import Product
from specsplit.model.loader import LoadedModel, load_model
from specsplit.model.weight_format import (
    WEIGHT_FORMATS,
    WeightFormat,
    group_size,
    kernel_bytes,
    rounded_bytes,
    rounded_hash,
)
from specsplit.stages.planner import Workload, plan_even
from tests.support.known_configs import shape_of
from tests.support.model_zoo import FAMILIES, build_model, save_model
from tests.support.packs import require_bits, require_packs
from tests.support.torch_threads import threads

IDS = [5, 3, 9, 4, 11, 7, 2, 200, 31]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product_of(form: WeightFormat, weight: Tensor, bias: Tensor | None = None) -> Product:
    require_packs(form)
    return (int8_product if form == "int8" else int4_product)(weight, bias)


def rounded(form: WeightFormat, weight: Tensor) -> Tensor:
    """Return the weight that a format makes of `weight`, in fp32."""
    group = group_size(*weight.shape) if form == "int4" else None
    if group is None:
        codes, scales = int8_codes(weight)
        return codes * scales[:, None]
    codes, pairs = int4_codes(weight, group)
    scale, middle = (part.t().repeat_interleave(group, 1) for part in pairs.float().unbind(-1))
    return (codes.float() - 8) * scale + middle


@pytest.fixture
def torchs_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's own products compute, as on processors for which there is no kernel."""
    for module in (int4_weights, int8_weights, packed_linear):
        monkeypatch.setattr(module, "takes_codes", lambda: False)


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest) -> None:
    if request.param == "torch":
        request.getfixturevalue("torchs_way")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("form", "tolerance"), [("int8", 5e-4), ("int4", 2e-2)])
def test_a_product_is_that_with_the_rounded_weight(
    form: WeightFormat, tolerance: float, dtype: torch.dtype, has_bias: bool
) -> None:
    weight, bias = randn(48, 96, seed=1).to(dtype), randn(48, seed=2).to(dtype) if has_bias else None
    x = randn(2, 5, 96).to(dtype)
    truth = F.linear(x.double(), rounded(form, weight).double(), bias.double() if bias is not None else None)
    ours = product_of(form, weight, bias)(x)
    assert (ours.shape, ours.dtype) == (truth.shape, dtype)
    assert (ours - truth).abs().max() <= max(tolerance, 1e-2 * (dtype == torch.bfloat16)) * truth.abs().max()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("form", "num_outputs", "num_inputs"),
    [
        ("int8", 70, 1000),
        ("int8", 256, 256),
        ("int8", 16, 16),
        ("int8", 32, 5000),
        ("int4", 80, 1056),
        ("int4", 64, 64),
    ],
)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    form: WeightFormat, num_outputs: int, num_inputs: int, num_threads: int
) -> None:
    x, product = randn(600, num_inputs), product_of(form, randn(num_outputs, num_inputs, seed=1))
    x[3] *= 1e-20
    x[7] *= 1e20
    alone = torch.cat([product(row[None]) for row in x])
    counts = (*range(1, 20), 33, 64, 65, 128, 255, 256, 257, 511, 512, 513, 600)
    with threads(num_threads):
        for count in counts if num_threads == 1 else counts[:: len(counts) // 8]:
            assert torch.equal(product(x[-count:]), alone[-count:]), count


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_no_rows_give_no_rows_and_zeros_give_zeros(form: WeightFormat) -> None:
    product = product_of(form, randn(16, 64))
    assert product(torch.empty(1, 0, 64)).shape == (1, 0, 16)
    assert product(torch.zeros(2, 64)).eq(0).all()
    assert product_of(form, torch.zeros(16, 64))(randn(3, 64)).eq(0).all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_a_row_that_is_not_finite_stays_so_and_harms_no_other(form: WeightFormat, value: float) -> None:
    product, x = product_of(form, randn(16, 64)), randn(3, 64)
    truth = product(x)
    x[1, 5] = value
    ours = product(x)
    assert not ours[1].isfinite().any()
    assert torch.equal(ours[::2], truth[::2])


@pytest.mark.parametrize("seed", range(4))
def test_a_weight_is_off_by_half_a_step_at_most(seed: int) -> None:
    weight = randn(64, 128, seed=seed) * randn(64, 1, seed=seed + 9).exp()
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded("int8", weight) - weight).abs() <= step * 0.5001).all()
    # In 4 bits a group's largest values are cut by a twentieth, so that the others have finer steps.
    groups = weight.view(-1, 64)
    off = (rounded("int4", weight) - weight).view(-1, 64)
    step = groups.aminmax(dim=1)
    assert (off.abs().amax(1) <= (step.max - step.min) / 15).all()
    assert off.norm() <= 0.09 * groups.norm()


@pytest.mark.usefixtures("torchs_way")
def test_the_engine_that_others_pack_for_stays() -> None:
    before = torch.backends.quantized.engine
    product_of("int8", randn(16, 16))
    assert torch.backends.quantized.engine == before


class Halfway(TorchFunctionMode):
    """Holds its thread between the rounding and the packing of a weight."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self._wait = wait

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.__name__ == "_make_per_channel_quantized_tensor":
            self._wait()
        return made


@pytest.mark.usefixtures("torchs_way")
def test_a_thread_that_has_packed_leaves_the_engine_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    product_of("int8", randn(16, 16))
    if "onednn" not in torch.backends.quantized.supported_engines:
        pytest.skip("this machine has one engine")
    monkeypatch.setattr(torch.backends.quantized, "engine", "onednn")
    weight, first_is_inside, second_is_inside = randn(48, 96), Event(), Event()

    def packed(wait: Callable[[], object]) -> Product:
        with Halfway(wait):
            return int8_product(weight)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(packed, lambda: (first_is_inside.set(), second_is_inside.wait(30)))
        assert first_is_inside.wait(30)
        second = pool.submit(packed, lambda: (second_is_inside.set(), first.result(30)))
        products = [first.result(30), second.result(30)]
    rows = randn(2, 96)
    assert torch.equal(products[0](rows), products[1](rows))
    assert torch.backends.quantized.engine == "onednn"


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(str(folder), role="target", threads=1, **options)


def logits_of(loaded: LoadedModel) -> Tensor:
    return loaded.runner.forward([SequenceInput(0, 0, IDS, num_logits=len(IDS))])[0]


STAY = ("embed", "wte", "wpe", "mlp.gate.weight", "experts", "router")


def rounded_reference(config: Any, form: WeightFormat) -> Tensor:
    """Return logits of transformers' own model, whose weights are rounded as its names say."""
    model = build_model(config, seed=1)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(rounded("int8", head.weight.detach()))  # tied or not, the embedding stays
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and parameter is not head.weight and not any(part in name for part in STAY):
            is_input_major = isinstance(model.get_submodule(name.rpartition(".")[0]), tf.pytorch_utils.Conv1D)
            weight = parameter.data.t() if is_input_major else parameter.data
            made = rounded(form, weight.contiguous())
            parameter.data = made.t().contiguous() if is_input_major else made
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize(("form", "tolerance"), [("int8", 2e-3), ("int4", 5e-2)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3-moe"])
def test_a_model_computes_with_rounded_weights(
    family: str, form: WeightFormat, tolerance: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require_packs(form)
    config = FAMILIES[family]()
    loaded = load(save_model(tmp_path / "model", config, 1, with_tokenizer=False), dtype=form)
    require_bits(loaded.runner, form)
    assert loaded.runner.is_recorded
    assert loaded.runner.dtype == torch.float32
    truth, ours = rounded_reference(config, form), logits_of(loaded)
    off = (ours - truth).abs().amax(-1) / truth.abs().max()
    assert off.median() <= tolerance  # rounding sends a token with near-equal experts to another one
    bits = {kind.weight_bits for kind in loaded.runner.products}
    has_experts = family == "qwen3-moe"
    assert bits == {8 if form == "int8" else 4, 8} | ({32} if has_experts else set())
    words = f"38 % of the weights are experts, which stay in float32 with --dtype {form}"
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ([words] if has_experts else [])


def test_a_rounded_model_is_another_one(tmp_path: Path) -> None:
    require_packs("int8")
    folder = save_model(tmp_path / "model", FAMILIES["llama"](), 1, with_tokenizer=False)
    identities = [load(folder, dtype=dtype, record=False).identity for dtype in ("fp32", "int8")]
    plain, of_bytes = identities
    assert (plain.dtype, of_bytes.dtype) == ("fp32", "int8")
    assert of_bytes.weights_hash == rounded_hash(plain.weights_hash, "int8") != plain.weights_hash
    assert of_bytes.numerics == plain.numerics
    assert len({rounded_hash("abc", form) for form in (None, *WEIGHT_FORMATS)}) == 3
    assert rounded_hash("", "int8") == ""


WIDE: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 512,
    "intermediate_size": 1472,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_the_weights_take_what_the_plan_says(
    form: WeightFormat, is_tied: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The plan counts torch's layout; that of a kernel of our own, which is tried first, fills fewer inputs up."""
    require_packs(form)
    config = tf.LlamaConfig(**WIDE, tie_word_embeddings=is_tied)
    folder = save_model(tmp_path / "model", config, 1, with_tokenizer=False)
    plan = plan_even(shape_of(config.to_dict()), 1, Workload(dtype=form, compute_dtype="fp32"))
    assert 0.97 <= load(folder, dtype=form, record=False).weight_bytes / plan.stages[0].weight_bytes <= 1.005
    request.getfixturevalue("torchs_way")
    loaded = load(folder, dtype=form, record=False)
    assert loaded.weight_bytes == pytest.approx(plan.stages[0].weight_bytes, rel=0.01)
    assert loaded.weight_bytes < sum(parameter.numel() for parameter in build_model(config, 1).parameters()) * 2


class Mallinfo(ctypes.Structure):
    """The record of glibc's mallinfo2; `hblkhd` counts mapped blocks, `uordblks` those of arenas that are in use."""

    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]


def allocated() -> int:
    """Return the bytes that this process has from malloc; skip where the C library does not say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("the C library does not say what it gave out")
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return found.hblkhd + found.uordblks


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_a_packed_weight_takes_the_memory_that_is_counted(form: WeightFormat) -> None:
    # With AVX-512 FBGEMM fills the outputs up to a multiple of 48, which is not counted.
    count = kernel_bytes if int8_weights.takes_codes() else rounded_bytes
    weight = torch.ones(2064, 4096)
    product_of(form, weight)
    before = allocated()
    product = product_of(form, weight)
    assert allocated() - before == pytest.approx(count(form, *weight.shape), rel=0.01)
    assert product(weight[:1]).shape == (1, 2064)


def test_a_doctor_says_what_is_held_in_which_format(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    require_packs("int4")
    folder = save_model(tmp_path / "model", FAMILIES["qwen3-moe"](), 1)
    doctor.run({"target_model": str(folder), "dtype": "int4", "mode": "plain"})
    found = " ".join(capsys.readouterr().out.split())
    assert "int4 on cpu" in found
    assert re.search(r"weights 0\.00 GiB \([0-9.]+ KiB in int4, [0-9.]+ KiB in int8, [0-9.]+ KiB in float32\)", found)


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_a_machine_without_such_products_is_refused(
    form: WeightFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "model", FAMILIES["llama"](), 1, with_tokenizer=False)
    monkeypatch.setattr(rounded_weights, "has_int8_products", lambda: False)
    with pytest.raises(DeviceUnavailable, match=f"no products with {form} weights; use --dtype bf16 or fp32"):
        load(folder, dtype=form)


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_a_gpu_without_such_products_is_refused(form: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(
        DeviceUnavailable, match=f"cuda has no products with {form} weights: it has no bf16 on tensor cores. Leave"
    ):
        rounded_weights.require_rounded_products(form, torch.device("cuda"))


@pytest.mark.usefixtures("torchs_way")
def test_sums_that_saturate_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On some machine FBGEMM could add pairs of products in 16 bits that do not hold them."""
    require_packs("int8")
    int8_weights.has_int8_products.cache_clear()
    monkeypatch.setattr(int8_weights, "bound", lambda *values: lambda rows: rows @ torch.full((1040, 48), 100.0))
    assert not int8_weights.has_int8_products()
    int8_weights.has_int8_products.cache_clear()
