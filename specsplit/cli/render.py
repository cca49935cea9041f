"""Output for the user: text as it is verified, the legend, the summary line, the loading bar.

Text and JSON go to stdout, everything else to stderr. Escapes go to a terminal only, and never those in the
model's text.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from specsplit.core.exactness import joint_exactness
from specsplit.core.progress import Progress
from specsplit.orchestrator.progress_words import progress_sentence
from specsplit.orchestrator.request import Piece, Result, RoundFacts
from specsplit.speculation.cost_model import ModePlan

_LONG_WAIT_S = 0.5
"""A shorter wait for a slot is not worth a word in the summary."""
_DRAFTED, _DIM, _RESET = "\x1b[4;36m", "\x1b[2m", "\x1b[0m"
_INKED = re.compile(r"\S(?:.*\S)?")
"""Matches a line without the blanks around it, so that indentation is not underlined."""
_LOG_S = 10.0
"""Seconds between two lines about a file of prompts where there is no terminal for a bar."""
_BIDI_CONTROLS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
# Control characters, C1 codes and bidirectional overrides could move the cursor, retitle the window or reorder a line.
_VISIBLE = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\N{SYMBOL FOR DELETE}",
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
    **{code: f"\\u{code:04x}" for code in _BIDI_CONTROLS},
}


def visible(text: str) -> str:
    """Return `text` with control characters as symbols, so that no terminal obeys them; newline and tab stay."""
    return text.translate(_VISIBLE)


def has_colour(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that wants colour (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class TextStream:
    """Writes an answer piece by piece, drafted-and-accepted text underlined where the stream can show it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._has_colour = has_colour(stream)
        self._last = ""

    @property
    def legend(self) -> str | None:
        """Explanation of the marks; None if the stream shows none."""
        return f"{_DRAFTED}drafted and accepted{_RESET}, the target's own" if self._has_colour else None

    def write(self, pieces: Sequence[Piece]) -> None:
        for text, drafted in pieces:
            if not text:
                continue
            # The last character decides whether a note or the prompt of the shell needs a new line before it.
            self._last = text[-1]
            shown = visible(text) if self._is_terminal else text
            if drafted and self._has_colour:
                shown = _INKED.sub(lambda match: f"{_DRAFTED}{match[0]}{_RESET}", shown)
            self._stream.write(shown)
        self._stream.flush()

    def interrupt(self) -> None:
        """End the line if a terminal shows text and notes together, so that a note begins a line of its own."""
        if self._is_terminal:
            self.end()

    def end(self) -> None:
        """Close the last line, if there is one."""
        if self._last not in ("", "\n"):
            self._stream.write("\n")
            self._last = "\n"
        self._stream.flush()


