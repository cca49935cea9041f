"""Data sets by path and checksum: what is read, what is refused, and in which words."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import workloads
from benchmarks.workloads import KNOWN, SPEC_BENCH_TASKS, Prompt
from benchmarks.workloads import read_questions as load
from specsplit.core.errors import InvalidRequest

DATA = os.environ.get("SPECSPLIT_TEST_BENCH_DATA")
real_files = pytest.mark.skipif(DATA is None, reason="SPECSPLIT_TEST_BENCH_DATA names no folder with the data sets")

WRITING = {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}
QA = {"question_id": 241, "category": "qa", "turns": ["Who?"], "reference": ["x"]}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": ""}
GSM8K = {"question": "How many?", "answer": "Two. #### 2"}


def _ignored(message: str) -> None:
    """Take a warning that the test is not about."""


def _written(folder: Path, *lines: object) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _refusal(spec: str, sha256: str | None = None) -> str:
    with pytest.raises(InvalidRequest) as refused:
        load(spec, sha256, warn=_ignored)
    message = str(refused.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_spec_bench_prompts_are_first_turns_under_its_tasks(tmp_path: Path):
    path = _written(tmp_path, WRITING, QA)
    assert load(f"spec-bench:{path}", _sum(path)) == [Prompt("81", "Write.", "mt_bench"), Prompt("241", "Who?", "qa")]


def test_humaneval_and_gsm8k_questions_have_one_turn(tmp_path: Path):
    path = _written(tmp_path, HUMANEVAL)
    assert load(f"humaneval:{path}", _sum(path)) == [Prompt("HumanEval/0", "def f():\n", "humaneval")]
    path = _written(tmp_path, GSM8K, GSM8K)
    assert [question.id for question in load(f"gsm8k:{path}", _sum(path))] == ["GSM8K/0", "GSM8K/1"]


def test_blank_lines_and_a_missing_last_line_feed_do_not_matter(tmp_path: Path):
    path = tmp_path / "questions.jsonl"
    odd = {**GSM8K, "question": "one\u2028two\x85three"}
    path.write_text("\n" + json.dumps(odd, ensure_ascii=False) + "\r\n\n" + json.dumps(GSM8K), encoding="utf-8")
    assert [question.text for question in load(f"gsm8k:{path}", _sum(path))] == [odd["question"], "How many?"]


def test_a_file_that_is_not_the_published_one_is_read_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = _written(tmp_path, GSM8K)
    told: list[str] = []
    assert len(load(f"gsm8k:{path}", warn=told.append)) == 1
    assert len(told) == 1
    assert _sum(path) in told[0]
    load(f"gsm8k:{path}")
    assert "not the published gsm8k file" in capsys.readouterr().err


def test_a_file_with_the_given_sum_is_read_without_a_warning(tmp_path: Path):
    path = _written(tmp_path, GSM8K)
    told: list[str] = []
    assert len(load(f"gsm8k:{path}", _sum(path).upper(), warn=told.append)) == 1
    assert told == []


def test_an_altered_file_is_refused_with_both_sums(tmp_path: Path):
    path = _written(tmp_path, GSM8K)
    before = _sum(path)
    path.write_text(path.read_text().replace("many", "few"))
    message = _refusal(f"gsm8k:{path}", before)
    assert before in message
    assert _sum(path) in message
    assert "64 hexadecimal digits" in _refusal(f"gsm8k:{path}", "abc")


@pytest.mark.parametrize("spec", ["", "gsm8k", "gsm8k:", "mt-bench:file.jsonl", "file.jsonl"])
def test_what_is_no_data_set_is_told_what_one_looks_like(spec: str):
    assert "spec-bench:PATH" in _refusal(spec)


def test_a_file_that_is_missing_or_cannot_be_read_is_named(tmp_path: Path):
    assert str(tmp_path / "gone") in _refusal(f"gsm8k:{tmp_path / 'gone'}")
    assert "cannot be read" in _refusal(f"gsm8k:{tmp_path}")


@pytest.mark.parametrize(
    ("kind", "line", "said"),
    [
        ("gsm8k", "{", "Invalid JSON"),
        ("gsm8k", "[" * 100_000, "Invalid JSON"),
        ("gsm8k", "[1]", "object"),
        ("gsm8k", {"answer": "x"}, "question: Field required"),
        ("gsm8k", {"question": "x"}, "answer: Field required"),
        ("gsm8k", {"question": 7, "answer": "x"}, "question: "),
        ("gsm8k", {"question": " ", "answer": "x"}, "question: "),
        ("humaneval", {"prompt": "x"}, "task_id: Field required"),
        ("humaneval", {"task_id": "a", "prompt": None}, "prompt: "),
        ("spec-bench", {**QA, "question_id": True}, "question_id"),
        ("spec-bench", {**QA, "question_id": 1.5}, "question_id"),
        ("spec-bench", {**QA, "category": 3}, "category: "),
        ("spec-bench", {**QA, "turns": "Who?"}, "turns"),
        ("spec-bench", {**QA, "turns": []}, "turns"),
        ("spec-bench", {**QA, "turns": ["Who?", 2]}, "turns"),
        ("spec-bench", {"question_id": 1, "category": "qa"}, "turns: Field required"),
    ],
)
def test_a_line_that_is_no_question_is_named_by_its_number(tmp_path: Path, kind: str, line: object, said: str):
    good = {"gsm8k": GSM8K, "humaneval": HUMANEVAL, "spec-bench": WRITING}[kind]
    path = _written(tmp_path, good, "", line)
    message = _refusal(f"{kind}:{path}")
    assert message.startswith("Line 3 of ")
    assert said in message


def test_a_repeated_question_is_refused_and_so_is_a_file_without_any(tmp_path: Path):
    path = _written(tmp_path, WRITING, WRITING)
    assert "repeats the question 81 of line 1" in _refusal(f"spec-bench:{path}")
    assert "holds no questions" in _refusal(f"spec-bench:{_written(tmp_path)}")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(json.dumps(GSM8K).encode() + b"\n\xff\xfe\n")
    assert "Line 2" in _refusal(f"gsm8k:{path}")


@real_files
def test_the_published_files_are_read_whole_and_without_a_warning():
    told: list[str] = []
    folder = Path(DATA or "")
    spec_bench = load(f"spec-bench:{folder / 'spec_bench.jsonl'}", warn=told.append)
    assert Counter(question.category for question in spec_bench) == dict.fromkeys(SPEC_BENCH_TASKS, 80)
    assert len(load(f"humaneval:{folder / 'humaneval.jsonl'}", KNOWN["humaneval"], warn=told.append)) == 164
    assert len(load(f"gsm8k:{folder / 'gsm8k_test.jsonl'}", warn=told.append)) == 1319
    assert told == []


def test_held_out_prompts_are_chosen_by_hash_and_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    prompts = workloads.load(workloads.HELD_OUT, None)
    assert [prompt.category for prompt in prompts] == ["humaneval", "code"] * 20
    for category in ("humaneval", "code"):
        hashes = [hashlib.sha256(each.id.encode()).hexdigest() for each in prompts if each.category == category]
        assert hashes == sorted(hashes)
    assert "MIT License" in workloads.HUMANEVAL_PROMPTS.with_name("HUMANEVAL_LICENSE.txt").read_text()
    altered = tmp_path / "prompts.jsonl"
    altered.write_bytes(workloads.HUMANEVAL_PROMPTS.read_bytes().replace(b"def", b"Def", 1))
    monkeypatch.setattr(workloads, "HUMANEVAL_PROMPTS", altered)
    with pytest.raises(InvalidRequest, match="it was altered"):
        workloads.load(workloads.HELD_OUT, 2)


@real_files
def test_the_vendored_prompts_are_humanevals_first_by_hash():
    published = {prompt.id: prompt.text for prompt in load(f"humaneval:{DATA}/humaneval.jsonl")}
    first = sorted(published, key=lambda name: hashlib.sha256(name.encode()).hexdigest())[:20]
    vendored = [prompt for prompt in workloads.load(workloads.HELD_OUT, None) if prompt.category == "humaneval"]
    assert [(prompt.id, prompt.text) for prompt in vendored] == [(name, published[name]) for name in first]
