"""What cannot be loaded is refused by the right error and one clear sentence; no library's exception comes through."""

from __future__ import annotations

import builtins
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import transformers as tf
from huggingface_hub import errors as hub_errors
from safetensors.torch import load_file, save_file

from specsplit.core.errors import (
    DeviceUnavailable,
    InvalidRequest,
    ModelDamaged,
    ModelNotFound,
    ModelUnsupported,
    OutOfMemory,
    SpecSplitError,
)
from specsplit.model import memory
from specsplit.model.loader import LoadedModel, load_model
from specsplit.model.probe import check_against_eager, eager_logits
from specsplit.speculation.options import Speculation
from tests.support.model_zoo import FAMILIES, VOCAB, build_model, save_model
from tests.support.pipelines import PLAIN, request, run

TENSOR = "model.layers.1.mlp.up_proj.weight"
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "sound", FAMILIES["llama"](), seed=1)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy of a sound model, to be broken."""
    return shutil.copytree(sound, tmp_path / "broken")


def refusal(source: object, kind: type[SpecSplitError], words: str, **options: Any) -> str:
    """Check that loading fails with exactly `kind` and one sentence that holds `words`; return the sentence."""
    with pytest.raises(SpecSplitError) as raised:
        load_model(str(source), role="target", threads=1, **options)
    sentence = str(raised.value)
    assert type(raised.value) is kind, sentence
    assert words in sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")
    assert "Traceback" not in sentence
    assert len(sentence) < 400
    return sentence


def write(name: str, content: str | bytes) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def remove(*patterns: str) -> Change:
    return lambda folder: [path.unlink() for pattern in patterns for path in folder.glob(pattern)]


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def weights(alter: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        alter(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def header(**lies: Any) -> Change:
    """Change what the safetensors header says of one tensor; the bytes behind it stay."""

    def change(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        entries = json.loads(data[8 : 8 + length])
        entries[TENSOR].update(lies)
        said = json.dumps(entries).encode()
        said += b" " * (-len(said) % 8)
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(said)) + said + data[8 + length :])

    return change


def truncate(fraction: float) -> Change:
    def change(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: int(len(data) * fraction)])

    return change


def pickle_only(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def shard_missing(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {TENSOR: "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def encoder_decoder(folder: Path) -> None:
    tf.T5Config(vocab_size=VOCAB, d_model=16, d_ff=16, num_layers=1, num_heads=2).save_pretrained(folder)


def broken_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "elsewhere.safetensors")


DAMAGED: dict[str, tuple[Change, str]] = {
    "no weights": (remove("*.safetensors"), "holds no safetensors weights"),
    "pickled weights": (pickle_only, "holds only pickled weights (pytorch_model.bin)"),
    "truncated": (truncate(0.5), "truncated or damaged"),
    "truncated within the header": (truncate(0.01), "truncated or damaged"),
    "empty weights": (truncate(0), "truncated or damaged"),
    "no safetensors file": (write("model.safetensors", b"\xff" * 999), "truncated or damaged"),
    "larger shape than bytes": (header(shape=[480, 32]), "truncated or damaged"),
    "bytes beyond the file": (header(data_offsets=[0, 1 << 40]), "truncated or damaged"),
    "unknown dtype": (header(dtype="F999"), "truncated or damaged"),
    "transposed shape": (header(shape=[32, 48]), f"{TENSOR} is [32, 48], not [48, 32]"),
    "missing tensor": (
        weights(lambda tensors: tensors.pop(TENSOR)),
        f"lacks weights that its config asks for, the first being {TENSOR}",
    ),
    "tensor of another size": (weights(lambda t: t.update({TENSOR: torch.zeros(50, 32)})), "[50, 32], not [48, 32]"),
    "missing shard": (shard_missing, "model-00002-of-00002.safetensors"),
    "broken link": (broken_link, "cannot be read"),
    "more layers than weights": (config(num_hidden_layers=5), "lacks weights"),
    "larger vocabulary than weights": (config(vocab_size=400), "[320, 32], not [400, 32]"),
    "NaN weights": (weights(lambda tensors: tensors[TENSOR].fill_(float("nan"))), "NaN or infinite logits"),
    "infinite weights": (weights(lambda tensors: tensors[TENSOR].fill_(float("inf"))), "NaN or infinite logits"),
    "config no JSON": (write("config.json", "{not json"), "not a valid JSON file"),
    "config empty": (write("config.json", ""), "not a valid JSON file"),
    "config binary": (write("config.json", b"\xff\xfe\x00"), "not a valid JSON file"),
    "config of wrong types": (config(hidden_size="wide"), "config.json of"),
    "config that contradicts itself": (config(num_attention_heads=3), "contradicts itself"),
    "generation config no JSON": (write("generation_config.json", "{"), "generation_config.json of"),
    "end of sequence no id": (write("generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id"),
    "tokenizer no JSON": (write("tokenizer.json", "{"), "tokenizer of"),
    "tokenizer without a model": (write("tokenizer.json", '{"added_tokens": []}'), "tokenizer of"),
    "tokenizer empty": (write("tokenizer.json", ""), "tokenizer of"),
    "tokenizer of another shape": (write("tokenizer.json", "[]"), "tokenizer of"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(case: str, folder: Path) -> None:
    change, words = DAMAGED[case]
    change(folder)
    assert str(folder) in refusal(folder, ModelDamaged, words)


UNSUPPORTED: dict[str, tuple[Change, str]] = {
    "unknown model type": (config(model_type="martian"), "model type `martian`"),
    "no model type": (write("config.json", "{}"), "Should have a `model_type`"),
    "config a list": (write("config.json", "[]"), "Should have a `model_type`"),
    "encoder-decoder": (encoder_decoder, "t5 models are encoder-decoders"),
    "no layers": (config(num_hidden_layers=0), "0 of 0 layers"),
    "no heads": (config(num_attention_heads=0), "cannot be loaded as a decoder-only language model (integer modulo"),
    "padding beyond the vocabulary": (config(pad_token_id=VOCAB), "(Padding_idx must be within num_embeddings)"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_cannot_run_here_is_refused_with_the_reason(case: str, folder: Path) -> None:
    change, words = UNSUPPORTED[case]
    change(folder)
    refusal(folder, ModelUnsupported, words)


REMOTE_CODE = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_code_from_a_repository_is_neither_run_nor_asked_about(
    part: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = tmp_path / "it ran"
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(witness)!r}).touch()\n")
    if part == "model":
        config(model_type="evil", auto_map=REMOTE_CODE)(folder)
    else:
        said = json.loads((folder / "tokenizer_config.json").read_text())
        said |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(said))
    questions: list[object] = []
    monkeypatch.setattr(builtins, "input", lambda *prompt: questions.append(prompt) or "y")
    refusal(folder, ModelUnsupported, "code from its repository, which is never run here")
    assert not questions
    assert not witness.exists()


def test_a_known_architecture_ignores_its_auto_map(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    config(auto_map=REMOTE_CODE)(folder)
    assert type(load_model(str(folder), role="target", threads=1).runner.model) is tf.LlamaForCausalLM


def test_a_folder_that_is_missing_or_no_model_is_said_to_be_so(folder: Path, tmp_path: Path) -> None:
    refusal(tmp_path / "nowhere", ModelNotFound, "There is no model folder at")
    refusal("./nowhere", ModelNotFound, "There is no model folder at ./nowhere")
    refusal(folder / "config.json", ModelNotFound, "There is no model folder at")
    (folder / "config.json").unlink()
    refusal(folder, ModelNotFound, "holds no config.json")


def test_a_hub_id_that_is_not_cached_offline_says_what_to_do() -> None:
    refusal("nobody-here/no-such-model", ModelNotFound, "not cached here and the model hub cannot be reached")
    refusal("no-such-model", ModelNotFound, "pass a local folder, or go online")
    refusal("no such model!", ModelNotFound, "neither a model folder nor a valid hub id")


def hub_error(kind: type[Exception]) -> Exception:
    """Return the hub's real exception, made without its HTTP library's response."""
    error = kind.__new__(kind)
    Exception.__init__(error, "the hub said no")
    return error


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (hub_errors.GatedRepoError, "is gated: accept its terms on the hub and log in"),
        (hub_errors.RepositoryNotFoundError, "There is no model somebody/a-model on the hub"),
        (hub_errors.RemoteEntryNotFoundError, "takes a config.json and safetensors weights"),
        (hub_errors.HfHubHTTPError, "the model hub cannot be reached"),
        (hub_errors.LocalEntryNotFoundError, "the model hub cannot be reached"),
        (hub_errors.OfflineModeIsEnabled, "the model hub cannot be reached"),
        (ConnectionError, "the model hub cannot be reached"),
    ],
)
def test_what_the_hub_answers_is_translated(kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **keywords: object) -> NoReturn:
        raise hub_error(kind)

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", download)
    refusal("somebody/a-model", ModelNotFound, words)


@pytest.fixture
def cached(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of somebody/a-model in the hub's cache, of which this process is told."""
    repository = tmp_path / "hub" / "models--somebody--a-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return shutil.copytree(folder, repository / "snapshots" / ("0" * 40))