def note(text: str) -> None:
    """Write a line to the user that is not part of the answer."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def dim_note(text: str) -> None:
    """Write a note that matters less, dim if the terminal can show that."""
    note(f"{_DIM}{text}{_RESET}" if has_colour(sys.stderr) else text)


class ProgressLine:
    """One line on the terminal behind stderr, written over until the answer begins; nothing anywhere else."""

    def __init__(self) -> None:
        self._can_show = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._is_shown = False

    def show(self, progress: Progress) -> None:
        """Write over the line with what is waited for."""
        if self._can_show:
            self._write(progress_sentence(progress))
            self._is_shown = True

    def end(self) -> None:
        """Take the line away for good: where the answer is shown, it would be written over."""
        if self._is_shown:
            self._write("")
        self._can_show = self._is_shown = False

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


_TROUBLES = {
    "unreachable": "cannot be reached",
    "slow": "gives no answer in time",
    "full": "has no free session",
    "failed": "fails",
    "invalid": "answers what makes no sense",
    "mismatch": "does not fit the target",
    "wrong": "computes wrong results",
}


def degraded(phase: str) -> str:
    """Return the sentence for a phase in which a worker was of no use ("draft unreachable")."""
    worker, _, reason = phase.partition(" ")
    trouble = f"The {worker} {_TROUBLES.get(reason, reason)}"
    if worker == "draft":
        return f"{trouble}: going on without it until it is of use again."
    return f"{trouble}: it was asked again, and the text is the same."


def summary(result: Result) -> str:
    """Return the line that ends a generation."""
    speculative = result.speculative_decoding
    num_accepted, num_drafted = speculative.num_accepted_draft_tokens, speculative.num_path_tokens
    parts = [
        f"{len(result.token_ids)} tokens ({result.finish_reason})",
        *([f"waited {result.timings.queue_s:.1f} s"] if result.timings.queue_s >= _LONG_WAIT_S else []),
        f"{result.timings.tokens_per_s:.1f} tok/s",
        f"{result.tokens_per_target_forward:.2f} tokens per target forward",
        f"{result.target_forwards} target forwards",
        *([f"accepted {num_accepted} of {num_drafted} drafted"] if num_drafted else []),
        f"mode {_modes(result)}",
        *_phases(result),
        *_audits(result),
        " ".join(part for part in (result.dtype, "exactness", result.exactness) if part),
        f"seed {result.seed}",
    ]
    return " | ".join(parts)


def full_context(result: Result, max_new_tokens: int) -> str | None:
    """Return the sentence for a text that ends since its context is full; None for any other."""
    if result.finish_reason != "length" or len(result.token_ids) >= max_new_tokens:
        return None
    num_tokens = len(result.prompt_token_ids) + len(result.token_ids)
    return (
        f"The text ends here since the context of {num_tokens} tokens is full; the target takes a longer one with "
        "--context, up to what its model was made for."
    )


def _modes(result: Result) -> str:
    """Return the mode, and in `auto` how many rounds were run in each."""
    if result.mode != "auto":
        return result.mode
    counts = sorted(result.rounds_by_mode.items(), key=lambda item: -item[1])
    return f"auto ({', '.join(f'{mode} {count}' for mode, count in counts)})" if counts else "auto"


def explanation(rounds: Sequence[RoundFacts]) -> list[str]:
    """Return a line per round, and before a change of plan one with the prediction for every mode."""
    lines: list[str] = []
    decision = None
    for facts in rounds:
        # `auto` decides every few rounds only; rounds between share a decision, which is shown once.
        if facts.decision is not None and facts.decision != decision:
            decision = facts.decision
            lines.append("predicted tok/s: " + ", ".join(_plan(each) for each in decision.alternatives))
        lines.append(
            f"round {facts.number:>4}  {facts.mode:<8}  {facts.num_accepted:>2} of {facts.num_nodes:>2} nodes accepted"
            f"  verify {facts.verify_s * 1e3:.1f} ms"
        )
    return lines


def _plan(plan: ModePlan) -> str:
    shape = f" {plan.nodes}x{plan.depth}" if plan.nodes else ""
    return f"{plan.mode}{shape} {plan.tokens_per_s:.0f}"


def _audits(result: Result) -> list[str]:
    """Return a phrase for the audited rounds, if any were to be audited."""
    counts = result.audit
    if counts is None:
        return []
    extras = [(counts.num_ties, "near ties"), (counts.num_missed, "missed")]
    found = ", ".join([*(f"{name} wrong" for name in counts.wrong), *(f"{n} {word}" for n, word in extras if n)])
    return [f"audited {counts.num_rounds} rounds" + (f" ({found})" if found else "")]


def _phases(result: Result) -> list[str]:
    """Return a phrase for each worker and reason of a degraded phase, with its number of rounds."""
    rounds: Counter[str] = Counter()
    for phase in result.degraded:
        rounds[f"{phase.worker} {phase.reason}"] += phase.last_round - phase.first_round + 1
    return [f"{phase} in {count} round{'s' if count > 1 else ''}" for phase, count in rounds.items()]


def interrupted_summary(num_tokens: int, num_rounds: int, elapsed_s: float, seed: int | None) -> str:
    """Return the same line for an interrupted generation, from the part that had arrived."""
    rate = num_tokens / elapsed_s if elapsed_s else 0.0
    parts = [
        f"{num_tokens} tokens (interrupted)",
        f"{rate:.1f} tok/s",
        *([f"{num_tokens / num_rounds:.2f} tokens per round"] if num_rounds else []),
        f"seed {seed}",
    ]
    return " | ".join(parts)


def comparison(result: Result, plain: Result) -> list[str]:
    """Return the lines that set a generation beside plain decoding with the same seed."""
    lines = [
        f"{run.mode:<9} {len(run.token_ids):>5} tokens {run.timings.tokens_per_s:>8.1f} tok/s "
        f"{run.target_forwards:>5} target forwards"
        for run in (plain, result)
    ]
    ratio = speed_ratio(result, plain)
    speed = f"{ratio:.2f}x plain decoding" if ratio is not None else "too short to compare speeds"
    return [*lines, f"{speed}, {_difference(result, plain)}"]


def speed_ratio(result: Result, plain: Result) -> float | None:
    """Return the ratio of speeds to plain decoding; None if either has no rate."""
    fast, slow = result.timings.tokens_per_s, plain.timings.tokens_per_s
    return fast / slow if fast and slow else None


def _difference(result: Result, plain: Result) -> str:
    if result.token_ids == plain.token_ids:
        return "texts identical"
    pairs = zip(result.token_ids, plain.token_ids, strict=False)
    # None if one text is the beginning of the other: they differ where the shorter one ends.
    first = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        first = min(len(result.token_ids), len(plain.token_ids))
    return f"texts differ from token {first} on"


def promises_bits(result: Result, plain: Result) -> bool:
    """Return whether the targets of both texts promised the same bits for both."""
    return joint_exactness([result, plain]) == "bits"


def broken_promise(result: Result, plain: Result) -> str | None:
    """Return the sentence for texts that differ though the target promised the same bits for both; None otherwise."""
    if not promises_bits(result, plain) or result.token_ids == plain.token_ids:
        return None
    return (
        f"The texts differ although the target promised the same bits for both (numerics {result.numerics}), which is "
        f"a bug; please report it with the model, the prompt and seed {result.seed}."
    )


@contextmanager
def loading_bar() -> Generator[Callable[[str, float], None] | None]:
    """Show a bar on stderr for the length of the block, and yield its update; None if stderr is no terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    # Imported late: rich takes a tenth of a second, which a pipe or a log need not pay.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("loading {task.description}"), BarColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=1.0)
        yield lambda phase, fraction: progress.update(bar, description=phase, completed=fraction)


Update = Callable[[], None]


@dataclass(slots=True)
class BatchCounts:
    """How far a file of prompts has come."""

    num_prompts: int
    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    started_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        elapsed_s = time.monotonic() - self.started_s
        rate = self.num_tokens / elapsed_s if elapsed_s else 0.0
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return (
            f"{self.num_done} of {self.num_prompts} prompts done{failed} | {self.num_tokens} tokens | {rate:.1f} tok/s"
        )


@contextmanager
def batch_bar(counts: BatchCounts) -> Generator[Update]:
    """Show the counts on stderr for the length of the block, and yield what to call after each change.

    On a terminal that is a bar, and elsewhere a line every ten seconds.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        said_s = counts.started_s

        def say() -> None:
            nonlocal said_s
            if time.monotonic() - said_s >= _LOG_S:
                said_s = time.monotonic()
                note(str(counts))

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(str(counts), total=counts.num_prompts)
        yield lambda: progress.update(bar, description=str(counts), completed=counts.num_done)
