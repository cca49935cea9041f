"""A process without the model gets its tokenizer from a worker; hashes tell other files apart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, GenerationConfig, LlamaConfig
from transformers.integrations.mistral import tokenizer as mistral
from transformers.models.auto import tokenization_auto

from specsplit.core.errors import InvalidRequest, ModelDamaged, ResourceError
from specsplit.core.ports import ChatMessage
from specsplit.core.types import TokenizerFiles
from specsplit.model import identity, tokenizer_cache
from specsplit.model.files import load_tokenizer
from specsplit.model.identity import files_hash, read_tokenizer_files, weights_hash
from specsplit.model.loader import load_model
from specsplit.model.sent_tokenizer import tokenizer_from_files
from specsplit.model.source import model_folder
from specsplit.model.tokenizer_cache import held_tokenizer_hash
from specsplit.target.engine import TargetEngine
from tests.support.model_zoo import FAMILIES, byte_tokenizer, save_model

TEXT = "Hello, wörld 🙂\n<|endoftext|> x"
HI: list[ChatMessage] = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved = save_model(tmp_path / "model", FAMILIES["llama"](), seed=1)
    (saved / "chat_template.jinja").write_text(TEMPLATE)
    (saved / "additional_chat_templates").mkdir()
    (saved / "additional_chat_templates" / "rag.jinja").write_text("rag {{ messages[0].content }}")
    (saved / "secret.txt").write_text("not the tokenizer's")
    return saved


async def files_of(source: str, known_hash: str = "") -> TokenizerFiles:
    engine = TargetEngine(load_model(source, role="target", threads=1, record=False))
    try:
        files = await engine.tokenizer_files(known_hash)
        assert files.hash == (await engine.ping()).tokenizer_hash
        return files
    finally:
        await engine.aclose()


async def test_the_files_make_the_same_tokenizer_elsewhere(folder: Path, tmp_path: Path) -> None:
    files, own = await files_of(str(folder)), load_model(str(folder), role="target", threads=1, record=False).tokenizer
    assert own is not None
    assert set(files.files) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_template.rag.jinja",
    }
    made = tokenizer_from_files(files, tmp_path / "cache" / files.hash)
    assert (made.vocab_hash, made.eos_ids, made.num_tokens) == (own.vocab_hash, own.eos_ids, own.num_tokens)
    assert made.encode(TEXT) == own.encode(TEXT)
    assert made.decode(made.encode(TEXT)) == own.decode(own.encode(TEXT))
    assert made.encode_messages(HI) == own.encode_messages(HI)
    assert own.decode(made.encode_messages(HI)) == "<user>hi"
    assert made.is_for_chat
    kept = tmp_path / "cache" / files.hash / "additional_chat_templates" / "rag.jinja"
    assert kept.read_text().startswith("rag")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [files.hash]


def test_a_chat_without_a_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    shutil.rmtree(folder / "additional_chat_templates")
    tokenizer = load_model(str(folder), role="target", threads=1, record=False).tokenizer
    assert tokenizer is not None
    assert not tokenizer.is_for_chat
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.encode_messages(HI)


async def test_known_files_are_not_sent_again(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert held_tokenizer_hash(cache) == ""
    files = await files_of(str(folder))
    made = tokenizer_from_files(files, cache)
    assert held_tokenizer_hash(cache) == files.hash
    again = await files_of(str(folder), known_hash=files.hash)
    assert (again.hash, again.eos_ids, dict(again.files)) == (files.hash, files.eos_ids, {})
    assert tokenizer_from_files(again, cache).vocab_hash == made.vocab_hash
    with pytest.raises(ModelDamaged, match="does not hold the tokenizer files of hash"):
        tokenizer_from_files(again, tmp_path / "elsewhere")
    assert (await files_of(str(folder), known_hash="another")).files == files.files


async def test_the_embedded_pair_sends_its_tokenizer(tmp_path: Path) -> None:
    files = await files_of("embedded")
    own = load_model("embedded", role="draft", threads=1, record=False).tokenizer
    assert own is not None
    assert tokenizer_from_files(files, tmp_path / "t").vocab_hash == own.vocab_hash


def test_a_hub_model_sends_the_files_of_its_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache's snapshot holds links to blobs beside it."""
    cached = tmp_path / "hub" / "models--some--model"
    snapshot = cached / "snapshots" / ("a" * 40)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        blob, link = cached / "blobs" / path.name, snapshot / path.relative_to(folder)
        for parent in (blob.parent, link.parent):
            parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cached.parent))
    assert model_folder("some/model") == snapshot
    assert model_folder("some/other") is None
    loaded = load_model(str(snapshot), role="target", threads=1, record=False)
    assert loaded.tokenizer_files is not None
    assert loaded.tokenizer_files.files == read_tokenizer_files(folder, "it")
    assert weights_hash(snapshot) == weights_hash(folder)


