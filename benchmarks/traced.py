"""`trace`: the spans of one generation over two local workers, of all three processes, in one file."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import workloads
from benchmarks.pair import Pair
from benchmarks.peers.at_once import Network
from benchmarks.peers.factories import Shape
from specsplit.assembly.links import connected
from specsplit.core.defaults import DRAFTLESS
from specsplit.core.errors import InvalidSettings, ResourceError
from specsplit.core.sections import DraftSettings, OrchestratorSettings, TargetSettings
from specsplit.core.settings import Settings, override
from specsplit.orchestrator.records import Request, Result
from specsplit.telemetry.setup import trace_to_file

NUM_STEPS = 3
_NUM_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What is traced."""

    mode: str
    rtt_ms: float = 0.0
    """Added to the target's link."""
    num_new_tokens: int = 64
    threads: int = 1
    pair: Pair = field(default=Pair())
    shape: Shape = field(default=Shape())

    @property
    def roles(self) -> tuple[str, ...]:
        return ("target",) if self.mode in DRAFTLESS else ("target", "draft")

    def orchestrator(self) -> OrchestratorSettings:
        """Return the settings of the rounds.

        Raises:
            InvalidSettings: there is no such mode.
        """
        shape = self.shape
        return override(
            OrchestratorSettings(), mode=self.mode, nodes=shape.nodes, depth=shape.depth, branching=shape.branching
        )


def run(settings: TraceSettings, output: Path, tick: Callable[[str], None]) -> Result:
    """Generate once to warm up and once traced; write the spans of all processes to `output`.

    Raises:
        SpecSplitError: there is no such mode, a worker does not start, or `output` cannot be written.
    """
    settings.orchestrator()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.jsonl" for name in ("orchestrator", *settings.roles)]
        with ExitStack() as scope:
            workers = [
                _started(scope, role, settings, path) for role, path in zip(settings.roles, paths[1:], strict=True)
            ]
            addresses = {role: _address(worker) for role, worker in zip(settings.roles, workers, strict=True)}
            tick("loading")
            if settings.rtt_ms:
                network = scope.enter_context(Network(seed=0))
                addresses["target"] = network.open(addresses["target"], settings.rtt_ms / 2e3)
            result = asyncio.run(_generate(settings, addresses, paths[0]))
            tick("tracing")
        try:
            output.write_text("".join(path.read_text(encoding="utf-8") for path in paths), encoding="utf-8")
        except OSError as error:
            raise InvalidSettings(
                f"The trace {output} cannot be written ({error.strerror}); check --output."
            ) from error
        tick("writing")
    return result


def _started(scope: ExitStack, role: str, settings: TraceSettings, path: Path) -> subprocess.Popen[str]:
    pair = settings.pair
    source = pair.target if role == "target" else pair.draft
    command = [sys.executable, "-m", "specsplit", role, "--listen", "127.0.0.1:0", "--model", str(source)]
    command += ["--dtype", pair.dtype, "--device", pair.device, "--threads", str(settings.threads)]
    process = subprocess.Popen(
        [*command, "--trace-file", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )

    def end() -> None:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    scope.callback(end)
    return process


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ResourceError("A worker process ended before it served; run `specsplit target` by hand to see why.")
    return str(json.loads(line)["address"])


async def _generate(settings: TraceSettings, addresses: dict[str, str], path: Path) -> Result:
    links = Settings(
        target=TargetSettings(address=addresses["target"]),
        draft=DraftSettings(address=addresses.get("draft")),
        orchestrator=OrchestratorSettings(),
    )
    text = workloads.load(workloads.CODE, 1)[0].text
    async with connected(links) as workers:
        orchestrator = workers.orchestrator(settings.orchestrator())
        prompt_ids = tuple(workers.tokenizer.encode(text))
        warm_up = Request(prompt_ids=prompt_ids, max_new_tokens=_NUM_WARM_UP_TOKENS, ignore_eos=True)
        await orchestrator.generate(warm_up)
        with trace_to_file(path):
            return await orchestrator.generate(
                Request(prompt_ids=prompt_ids, max_new_tokens=settings.num_new_tokens, ignore_eos=True)
            )
