"""`trace`: the spans of one generation over two local workers, of all three processes, in one file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import workloads
from benchmarks.environment import require_bench_extra
from benchmarks.peers.at_once import Network
from benchmarks.peers.ours_remote import connect, worker
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.settings import Pair, ServedMode, Shape, chosen_pair
from specsplit.core.defaults import DRAFTLESS
from specsplit.core.errors import InvalidSettings
from specsplit.core.sections import OrchestratorSettings
from specsplit.engine import event_loop
from specsplit.orchestrator.request import Request, Result
from specsplit.telemetry.setup import trace_to_file

NUM_STEPS = 3
_NUM_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """The generation that is traced."""

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
        return ServedMode(self.mode, self.mode, self.shape).settings()


def run(settings: TraceSettings, output: Path, tick: Callable[[str], None]) -> Result:
    """Generate once to warm up and once traced; write the spans of all processes to `output`.

    Raises:
        SpecSplitError: there is no such mode, a worker does not start, or `output` cannot be written.
    """
    settings.orchestrator()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.jsonl" for name in ("orchestrator", *settings.roles)]
        with ExitStack() as scope:
            started = {
                role: worker(role, settings.threads, settings.pair, "--trace-file", str(path))
                for role, path in zip(settings.roles, paths[1:], strict=True)
            }
            for process in started.values():
                scope.callback(process.end)
            addresses = {role: process.wait_ready() for role, process in started.items()}
            tick("loading")
            if settings.rtt_ms:
                network = scope.enter_context(Network())
                addresses["target"] = network.open(addresses["target"], settings.rtt_ms / 2e3)
            result = event_loop.run(_generate(settings, addresses, paths[0]))
            tick("tracing")
        try:
            output.write_text("".join(path.read_text(encoding="utf-8") for path in paths), encoding="utf-8")
        except OSError as error:
            raise InvalidSettings(
                f"The trace {output} cannot be written ({error.strerror}); check --output."
            ) from error
        tick("writing")
    return result


async def _generate(settings: TraceSettings, addresses: dict[str, str], path: Path) -> Result:
    text = workloads.load(workloads.CODE, 1)[0].text
    async with AsyncExitStack() as links:
        workers = await connect(links, addresses)
        orchestrator = workers.orchestrator(settings.orchestrator())
        prompt_ids = tuple(workers.tokenizer.encode(text))
        warm_up = Request(prompt_ids=prompt_ids, max_new_tokens=_NUM_WARM_UP_TOKENS, ignore_eos=True)
        await orchestrator.generate(warm_up)
        with trace_to_file(path):
            return await orchestrator.generate(
                Request(prompt_ids=prompt_ids, max_new_tokens=settings.num_new_tokens, ignore_eos=True)
            )


@app.command("trace")
def trace(
    output: Annotated[Path, typer.Option(help="The file of spans to write, for `report`.", dir_okay=False)],
    mode: Annotated[str, typer.Option(help="Of the orchestrator.")] = "overlap",
    rtt_ms: Annotated[float, typer.Option(min=0, help="Round trip to add on the target's link.")] = 0.0,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 1,
    target: Annotated[str | None, typer.Option(metavar="M", help="Folder or hub id of the target.")] = None,
    draft: Annotated[str | None, typer.Option(metavar="M", help="Folder or hub id of the draft.")] = None,
) -> None:
    """Record the spans of one generation over two local workers."""
    require_bench_extra()
    pair = chosen_pair(target, draft)
    settings = TraceSettings(mode, rtt_ms, new_tokens, threads, pair)
    with report.Progress(report.new_console()).running("trace", NUM_STEPS) as tick:
        result = run(settings, output, tick)
    report.emit({"benchmark": "trace", "output": str(output), "num_rounds": result.num_rounds}, None)