async def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    saved = save_model(tmp_path / "bare", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    with pytest.raises(ModelDamaged, match=r"has no tokenizer files; add its tokenizer\.json"):
        await files_of(str(saved))


@pytest.mark.parametrize("outer", [{"eos_token_id": [1, 106]}, {}])
def test_the_ends_of_a_multimodal_config_are_those_of_transformers(outer: dict[str, list[int]], tmp_path: Path) -> None:
    config = Gemma3Config(text_config={"eos_token_id": [7]}, **outer)
    ends = outer.get("eos_token_id", [7])
    assert GenerationConfig.from_model_config(config).eos_token_id == ends
    assert load_tokenizer(str(tmp_path), "it", config) == (None, tuple(ends))


@pytest.mark.parametrize(("said", "ends"), [(-1, ()), ([7, -1], (7,)), (0, (0,))])
def test_an_end_below_zero_is_no_token_and_is_left_out(said: object, ends: tuple[int, ...], tmp_path: Path) -> None:
    """Some configs say -1 for none, and no message between workers carries it."""
    assert load_tokenizer(str(tmp_path), "it", LlamaConfig(eos_token_id=said)) == (None, ends)


def test_a_tokenizer_json_counts_beside_mistral_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What transformers itself finds of the package, at import and for each folder.
    monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING_NAMES, "mistral", "MistralCommonBackend")
    monkeypatch.setattr(mistral, "is_mistral_common_available", lambda: True)
    config, expected = FAMILIES["mistral"](), byte_tokenizer()
    for part in (config, expected):
        part.save_pretrained(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    read, _ = load_tokenizer(str(tmp_path), "it", config)
    assert read is not None
    assert read.encode(TEXT) == expected.encode(TEXT)
    files = read_tokenizer_files(tmp_path, "it")
    sent = tokenizer_from_files(TokenizerFiles(files_hash(files), (), files), tmp_path / "sent")
    assert sent.encode(TEXT) == expected.encode(TEXT)
    sent.close()


def test_files_beyond_the_limit_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = read_tokenizer_files(folder, "it")
    size = sum(map(len, files.values()))
    monkeypatch.setattr(identity, "MAX_TOKENIZER_BYTES", size)
    assert read_tokenizer_files(folder, "it") == files
    monkeypatch.setattr(identity, "MAX_TOKENIZER_BYTES", size - 1)
    with pytest.raises(ModelDamaged, match="The tokenizer files of it exceed"):
        read_tokenizer_files(folder, "it")
    monkeypatch.setattr(tokenizer_cache, "MAX_TOKENIZER_BYTES", size - 1)
    with pytest.raises(ModelDamaged, match="that the target sent exceeds"):
        tokenizer_from_files(TokenizerFiles(files_hash(files), (), files), tmp_path / "t")


@pytest.mark.parametrize(
    "name",
    [
        "../x.json",
        "/etc/x.json",
        "a/b.json",
        "a\\b.json",
        "",
        ".",
        "..",
        ".hidden",
        "a\0b",
        "C:x",
        "additional_chat_template.../x",
    ],
)
def test_a_name_that_could_lead_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    files = {"tokenizer.json": b"{}", name: b"evil"}
    with pytest.raises(ModelDamaged, match="A tokenizer file cannot be called"):
        tokenizer_from_files(TokenizerFiles(files_hash(files), (), files), tmp_path / "sub" / "t")
    assert list(tmp_path.rglob("*")) == []


async def test_files_that_are_not_those_of_the_hash_are_refused(folder: Path, tmp_path: Path) -> None:
    files = await files_of(str(folder))
    cut = replace(files, files={**files.files, "tokenizer.json": files.files["tokenizer.json"][:-1]})
    with pytest.raises(ModelDamaged, match="is not the one that its hash names"):
        tokenizer_from_files(cut, tmp_path / "t")
    assert not (tmp_path / "t").exists()


NEEDS_CODE = {
    "config.json": b'{"model_type": "no-such-model", "auto_map": {"AutoTokenizer": "evil.Evil"}}',
    "tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}',
    "tokenizer.json": b"",
    "evil.py": b"1 / 0",
}


@pytest.mark.parametrize("change", [{"tokenizer.json": b"{not json"}, NEEDS_CODE], ids=["not-json", "needs-code"])
async def test_a_tokenizer_that_cannot_be_read_is_one_sentence(
    change: dict[str, bytes], folder: Path, tmp_path: Path
) -> None:
    files = {**(await files_of(str(folder))).files, **change}
    with pytest.raises(ModelDamaged, match="The tokenizer that the target sent cannot be read"):
        tokenizer_from_files(TokenizerFiles(files_hash(files), (), files), tmp_path / "t")


async def test_another_tokenizer_in_the_folder_is_replaced_whole(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    tokenizer_from_files(await files_of("embedded"), cache)
    (cache / "vocab.json").write_text("left over")
    files = await files_of(str(folder))
    tokenizer_from_files(files, cache)
    assert held_tokenizer_hash(cache) == files.hash
    assert not (cache / "vocab.json").exists()


async def test_a_place_that_cannot_be_written_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResourceError, match="cannot be written to"):
        tokenizer_from_files(await files_of(str(folder)), tmp_path / "file" / "t")


async def test_a_process_without_torch_makes_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    files = await files_of(str(folder))
    sent = tmp_path / "sent"
    sent.mkdir()
    for name, content in files.files.items():
        (sent / name).write_bytes(content)
    program = """
import sys
sys.modules["torch"] = None  # as if it were not installed
from pathlib import Path
from specsplit.core.types import TokenizerFiles
from specsplit.model.sent_tokenizer import tokenizer_from_files
HI = [{"role": "user", "content": "hi"}]
sent, folder, hash_, text = sys.argv[1:]
files = TokenizerFiles(hash_, (1,), {path.name: path.read_bytes() for path in Path(sent).iterdir()})
made = tokenizer_from_files(files, Path(folder))
assert sys.modules["torch"] is None
print(made.vocab_hash, made.eos_ids, made.encode(text), made.encode_messages(HI), made.decode(made.encode(text)) != "")
"""
    run = subprocess.run(  # noqa: ASYNC221 - nothing else runs on this loop
        [sys.executable, "-c", program, str(sent), str(tmp_path / "t"), files.hash, TEXT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    own = load_model(str(folder), role="target", threads=1, record=False).tokenizer
    assert own is not None
    assert run.returncode == 0, run.stderr
    assert (
        run.stdout.split("\n")[0] == f"{own.vocab_hash} {own.eos_ids} {own.encode(TEXT)} {own.encode_messages(HI)} True"
    )


def shards(folder: Path) -> Path:
    """Cut the weights into two files with an index, and leave a third beside them that nobody loads."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for part, kept in enumerate((names[::2], names[1::2]), 1):
        name = f"model-0000{part}-of-00002.safetensors"
        save_file({key: tensors[key] for key in kept}, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(kept, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    return folder


def flip(position: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[position] ^= 1
        (folder / "model.safetensors").write_bytes(data)

    return change


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}.x" if "embed" in name else name: tensor for name, tensor in tensors.items()}


def reshaped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.T.reshape(tensor.T.shape) if "embed" in name else tensor for name, tensor in tensors.items()}


def swapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Exchange the contents of two tensors of one shape: every byte of the file is still there."""
    one, other = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    return {**tensors, one: tensors[other], other: tensors[one]}


def trained(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Change one tensor of many a little."""
    name = "model.layers.1.self_attn.v_proj.weight"
    return {**tensors, name: tensors[name] + 1e-4}


@pytest.mark.parametrize("change", [renamed, reshaped, swapped, trained], ids=lambda change: change.__name__)
def test_other_weights_have_another_hash(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], folder: Path
) -> None:
    weights = folder / "model.safetensors"
    before, tensors = weights_hash(folder), load_file(weights)
    assert load_model(str(folder), role="target", threads=1, record=False).identity.weights_hash == before
    assert len(before) == 16
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, weights)
    assert weights_hash(folder) != before


@pytest.mark.parametrize("change", [flip(9), flip(-1), flip(0)], ids=["header", "last", "length"])
def test_damaged_weights_have_another_hash(change: Callable[[Path], None], folder: Path) -> None:
    before = weights_hash(folder)
    change(folder)
    assert weights_hash(folder) != before


def test_the_same_weights_saved_otherwise_have_the_same_hash(folder: Path, tmp_path: Path) -> None:
    before, tensors = weights_hash(folder), load_file(folder / "model.safetensors")
    save_file(dict(reversed(tensors.items())), folder / "model.safetensors", metadata={"format": "pt", "by": "another"})
    assert weights_hash(folder) == before
    assert weights_hash(shutil.copytree(folder, tmp_path / "copy")) == before


def test_the_weights_of_an_index_are_those_that_are_loaded(folder: Path) -> None:
    whole = weights_hash(folder)
    shards(folder)
    cut = weights_hash(folder)
    assert cut == whole
    assert load_model(str(folder), role="target", threads=1, record=False).identity.weights_hash == cut
    (folder / "consolidated.safetensors").unlink()
    assert weights_hash(folder) == cut
    path = folder / "model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert weights_hash(folder) != cut


def test_of_large_weights_only_samples_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "large"
    saved.mkdir()
    tensors = {f"t{i}": torch.full((1 << 20,), float(i)) for i in range(4)}
    save_file(tensors, saved / "model.safetensors")
    read: list[int] = []
    pread = os.pread

    def counted(*args: int) -> bytes:
        read.append(len(data := pread(*args)))
        return data

    monkeypatch.setattr(os, "pread", counted)
    before = weights_hash(saved)
    assert 4 * 3 * 32 < sum(read) < 2_000
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + 1}, saved / "model.safetensors")
        assert weights_hash(saved) != before
