"""Prompts to be continued: the files under `data/`, or questions of Spec-Bench, HumanEval and GSM8K by their path.

Knows no system and no network.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, StrictInt, StrictStr, StringConstraints, ValidationError

from specsplit.core.errors import InvalidRequest
from specsplit.core.paths import expanded

CODE_PROMPTS = Path(__file__).parent / "data" / "code_prompts.jsonl"
"""Beginnings of Python files, written for this purpose, so no model was trained on them."""
HUMANEVAL_PROMPTS = CODE_PROMPTS.with_name("humaneval_prompts.jsonl")
"""Twenty prompts of HumanEval, the first by the SHA-256 of their task ids; licence in data/HUMANEVAL_LICENSE.txt."""
HUMANEVAL_PROMPTS_SHA256 = "4865853e6aa53efb00e3350ff7c9cfc01c94922d346f52ca891ae435d5afb2de"
CODE = "code"
HELD_OUT = "held-out"
"""Prompts that nothing was tuned to: those of HumanEval and as many of `code`, in turn, each in the order of hashes."""
SPEC_BENCH, HUMANEVAL, GSM8K = "spec-bench", "humaneval", "gsm8k"
KNOWN = {
    SPEC_BENCH: "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    HUMANEVAL: "1d49078ba3e2b196b9344535bef34a43021f038fad9561d6ee7c53450609a6a2",
    GSM8K: "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
"""SHA-256 of the published files: hemingkx/Spec-Bench data/spec_bench/question.jsonl (480 questions), openai/human-eval
HumanEval.jsonl (164), openai/grade-school-math test.jsonl (1,319)."""

_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH_TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
"""The six tasks that Spec-Bench reports (its evaluation/speed.py): the categories of MT-Bench count as one."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_KINDS = " or ".join(f"{kind}:PATH" for kind in KNOWN)
Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, its name in reports, and the task it counts under."""

    id: str
    text: str
    category: str = CODE


def load(spec: str, count: int | None, sha256: str | None = None) -> list[Prompt]:
    """Return `count` prompts (None: all) of "code", of "held-out" or of a data set such as `spec-bench:PATH`.

    Of a question its first turn is the prompt. The first ones are taken, from each task of a data set in turn: always
    the same, so that none is picked for its result.

    Raises:
        InvalidRequest: there is no such workload, it has fewer prompts, or the file is not the one of `sha256`.
    """
    if spec == CODE:
        return read_prompts(CODE_PROMPTS, count)
    if spec == HELD_OUT:
        return _first(held_out(), count)
    if ":" not in spec:
        raise InvalidRequest(
            f"There is no workload {spec!r}; there are code, held-out, spec-bench:PATH, humaneval:PATH and gsm8k:PATH.",
            param="workload",
        )
    return _first(_in_turn(read_questions(spec, sha256)), count)


def read_prompts(path: Path, count: int | None) -> list[Prompt]:
    """Return the first `count` prompts of a file: always the same ones, so that none is picked for its result.

    Raises:
        InvalidRequest: the file has fewer prompts.
    """
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return _first([Prompt(record["id"], record["prompt"]) for record in records], count)


def held_out() -> list[Prompt]:
    """Return the prompts that nothing was tuned to, of HumanEval and of our own code in turn.

    Raises:
        InvalidRequest: the file of HumanEval's prompts was altered.
    """
    humaneval = read_questions(f"{HUMANEVAL}:{HUMANEVAL_PROMPTS}", HUMANEVAL_PROMPTS_SHA256)
    code = sorted(read_prompts(CODE_PROMPTS, None), key=lambda prompt: hashlib.sha256(prompt.id.encode()).hexdigest())
    return _in_turn([*humaneval, *code[: len(humaneval)]])


def _first(prompts: list[Prompt], count: int | None) -> list[Prompt]:
    if count is not None and not 1 <= count <= len(prompts):
        raise InvalidRequest(f"--prompts must be between 1 and {len(prompts)}, not {count}.", param="prompts")
    return prompts[:count]


def _in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Order prompts so that each category gives its first, then each its second, and so on."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    longest = max(map(len, groups.values()), default=0)
    return [group[index] for index in range(longest) for group in groups.values() if index < len(group)]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a short hash of the texts, for the record of a result."""
    return hashlib.sha256("\0".join(prompt.text for prompt in prompts).encode()).hexdigest()[:16]


