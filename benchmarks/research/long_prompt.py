"""Measures how long readers wait for their next tokens while a long prompt of somebody else is forwarded.

Readers stream from a target in a process of its own. A turn is as long a time without the prompt as it then takes. A
wait that was under way when the prompt came, or was not over when it was done, counts among those with the prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import provenance
from benchmarks.peers.ours_remote import worker
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.settings import Pair
from benchmarks.statistics import estimate, median, quantile
from benchmarks.workloads import CODE, load
from specsplit.client import Client
from specsplit.core.defaults import EMBEDDED, Mode
from specsplit.model.extra import require_worker_extra

BOUND = 2.0
"""Largest ratio of the 99th percentiles of the waits, with the prompt and without."""
_NEW_TOKENS = 200
_WARM_UP_S = 3.0
_SETTLE_S = 0.5
"""Waits that the prompt began to lengthen end a little after it."""
Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LongPromptSettings:
    """Who reads, and what comes between."""

    target: str
    draft: str | None
    mode: Mode
    threads: int
    num_readers: int
    num_prompt_tokens: int
    num_turns: int
    temperature: float
    local_stages: int = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """The readers' waits in milliseconds, and the seconds that the prompt took."""

    without_ms: list[float]
    with_ms: list[float]
    prompt_s: float


class _Readers:
    """Clients that generate one answer after another, and note when tokens come."""

    def __init__(self, client: Client, settings: LongPromptSettings) -> None:
        self._client, self._settings = client, settings
        self.waits: list[tuple[float, float]] = []
        """Begin and end of each wait for tokens behind the first ones of an answer."""
        self._prompts = itertools.cycle([prompt.text for prompt in load(CODE, None)])
        self._seeds = itertools.count(1)

    async def read(self) -> None:
        """Read answers until cancelled."""
        while True:
            stream = self._client.stream(
                next(self._prompts),
                max_new_tokens=_NEW_TOKENS,
                ignore_eos=True,
                temperature=self._settings.temperature,
                seed=next(self._seeds),
            )
            last_s = None
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    now_s = time.perf_counter()
                    if last_s is not None and chunk.token_ids:
                        self.waits.append((last_s, now_s))
                    if chunk.token_ids:
                        last_s = now_s


def within_ms(waits: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> list[float]:
    """Return the milliseconds of the waits that lie in an interval."""
    return [_ms(begin, end) for begin, end in waits if begin >= begin_s and end <= end_s]


def meeting_ms(waits: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> list[float]:
    """Return the milliseconds of the waits of which a part lies in an interval."""
    return [_ms(begin, end) for begin, end in waits if begin < end_s and end > begin_s]


def _ms(begin_s: float, end_s: float) -> float:
    return round((end_s - begin_s) * 1e3, 2)


async def _turns(settings: LongPromptSettings, addresses: Sequence[str], tick: Tick) -> list[Turn]:
    async with Client(*addresses, mode=settings.mode) as client:
        readers = _Readers(client, settings)
        tasks = [asyncio.ensure_future(readers.read()) for _ in range(settings.num_readers)]
        try:
            return await _measure(settings, client, readers, tick)
        finally:
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):  # a reader that fell silent would have waited for nothing
                    raise ended


async def _measure(settings: LongPromptSettings, client: Client, readers: _Readers, tick: Tick) -> list[Turn]:
    turns: list[Turn] = []
    length_s = _WARM_UP_S
    for index in range(settings.num_turns + 1):
        began_s = time.perf_counter()
        await asyncio.sleep(length_s)
        prompt_began_s = time.perf_counter()
        # No two begin alike: none finds its rows in the cache.
        token_ids = [100 + index, *itertools.islice(itertools.cycle(range(200, 1200)), settings.num_prompt_tokens - 1)]
        await client.generate(token_ids, max_new_tokens=1, mode="plain")
        ended_s = time.perf_counter()
        await asyncio.sleep(_SETTLE_S)
        length_s = ended_s - prompt_began_s
        without_ms = within_ms(readers.waits, began_s, prompt_began_s)
        turns.append(Turn(without_ms, meeting_ms(readers.waits, prompt_began_s, ended_s), length_s))
        tick("turn")
    # The first one only tells how long a prompt takes.
    return turns[1:]


def _p99(waits_ms: Sequence[float]) -> float:
    return quantile(waits_ms, 0.99)


@app.command("long-prompt")
def main(
    target: Annotated[str, typer.Option(help="Folder or hub id; one of `inflate` makes a forward long enough.")],
    draft: Annotated[str | None, typer.Option(help="Folder or hub id of a draft.")] = None,
    mode: Annotated[Mode, typer.Option(help="The readers' mode.")] = "plain",
    threads: Annotated[int, typer.Option(min=1, help="Of the target.")] = 1,
    readers: Annotated[int, typer.Option(min=1, help="Streams that are read.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 4000,
    turns: Annotated[int, typer.Option(min=1, help="How often it is sent.")] = 7,
    temperature: Annotated[float, typer.Option(min=0, help="The readers'.")] = 1.0,
    local_stages: Annotated[int, typer.Option(min=1, help="Stages that the target is cut into.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)] = None,
) -> None:
    """Measure how long streams wait while a long prompt of somebody else is forwarded."""
    report.check_output(output)
    require_worker_extra()
    console = report.new_console()
    settings = LongPromptSettings(
        target, draft, mode, threads, readers, prompt_tokens, turns, temperature, local_stages
    )
    pair = Pair(target=target, draft=draft or EMBEDDED)
    with ExitStack() as scope:
        options = ("--sessions", str(readers + 1))
        cut = ("--local-stages", str(local_stages)) if local_stages > 1 else ()
        workers = [worker("target", threads, pair, *options, *cut)]
        if draft is not None:
            workers.append(worker("draft", threads, pair, *options))
        for each in workers:
            scope.callback(each.end)
        addresses = [each.wait_ready() for each in workers]
        with report.Progress(console).running("long prompt", turns + 1) as tick:
            found = asyncio.run(_turns(settings, addresses, tick))
    ratio = estimate([_p99(turn.with_ms) / _p99(turn.without_ms) for turn in found])
    listed = report.table("Waits for the next tokens, ms", "", "p50", "p99")
    for name, waits_ms in (
        ("without the prompt", list(itertools.chain.from_iterable(turn.without_ms for turn in found))),
        ("with it", list(itertools.chain.from_iterable(turn.with_ms for turn in found))),
    ):
        listed.add_row(name, f"{quantile(waits_ms, 0.5):.1f}", f"{_p99(waits_ms):.1f}")
    console.print(listed)
    verdict = "met" if ratio.median <= BOUND else "MISSED"
    console.print(f"p99 with / without: {ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] <= {BOUND:g}: {verdict}")
    console.print(f"The prompt took {median([turn.prompt_s for turn in found]):.2f} s.")
    record = {
        "benchmark": "long-prompt",
        "provenance": provenance(),
        "settings": asdict(settings),
        "ratio": ratio.to_dict(),
        "turns": [asdict(turn) for turn in found],
    }
    report.emit(record, output)
