"""The processes of one checkout: a driver with open pipelines, and the workers that it uses over loopback.

Only faces that old and new checkouts share are used: `specsplit.Pipeline`, and the command line of the workers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.processes import WorkerProcess
from specsplit.core.errors import ResourceError

DRIVER = Path(__file__).with_name("driver.py")
KINDS = ("plain", "pingpong", "auto", "loopback auto", "two stages")


def environment_of(checkout: Path) -> dict[str, str]:
    """Return the environment in which Python imports `specsplit` from a checkout."""
    return {**os.environ, "PYTHONPATH": str(checkout)}


@dataclass(frozen=True, slots=True)
class Answer:
    """One generation."""

    wall_s: float
    token_ids: tuple[int, ...]
    target_forwards: int


class Driver:
    """A script that runs with the specsplit of one checkout: a JSON line in, a JSON line out."""

    def __init__(self, checkout: Path, script: Path) -> None:
        self._checkout = checkout
        # A session of its own: Ctrl-C is for the benchmark, which ends its processes itself.
        # -P keeps the script's folder out of sys.path: `benchmarks` has modules with names of the standard library.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=checkout,
            env=environment_of(checkout),
            start_new_session=True,
        )

    def ask(self, request: dict[str, object]) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            ResourceError: the process has ended.
        """
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the empty line below says the same
        line = self._process.stdout.readline()
        if not line:
            raise ResourceError(f"The process of {self._checkout} has ended; what it wrote to stderr says why.")
        return json.loads(line)

    def end(self) -> None:
        """Close its input and wait for it."""
        self._process.communicate()


class Side:
    """One checkout, ready to generate in one of `KINDS`; its processes end with the `with` block."""

    def __init__(self, checkout: Path, kind: str, threads: int, num_layers: int) -> None:
        self.kind = kind
        self._checkout = checkout
        self._threads = threads
        self._scope = ExitStack()
        self._driver = Driver(checkout, DRIVER)
        self._scope.callback(self._driver.end)
        self._workers = self._start_workers(num_layers)

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._scope.close()

    def open(self) -> None:
        """Open the pipeline.

        Raises:
            ResourceError: a process has ended.
        """
        options: dict[str, object] = {"threads": self._threads, "mode": self.kind}
        if self.kind == "loopback auto":
            target, draft = self._workers
            options = {"target": target.wait_ready(), "draft": draft.wait_ready(), "mode": "auto"}
        elif self.kind == "two stages":
            addresses = ",".join(stage.wait_ready() for stage in self._workers)
            target = self._start("target", "--stages", addresses)
            options = {"target": target.wait_ready(), "mode": "plain"}
        self._driver.ask({"open": options})

    def generate(self, prompt: str, num_tokens: int) -> Answer:
        """Continue a prompt by `num_tokens` tokens, greedily.

        Raises:
            ResourceError: a process has ended.
        """
        options = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0, "seed": 0}
        told = self._driver.ask({"prompt": prompt, "options": options})
        return Answer(told["wall_s"], tuple(told["token_ids"]), told["target_forwards"])

    def _start_workers(self, num_layers: int) -> list[WorkerProcess]:
        if self.kind == "loopback auto":
            return [self._start("target"), self._start("draft")]
        if self.kind == "two stages":
            middle = num_layers // 2
            return [self._start("stage", "--layers", layers) for layers in (f"0:{middle}", f"{middle}:{num_layers}")]
        return []

    def _start(self, *arguments: str) -> WorkerProcess:
        place = {"cwd": self._checkout, "env": environment_of(self._checkout)}
        worker = WorkerProcess(*arguments, "--threads", str(self._threads), **place)
        self._scope.callback(worker.end)
        return worker


def check(checkout: Path) -> Path:
    """Return the path of a checkout in full.

    Raises:
        ResourceError: the folder has no package `specsplit`.
    """
    if not (checkout / "specsplit" / "__init__.py").is_file():
        raise ResourceError(f"There is no package specsplit in {checkout}; name the folder of a checkout.")
    return checkout.resolve()


def commit_of(checkout: Path) -> str:
    """Return the commit that a checkout stands at, empty if git does not say."""
    told = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return told.stdout.strip()