def read_questions(spec: str, sha256: str | None = None, *, warn: Warn | None = None) -> list[Prompt]:
    """Return the first turns of the questions of `spec` in the file's order, each under the task that it counts under.

    `spec` is `spec-bench:PATH`, `humaneval:PATH` or `gsm8k:PATH`.

    A file that is not the published one is read if `sha256` is its checksum; without `sha256` it is read with a
    warning, told to `warn` (stderr by default).

    Raises:
        InvalidRequest: no such data set or file, another checksum than `sha256`, or a line that is no such question.
    """
    kind, path = _parsed(spec)
    content = _content(path)
    _check_sum(kind, path, hashlib.sha256(content).hexdigest(), sha256, warn or _to_stderr)
    questions: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in _lines(path, content):
        where = f"Line {number} of {path}"
        question = _question(kind, line, where, len(questions))
        if question.id in seen:
            raise _refused(f"{where} repeats the question {question.id} of line {seen[question.id]}.")
        seen[question.id] = number
        questions.append(question)
    if not questions:
        raise _refused(f"{path} holds no questions.")
    return questions


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="dataset")


def _to_stderr(message: str) -> None:
    print(f"Warning: {message}", file=sys.stderr, flush=True)


def _parsed(spec: str) -> tuple[str, Path]:
    kind, _, path = spec.partition(":")
    if kind not in KNOWN or not path:
        raise _refused(f"A data set is given as {_KINDS}, not as {spec!r}.")
    return kind, expanded(path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _refused(f"{path} cannot be read ({error.strerror}).") from error


def _check_sum(kind: str, path: Path, found: str, wanted: str | None, warn: Warn) -> None:
    if wanted is None:
        if found != KNOWN[kind]:
            warn(f"{path} is not the published {kind} file (its sha256 is {found}); pass that sum to accept it.")
        return
    wanted = wanted.strip().lower()
    if not _SHA256.fullmatch(wanted):
        raise _refused(f"A sha256 has 64 hexadecimal digits; {wanted!r} is none.")
    if found != wanted:
        raise _refused(f"{path} has the sha256 {found}, not {wanted}: it was altered, or is another file.")


def _lines(path: Path, content: bytes) -> list[tuple[int, str]]:
    """Return the lines that are not blank with their numbers; only line feeds end one, as JSON lines have it."""
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise _refused(f"Line {number} of {path} is not UTF-8 text.") from error
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


_Words = Annotated[str, StringConstraints(strict=True, min_length=1, pattern=r"\S")]


class _SpecBench(BaseModel):
    question_id: StrictInt | StrictStr
    category: _Words
    turns: Annotated[list[_Words], Field(min_length=1)]

    def question(self, index: int) -> Prompt:
        task = "mt_bench" if self.category in _MT_BENCH else self.category
        return Prompt(str(self.question_id), self.turns[0], task)


class _HumanEval(BaseModel):
    task_id: _Words
    prompt: _Words

    def question(self, index: int) -> Prompt:
        return Prompt(self.task_id, self.prompt, HUMANEVAL)


class _Gsm8k(BaseModel):
    question_text: _Words = Field(alias="question")
    answer: _Words

    def question(self, index: int) -> Prompt:
        return Prompt(f"GSM8K/{index}", self.question_text, GSM8K)


_LINES: dict[str, type[_SpecBench | _HumanEval | _Gsm8k]] = {
    SPEC_BENCH: _SpecBench,
    HUMANEVAL: _HumanEval,
    GSM8K: _Gsm8k,
}
"""The fields of a line that are read; others may stand beside them."""


def _question(kind: str, line: str, where: str, index: int) -> Prompt:
    try:
        return _LINES[kind].model_validate_json(line).question(index)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the line"
        raise _refused(f"{where} is no question of {kind}: {place}: {first['msg']}.") from error
