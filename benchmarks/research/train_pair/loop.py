"""The loop that target and draft share: a budget of minutes or steps, progress, checkpoints, and resuming from them.

The state after a step is a function of the state before it and of the fraction done, so that a run that is cut and
resumed with a budget of steps ends bit for bit where an uncut one does. Knows neither losses nor data.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from benchmarks.research.train_pair.optimizer import Optimizers
from benchmarks.research.train_pair.workspace import Interrupted

SAVE_EVERY_S = 180.0
TELL_EVERY_S = 30.0
SMOOTHING = 0.98


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a run may take, all its parts before and after an interruption together; `steps` is for tests."""

    minutes: float
    steps: int | None = None

    def fraction(self, step: int, elapsed_s: float) -> float:
        """Return which fraction is used up, at most 1."""
        done = elapsed_s / (60 * self.minutes) if self.steps is None else step / self.steps
        return min(1.0, done)


class Task(Protocol):
    """Model under training."""

    @property
    def model(self) -> nn.Module: ...

    def backward(self, position: int, fraction: float) -> tuple[float, int, int]:
        """Accumulate gradients from `position` on; return the loss, how far the position moves, and the tokens."""
        ...


@dataclass(slots=True)
class State:
    """Content of a checkpoint beside weights and optimizers."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    loss: float = 0.0


class Loop:
    """Runs a task to the end of its budget, from its checkpoint in `folder` if there is one."""

    def __init__(
        self, name: str, task: Task, optimizers: Optimizers, budget: Budget, folder: Path, console: Console
    ) -> None:
        self._name, self.task, self._optimizers, self._budget = name, task, optimizers, budget
        self._checkpoint = folder / f"{name}.checkpoint.pt"
        self._log = folder / f"{name}.log.jsonl"
        self._console = console
        self.state = State()
        folder.mkdir(parents=True, exist_ok=True)
        if self._checkpoint.exists():
            self._load()

    @property
    def fraction(self) -> float:
        return self._budget.fraction(self.state.step, self.state.elapsed_s)

    def run(self, max_steps: int | None = None) -> State:
        """Train until the budget is used up, or `max_steps` more steps are done.

        Raises:
            Interrupted: Ctrl-C or a request to terminate came; the same call goes on from there.
        """
        last_step = None if max_steps is None else self.state.step + max_steps
        saved_s = told_s = time.monotonic()
        with _stop_requests() as should_stop, self._progress() as show:
            while self.fraction < 1.0 and self.state.step != last_step and not should_stop():
                self._step()
                now_s = time.monotonic()
                show(self._line())
                if now_s - told_s > TELL_EVERY_S:
                    told_s = now_s
                    self._tell()
                if now_s - saved_s > SAVE_EVERY_S:
                    saved_s = now_s
                    self._save()
            self._save()
            self._tell()
            if should_stop():
                raise Interrupted(f"{self._name} stopped at {self.fraction:.1%}; the same command goes on from there.")
        return self.state

    def _step(self) -> None:
        start_s = time.monotonic()
        state, fraction = self.state, self.fraction
        loss, moved, tokens = self.task.backward(state.position, fraction)
        self._optimizers.step(fraction)
        state.step += 1
        state.position += moved
        state.tokens += tokens
        smoothing = min(SMOOTHING, 1 - 1 / state.step)
        state.loss = smoothing * state.loss + (1 - smoothing) * loss
        state.elapsed_s += time.monotonic() - start_s

    def _line(self) -> str:
        state = self.state
        rate = state.tokens / max(1e-9, state.elapsed_s)
        return f"step {state.step}  {state.tokens / 1e6:.2f} M tokens  loss {state.loss:.3f}  {rate:,.0f} tokens/s"

    def _tell(self) -> None:
        record = {"step": self.state.step, "tokens": self.state.tokens, "loss": round(self.state.loss, 4)}
        record |= {"elapsed_s": round(self.state.elapsed_s, 1), "fraction": round(self.fraction, 4)}
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if not self._console.is_terminal:
            self._console.print(f"{self._name}  {self.fraction:.1%}  {self._line()}")

    @contextmanager
    def _progress(self) -> Generator[Callable[[str], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as bar:
            shown = bar.add_task(self._name, total=1.0)
            yield lambda line: bar.update(shown, completed=self.fraction, description=f"{self._name}: {line}")

    def _save(self) -> None:
        state = self.state
        record: dict[str, Any] = {
            "model": self.task.model.state_dict(),
            "optimizers": self._optimizers.state_dict(),
            "rng": torch.get_rng_state(),
            "state": [state.step, state.position, state.tokens, state.elapsed_s, state.loss],
        }
        beside = self._checkpoint.with_name(self._checkpoint.name + ".part")
        torch.save(record, beside)
        beside.replace(self._checkpoint)

    def _load(self) -> None:
        device = next(self.task.model.parameters()).device
        record = torch.load(self._checkpoint, map_location=device, weights_only=True)
        self.task.model.load_state_dict(record["model"])
        self._optimizers.load_state_dict(record["optimizers"])
        torch.set_rng_state(record["rng"].cpu())
        self.state = State(*record["state"])


@contextmanager
def _stop_requests() -> Generator[Callable[[], bool]]:
    """Let the first Ctrl-C or SIGTERM end the run after its step; the second Ctrl-C ends everything."""
    seen: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if seen and signum == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(signum)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
