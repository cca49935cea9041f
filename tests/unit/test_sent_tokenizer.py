"""A tokenizer of a hostile target costs a sentence each time, within limits, and nothing else."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from specsplit.core.errors import DeadlineExceeded, InvalidRequest, ModelDamaged, ResourceError
from specsplit.core.ports import ChatMessage
from specsplit.core.types import Identity, TokenizerFiles
from specsplit.gateway.deadline import Deadline
from specsplit.gateway.models import ServedModel
from specsplit.model import sent_tokenizer
from specsplit.model.files import load_tokenizer, tokenizer_files
from specsplit.model.identity import files_hash
from specsplit.model.limited_process import LimitedProcess
from specsplit.model.sent_tokenizer import SentTokenizer, tokenizer_from_files
from specsplit.model.tokenizer_cache import shrink_cache
from tests.support.model_zoo import FAMILIES, byte_tokenizer, save_model

HI: list[ChatMessage] = [{"role": "user", "content": "hi"}]
HANG: list[ChatMessage] = [{"role": "user", "content": "hang"}]
ENDLESS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if messages[0].content == 'hang' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
)


def sent(folder: Path, template: str | None = None, **changes: Any) -> TokenizerFiles:
    """Return the files of a tokenizer whose tokenizer.json is changed."""
    made = byte_tokenizer()
    if template is not None:
        made.chat_template = template
    made.save_pretrained(folder)
    place = folder / "tokenizer.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **changes}))
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return TokenizerFiles(files_hash(files), (), files)


@contextmanager
def opened(
    tmp_path: Path, limit_s: float = 5.0, template: str | None = None, **changes: Any
) -> Generator[SentTokenizer]:
    made = tokenizer_from_files(sent(tmp_path / "sent", template, **changes), tmp_path / "kept", limit_s)
    try:
        yield made
    finally:
        made.close()


def test_a_template_without_an_end_is_one_sentence_and_the_next_works(tmp_path: Path) -> None:
    with opened(tmp_path, 0.5, ENDLESS) as tokenizer:
        expected = tokenizer.encode_messages(HI)
        with pytest.raises(ModelDamaged, match=r"cannot be used on these messages: it took longer than 0\.5 s\.$"):
            tokenizer.encode_messages([{"role": "user", "content": "hang"}])
        assert tokenizer.encode_messages(HI) == expected


def test_a_text_of_eight_gigabytes_is_one_sentence(tmp_path: Path) -> None:
    template = "{% set n = messages[0].content | length * 4000000000 %}{{ 'x' * n }}"
    with (
        opened(tmp_path, template=template) as tokenizer,
        pytest.raises(ModelDamaged, match=r"messages: it needed too much memory\.$"),
    ):
        tokenizer.encode_messages(HI)


def test_a_text_that_is_too_long_is_one_sentence(tmp_path: Path) -> None:
    template = "{{ 'x' * 20000000 }}"
    with opened(tmp_path, template=template) as tokenizer, pytest.raises(ModelDamaged, match="its text is too long"):
        tokenizer.encode_messages(HI)


def test_words_of_a_template_move_no_cursor(tmp_path: Path) -> None:
    template = "{{ raise_exception('\x1b[2Jall is well\n\u202egnp.exe') }}"
    with (
        opened(tmp_path, template=template) as tokenizer,
        pytest.raises(InvalidRequest, match=r"refuses these messages \(\[2Jall is well gnp\.exe\)\.$"),
    ):
        tokenizer.encode_messages(HI)


def test_a_panic_is_one_sentence(tmp_path: Path) -> None:
    splits = {"type": "Split", "pattern": {"Regex": "(a+)+b|(?=x)"}, "behavior": "Isolated", "invert": False}
    with opened(tmp_path, pre_tokenizer=splits) as tokenizer:
        assert tokenizer.encode("b")
        with pytest.raises(ModelDamaged, match=r"^The target's tokenizer fails on this text: .*retry-limit.*\.$"):
            tokenizer.encode("a" * 28 + "c")
        assert tokenizer.encode("b")


def test_a_tokenizer_that_takes_too_long_to_read_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, ids = _children(), {f"word {number}": number for number in range(300_000)}
    words = {"type": "WordLevel", "vocab": ids, "unk_token": "word 0"}
    monkeypatch.setattr(sent_tokenizer, "TOKENIZER_LOAD_S", 1e-3)
    reason = r"^The tokenizer that the target sent cannot be read \(it took longer than 0\.00\d+ s\)\.$"
    with pytest.raises(ModelDamaged, match=reason), opened(tmp_path, model=words):
        pass
    assert _children() == before


def test_a_normalizer_that_doubles_without_end_is_one_sentence(tmp_path: Path) -> None:
    doubling = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    normalizer = {"type": "Sequence", "normalizers": [doubling] * 40}
    with opened(tmp_path, 1.0, normalizer=normalizer) as tokenizer:
        with pytest.raises(ModelDamaged, match=r"it took longer than|it needed too much memory"):
            tokenizer.encode("a")
        assert tokenizer.encode("b")


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": "x"},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}]},
    ],
)
def test_a_decoder_that_could_take_for_ever_is_refused(decoder: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelDamaged, match="its decoder replaces texts"), opened(tmp_path, decoder=decoder):
        pass


def test_sections_that_cut_prompts_are_dropped_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    text = "a text of more than three tokens"
    with caplog.at_level(logging.WARNING), opened(tmp_path, truncation=cut, padding={**pad, "pad_token": "x"}) as made:
        assert made.encode(text) == byte_tokenizer().encode(text)
    assert [record.args for record in caplog.records] == [("truncation",), ("padding",)]


async def test_the_event_loop_goes_on_and_a_request_has_its_own_limit(tmp_path: Path) -> None:
    with opened(tmp_path, 1.0, ENDLESS) as tokenizer:
        model = ServedModel("x", _IDENTITY, tokenizer, None, lambda mode: None)  # type: ignore[arg-type]
        await model.warm()
        with pytest.raises(DeadlineExceeded, match=r"within its 0\.01 s"):
            await model.encode_messages([{"role": "user", "content": "hang"}], Deadline.from_now(0.01))
        waiting = asyncio.create_task(model.encode_messages(HI))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await waiting


_IDENTITY = Identity("target", "x", vocab_size=300, vocab_hash="", context=64, max_nodes=8)


def test_a_process_that_somebody_killed_is_started_again() -> None:
    process = LimitedProcess()
    before = _children()
    hello = {"call": "render", "messages": HI, "template": {"chat_template": "{{ messages[0].content }}"}}
    assert process.call(hello) == "hi"
    (started,) = _children() - before
    os.kill(started, signal.SIGKILL)
    os.waitid(os.P_PID, started, os.WEXITED | os.WNOWAIT)
    assert process.call(hello) == "hi"
    process.close()
    assert _children() == before


def test_the_process_has_one_thread_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread of numpy's would take address space, and a machine of many processors would be over the limit."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "64")
    process, before = LimitedProcess(), _children()
    hello = {"call": "render", "messages": HI, "template": {"chat_template": "{{ messages[0].content }}"}}
    assert process.call(hello) == "hi"
    (started,) = _children() - before
    assert len(list(Path(f"/proc/{started}/task").iterdir())) == 1
    process.close()


def test_waiting_for_a_processor_is_no_fault_of_the_text() -> None:
    """Everything else on the machine may take the processor while the call has not used up its own time."""
    program = (
        "import time\n"
        "from specsplit.model.tokenizer_process import Work, answer_to\n"
        "class Waiting(Work):\n"
        "    def wait(self): time.sleep(0.2)\n"
        "print(answer_to(Waiting(), {'call': 'wait'}, 0.05))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "{'result': None}\n")


def test_a_long_text_may_take_longer(tmp_path: Path) -> None:
    text = "a" * (1 << 20)  # takes some tenths of a second
    with opened(tmp_path, 1e-6) as tokenizer:
        assert len(tokenizer.encode(text)) > 1 << 10


@pytest.mark.parametrize("is_started", [False, True], ids=["starting", "computing"])
def test_closing_ends_the_call_under_way(is_started: bool) -> None:
    process, before = LimitedProcess(60), _children()
    hang = {"call": "render", "messages": HANG, "template": {"chat_template": ENDLESS}}
    if is_started:
        assert process.call({**hang, "messages": HI}) == "hi"
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(process.call, hang)
        while not (children := _children() - before) or (is_started and not all(map(_is_computing, children))):
            pass
        process.close()
        with pytest.raises(ResourceError, match=r"^The tokenizer was closed\.$") as caught:
            call.result()
    assert "took longer" not in str(caught.value.__cause__), "it did not end by itself"
    with pytest.raises(ResourceError, match=r"^The tokenizer was closed\.$"):
        process.call(hang)
    assert _children() == before


async def test_a_short_text_does_not_wait_for_a_long_one(tmp_path: Path) -> None:
    with opened(tmp_path, 60, ENDLESS) as tokenizer:
        model = ServedModel("x", _IDENTITY, tokenizer, None, lambda mode: None)  # type: ignore[arg-type]
        waiting = asyncio.create_task(model.encode_messages([*HANG, {"role": "user", "content": " " * (1 << 17)}]))
        await asyncio.sleep(0)
        assert await model.encode_messages(HI)
        assert await model.encode("x")
        assert not waiting.done()
        tokenizer.close()
        with pytest.raises(ResourceError, match="was closed"):
            await waiting


def _is_computing(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"


def _children() -> set[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return {int(number) for each in lists for number in each.read_text().split()}


def test_the_oldest_tokenizers_leave_the_cache(tmp_path: Path) -> None:
    now_s = time.time()
    for age_s in (4000, 3000, 2000, 10):
        folder = tmp_path / f"age-{age_s}"
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes(b"x" * 100)
        os.utime(folder, (now_s - age_s, now_s - age_s))
    shrink_cache(tmp_path, 250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["age-10", "age-2000"]
    shrink_cache(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["age-10"], "it may be in use"
    shrink_cache(tmp_path / "none", 0)


def test_a_tokenizer_json_is_made_from_older_files(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", FAMILIES["llama"](), seed=1)
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    expected, _ = load_tokenizer(str(folder), "it", AutoConfig.from_pretrained(folder))
    files = tokenizer_files(folder, "it", expected)
    assert expected is not None
    assert files is not None
    with closing(tokenizer_from_files(files, tmp_path / "t")) as made:
        assert made.encode("Hello, wörld x") == expected.encode("Hello, wörld x")
    older = {name: content for name, content in files.files.items() if name != "tokenizer.json"}
    with pytest.raises(ModelDamaged, match=r"it has no tokenizer\.json"):
        tokenizer_from_files(TokenizerFiles(files_hash(older), (), older), tmp_path / "older")