def test_a_cached_hub_model_needs_no_hub(cached: Path) -> None:
    loaded = load_model("somebody/a-model", role="target", threads=1)
    assert (loaded.name, loaded.eos_ids) == ("somebody/a-model", (1,))
    assert loaded.tokenizer is not None


def test_what_is_wrong_with_a_hub_model_is_not_put_down_to_the_hub(cached: Path) -> None:
    write("generation_config.json", "{")(cached)
    refusal("somebody/a-model", ModelDamaged, "The generation_config.json of somebody/a-model cannot be read")
    remove("model.safetensors")(cached)
    refusal("somebody/a-model", ModelNotFound, "lacks files, on the hub or in its cache")
    config(model_type="martian")(cached)
    refusal("somebody/a-model", ModelUnsupported, "model type `martian`")
    write("config.json", "{")(cached)
    refusal("somebody/a-model", ModelDamaged, "The files of somebody/a-model cannot be read")


def test_a_device_that_is_not_here_is_named(sound: Path) -> None:
    if not torch.cuda.is_available():
        refusal(sound, DeviceUnavailable, "No CUDA device is available here; use --device cpu", device="cuda")
        refusal(sound, DeviceUnavailable, "No CUDA device is available here; use --device cpu", device="cuda:1")
    else:
        refusal(sound, DeviceUnavailable, "There is no device cuda:99 here, only cuda:0 to", device="cuda:99")
    refusal(sound, InvalidRequest, "device must be cpu, cuda or cuda:N, not tpu", device="tpu")


