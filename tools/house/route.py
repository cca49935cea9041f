"""The route of a token: functions called and files entered in one round of the embedded pair, counted by a profiler.

A call is an invocation of a function with a name: a generator or coroutine that goes on is the same call, and a
comprehension or a lambda belongs to the function around it. Not counted are `model` and `sampling`, the forward and
the functions on its logits, which every decoder has. A round lasts from one call of the target to the next; the value
is the median over rounds, `auto`'s those in which it asks the draft.
"""

from __future__ import annotations

import dis
import json
import statistics
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from tools.house.clock import simulated
from tools.house.measure import Measure, at_most
from tools.house.sources import ROOT

if TYPE_CHECKING:
    from specsplit.api import Pipeline

BARS: dict[str, tuple[int, int]] = {"plain": (45, 13), "pingpong": (180, 20), "auto": (380, 24)}
"""Calls and files that a round may take, by mode."""
_LEFT_OUT = ("model/", "sampling/")
_WANTED_ROUNDS, _WARM_ROUNDS, _NUM_TOKENS = 60, 5, 128
_PROMPTS = ROOT / "benchmarks" / "data" / "code_prompts.jsonl"
_OPTIONS: dict[str, dict[str, Any]] = {"pingpong": {"lookup": False}}
"""Pingpong is measured by itself: a tree with lookup's nodes in it is what `auto` measures."""
Call = tuple[str, str]
"""Names of file and function."""


@dataclass(slots=True)
class Round:
    """The calls of one round."""

    calls: Counter[Call] = field(default_factory=Counter[Call])
    has_draft: bool = False

    @property
    def num_calls(self) -> int:
        return self.calls.total()

    @property
    def num_files(self) -> int:
        return len({file for file, _ in self.calls})


class Recorder:
    """A profile function for every thread, which counts calls between the starts of rounds."""

    def __init__(self, package: Path) -> None:
        self.rounds: list[Round] = []
        self._package = f"{package}/"
        self._current: Round | None = None
        self._starts: dict[CodeType, tuple[Call | None, int]] = {}

    def begin_round(self) -> None:
        if self._current is not None:
            self.rounds.append(self._current)
        self._current = Round()

    def end(self) -> None:
        """Drop the round under way: nothing says where it ends."""
        self._current = None

    def see_draft(self) -> None:
        if self._current is not None:
            self._current.has_draft = True

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or self._current is None:
            return
        call, start = self._starts.get(frame.f_code) or self._look_up(frame.f_code)
        # A coroutine that goes on after an await makes a "call" event, too, but further down than its first one.
        if call is not None and frame.f_lasti <= start:
            self._current.calls[call] += 1

    def _look_up(self, code: CodeType) -> tuple[Call | None, int]:
        name = code.co_filename.removeprefix(self._package)
        counts = name != code.co_filename and not name.startswith(_LEFT_OUT) and not code.co_name.startswith("<")
        start = next((step.offset for step in dis.get_instructions(code) if step.opname == "RESUME"), 0)
        self._starts[code] = ((name, code.co_qualname) if counts else None, start)
        return self._starts[code]


def measure(mode: str) -> list[Round]:
    """Run the embedded pair in `mode`, greedily, and return its rounds in the steady state.

    For `auto` these are rounds that ask the draft; fewer than wanted if it does not, prompt after prompt.
    """
    prompts = [json.loads(line)["prompt"] for line in _PROMPTS.read_text(encoding="utf-8").splitlines()]
    options: dict[str, Any] = {"mode": mode, "temperature": 0.0, "threads": 1, **_OPTIONS.get(mode, {})}
    found: list[Round] = []
    with simulated(), _recorded() as recorder, _pipeline(options) as pipeline:
        for number, prompt in enumerate(prompts):
            pipeline.generate(prompt, max_new_tokens=_NUM_TOKENS, ignore_eos=True)
            recorder.end()
            steady, recorder.rounds = recorder.rounds[_WARM_ROUNDS:], []
            found += [made for made in steady if number and (mode != "auto" or made.has_draft)]
            if len(found) >= _WANTED_ROUNDS:
                break
    return found


def _pipeline(options: dict[str, Any]) -> Pipeline:
    from specsplit.api import Pipeline

    return Pipeline(**options)


@contextmanager
def _recorded() -> Generator[Recorder]:
    """Count the calls of all threads begun inside the block; engines mark where rounds begin and which ask a draft."""
    import specsplit
    from specsplit.draft.engine import DraftEngine
    from specsplit.target.engine import TargetEngine

    drafter: Any = DraftEngine
    verifier: Any = TargetEngine

    recorder = Recorder(Path(specsplit.__file__).parent)
    verify, propose = verifier.verify, drafter.propose

    def marked_verify(engine: Any, *arguments: Any, **named: Any) -> Any:
        recorder.begin_round()
        return verify(engine, *arguments, **named)

    def marked_propose(engine: Any, *arguments: Any, **named: Any) -> Any:
        recorder.see_draft()
        return propose(engine, *arguments, **named)

    verifier.verify, drafter.propose = marked_verify, marked_propose
    threading.setprofile(recorder)
    try:
        yield recorder
    finally:
        threading.setprofile(None)
        verifier.verify, drafter.propose = verify, propose


def measures() -> list[Measure]:
    """Return the measures of the route, in every mode that has a bar."""
    found: list[Measure] = []
    for mode, (max_calls, max_files) in BARS.items():
        rounds = measure(mode)
        if not rounds:
            found.append(Measure(f"calls of a round, {mode}", "no round", f"<= {max_calls}", is_met=False))
            continue
        calls = statistics.median(made.num_calls for made in rounds)
        files = statistics.median(made.num_files for made in rounds)
        found.append(at_most(f"calls of a round, {mode} ({len(rounds)} rounds)", calls, max_calls))
        found.append(at_most(f"files on the route, {mode}", files, max_files))
    return found


def listing(mode: str) -> str:
    """Return the functions of the route by the number of their calls in a round, then the files."""
    rounds = measure(mode)
    if not rounds:
        return f"no round of {mode} asked the draft"
    total = sum((made.calls for made in rounds), Counter[Call]())
    files = Counter[str]()
    for (file, _), count in total.items():
        files[file] += count
    lines = [f"{count / len(rounds):8.2f}  {file}  {name}" for (file, name), count in total.most_common()]
    lines += ["", *(f"{count / len(rounds):8.2f}  {file}" for file, count in files.most_common())]
    calls = statistics.median(made.num_calls for made in rounds)
    num_files = statistics.median(made.num_files for made in rounds)
    return "\n".join([*lines, "", f"{mode}: {calls:g} calls, {num_files:g} files (medians of {len(rounds)} rounds)"])