def test_an_unknown_dtype_is_refused_with_the_known_ones(sound: Path) -> None:
    refusal(sound, InvalidRequest, "dtype must be one of fp32, bf16, fp16, int8, int4, not fp8", dtype="fp8")


@pytest.mark.parametrize("context", [0, 1, -5])
def test_a_context_without_room_is_refused(sound: Path, context: int) -> None:
    refusal(sound, InvalidRequest, f"context must be at least 2 tokens, not {context}", context=context)


def test_a_context_longer_than_the_model_was_made_for_is_refused(sound: Path) -> None:
    refusal(sound, InvalidRequest, "contexts of up to 256 tokens, so --context 257 is too long", context=257)
    assert load_model(str(sound), role="target", threads=1, context=256).context == 256
    assert load_model(str(sound), role="target", threads=1, context=2).context == 2


def test_a_kv_cache_that_does_not_fit_names_a_context_that_does(folder: Path) -> None:
    huge = 1 << 40
    config(max_position_embeddings=huge)(folder)
    sentence = refusal(folder, OutOfMemory, "GiB for its KV cache", context=huge)
    found = re.search(r"--context (\d+) fits", sentence)
    assert found is not None
    fitting = int(found[1])
    per_token = load_model(str(folder), role="target", threads=1, context=2).kv_bytes_per_token
    cpu = torch.device("cpu")
    memory.require_kv(per_token, fitting // 2, 128, 1, cpu)  # free memory moves while the tests run
    with pytest.raises(OutOfMemory, match="for 2 sessions"):
        memory.require_kv(per_token, fitting * 2, 128, 2, cpu)


def test_where_no_context_fits_the_remedy_is_a_smaller_model() -> None:
    with pytest.raises(OutOfMemory, match=r"free; use a smaller model\.$"):
        memory.require_kv(1 << 50, 100, 128, 1, torch.device("cpu"))


def test_a_model_without_a_tokenizer_is_loaded_and_says_so(folder: Path) -> None:
    remove("tokenizer*")(folder)
    loaded = load_model(str(folder), role="target", threads=1)
    assert loaded.tokenizer is None
    assert loaded.eos_ids == (1,)
    assert loaded.identity.vocab_hash == f"no-tokenizer-{VOCAB}"


@pytest.mark.parametrize(("target_size", "draft_size"), [(VOCAB, VOCAB + 64), (VOCAB + 64, VOCAB)])
def test_vocabularies_padded_to_different_sizes_work_together(
    target_size: int, draft_size: int, tmp_path: Path
) -> None:
    """One tokenizer of 258 tokens, and embeddings that are larger than it by different amounts."""
    loaded: list[LoadedModel] = []
    for role, family, size in (("target", "llama", target_size), ("draft", "qwen3", draft_size)):
        shape = FAMILIES[family]()
        shape.vocab_size = size
        saved = save_model(tmp_path / role, shape, seed=1)
        loaded.append(load_model(str(saved), role=role, threads=1))  # type: ignore[arg-type]
    target, draft = loaded
    assert target.identity.vocab_hash == draft.identity.vocab_hash
    chain = Speculation(mode="pingpong", lookup=False, nodes=9, depth=3, branching=3)
    for temperature in (0.0, 1.5):
        requests = [request([5, 9, seed], seed=seed, tokens=40, temperature=temperature) for seed in range(3, 9)]
        texts = [
            [result.token_ids for result in results]
            for results in (run(target, None, PLAIN, requests), run(target, draft, chain, requests))
        ]
        assert texts[0] == texts[1], temperature


def test_a_vocabulary_padded_beyond_the_tokenizer_works(tmp_path: Path) -> None:
    loaded: list[LoadedModel] = []
    for role, family in (("target", "llama"), ("draft", "qwen3")):
        saved = save_model(tmp_path / role, FAMILIES[family](), seed=1)
        loaded.append(load_model(str(saved), role=role, threads=1))  # type: ignore[arg-type]
    target, draft = loaded
    assert target.tokenizer is not None
    assert target.tokenizer.num_tokens < target.vocab_size == draft.vocab_size == VOCAB
    tree = Speculation(mode="pingpong", lookup=False, nodes=9, depth=3, branching=3)
    for temperature in (0.0, 1.5):
        requests = [request([5, 9, seed], seed=seed, tokens=40, temperature=temperature) for seed in range(3, 9)]
        truth, results = run(target, None, PLAIN, requests), run(target, draft, tree, requests)
        assert [result.token_ids for result in results] == [result.token_ids for result in truth], temperature
        assert max(max(result.token_ids) for result in truth) >= target.tokenizer.num_tokens, temperature


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "qwen3-moe", "opt"])
def test_half_precision_is_held_against_transformers_in_half_precision(family: str, dtype: str, tmp_path: Path) -> None:
    """Its rounding is thousands of times that of fp32: it must not be taken for another attention."""
    saved = save_model(tmp_path / family, FAMILIES[family](), seed=1, with_tokenizer=False)
    loaded = load_model(str(saved), role="target", threads=1, dtype=dtype)
    assert loaded.dtype == dtype
    assert loaded.runner.cache.keys[0].dtype == loaded.runner.dtype != torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mistral-window", "gemma3", "gpt-oss"])
def test_a_lost_window_is_noticed_in_any_precision(family: str, dtype: torch.dtype) -> None:
    config, plain = FAMILIES[family](), FAMILIES[family]()
    plain.sliding_window = 10_000
    token_ids = list(range(3, 27))
    ours, truth = (eager_logits(build_model(c, 1).to(dtype), token_ids) for c in (plain, config))
    check_against_eager(truth.float(), truth, family)
    with pytest.raises(ModelUnsupported, match="other logits with SpecSplit's attention"):
        check_against_eager(ours.float(), truth, family)
