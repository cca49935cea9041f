"""`specsplit top` itself: reads the statistics of workers, look after look, and shows them with rates in between."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from specsplit.assembly.worker_links import worker_links
from specsplit.cli.doctor_services import unreachable
from specsplit.cli.render import visible
from specsplit.core.errors import InvalidSettings, SpecSplitError, WorkerUnreachable
from specsplit.core.settings import Settings, load_settings
from specsplit.engine import event_loop
from specsplit.rpc.credentials import open_security, says_how
from specsplit.rpc.worker_statistics import StatisticsReader, StatisticsReading, StatisticsRole
from specsplit.telemetry.statistics import StepCounts, TreeCounts

if TYPE_CHECKING:
    from rich.table import Table

State = Literal["ok", "older", "unreachable"]
ROLES: tuple[StatisticsRole, ...] = ("target", "draft", "stage")
_LEAST_TIMEOUT_S = 2.0
_OLDER = "is of an older release, which tells no statistics"
_UNKNOWN, _FILE_WIDTH = "-", 160


@dataclass(frozen=True, slots=True)
class View:
    """How often to look, and what to print."""

    interval_s: float = 1.0
    is_once: bool = False
    is_json: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One worker at one look. Rates are since the look before, or since it began if there was none; None if unknown."""

    role: StatisticsRole
    address: str
    state: State = "ok"
    detail: str = ""
    """The reason, if the state is not ok."""
    model: str = ""
    version: str = ""
    layers: str = ""
    uptime_s: float = 0.0
    num_sessions: int | None = 0
    """None for a stage, as is `num_slots_warm`: it cannot tell slots of open sessions from warm ones."""
    num_slots: int = 0
    num_slots_used: int = 0
    num_slots_warm: int | None = 0
    num_waiting: int = 0
    num_running: int = 0
    used_bytes: int = 0
    """0 if unknown, as is `budget_bytes`, which all slots in full take without a budget."""
    budget_bytes: int = 0
    steps_per_s: float | None = None
    busy_share: float | None = None
    rows_per_step: float | None = None
    sessions_per_step: float | None = None
    tokens_per_s: float | None = None
    """Tokens that a target commits, or nodes that a draft offers; None for a stage."""
    mean_acceptance_length: float | None = None
    """1 + accepted tokens per verdict on a tree."""
    acceptance_rate: float | None = None
    """Accepted nodes / verified nodes."""
    num_reused_tokens: int = 0
    num_refused: int = 0
    num_preempted: int = 0


def run(
    given: Mapping[StatisticsRole, Sequence[str] | None],
    view: View,
    config: str | None = None,
    chosen: Mapping[str, Any] | None = None,
) -> int:
    """Watch the workers at the addresses `given`, or at those of the settings; return the exit code.

    `chosen` are the options of the command line about certificates.

    Raises:
        InvalidSettings: no address at all; InvalidRequest: a malformed one.
    """
    named: list[tuple[StatisticsRole, str]] = [(role, address) for role in ROLES for address in given[role] or ()]
    settings = load_settings(chosen, config=config, as_options=True, purpose="check").settings
    addresses = named or _configured(settings)
    if not addresses:
        raise InvalidSettings("There is nothing to watch: name workers with --target, --draft or --stage HOST:PORT.")
    # Counters are for every role, so a gateway's settings do for whoever looks from its pod.
    links_of = settings.orchestrator if says_how(settings.orchestrator) else settings.gateway
    security = open_security(links_of, None)
    readers = [StatisticsReader(role, address, security) for role, address in addresses]
    try:
        return event_loop.run(_watch(readers, view))
    except KeyboardInterrupt:  # the usual end of a live view
        return 0


def _configured(settings: Settings) -> list[tuple[StatisticsRole, str]]:
    links = worker_links(settings)
    found: list[tuple[StatisticsRole, str | None]] = [
        *(("target", address) for link in links for address in link.targets),
        *(("draft", link.draft) for link in links),
        ("target", settings.target.address),
        ("draft", settings.draft.address),
        *(("stage", address) for address in settings.target.stages),
    ]
    return list(dict.fromkeys((role, address) for role, address in found if address is not None))


async def _watch(readers: Sequence[StatisticsReader], view: View) -> int:
    try:
        async with aclosing(_looks(readers, view)) as looks:
            rows: list[Row] = []
            shown = _show_json if view.is_json else _show_once if view.is_once or not sys.stdout.isatty() else None
            if shown is None:
                await _show_live(looks)
                return 0
            async for rows in looks:
                shown(rows)
            return 1 if any(row.state == "unreachable" for row in rows) else 0
    finally:
        await asyncio.gather(*(reader.aclose() for reader in readers))


async def _looks(readers: Sequence[StatisticsReader], view: View) -> AsyncGenerator[list[Row]]:
    """Yield all rows at every look: one with rates if it is for once, else without end."""
    timeout_s = max(view.interval_s, _LEAST_TIMEOUT_S)
    before: list[StatisticsReading | Row] | None = None
    while True:
        readings = await asyncio.gather(*(_read(reader, timeout_s) for reader in readers))
        if before is not None or not view.is_once:
            yield [_row(*pair) for pair in zip(readers, before or readings, readings, strict=True)]
            if view.is_once:
                return
        before = readings
        await asyncio.sleep(view.interval_s)


async def _read(reader: StatisticsReader, timeout_s: float) -> StatisticsReading | Row:
    """Return the answer of a worker, or the row that says why there is none."""
    try:
        reading = await reader.read(timeout_s)
    except SpecSplitError as error:
        if isinstance(error, WorkerUnreachable):
            error = await unreachable(error, reader.address, reader.role, reader.security)
        return Row(reader.role, reader.address, "unreachable", str(error))
    return reading or Row(reader.role, reader.address, "older", f"The {reader.role} at {reader.address} {_OLDER}.")


def _row(reader: StatisticsReader, before: StatisticsReading | Row, now: StatisticsReading | Row) -> Row:
    if isinstance(now, Row):
        return now
    # A worker that was restarted, or is seen for the first time, has its rates since it began.
    is_new = isinstance(before, Row) or before is now or before.uptime_s >= now.uptime_s
    since_s, steps, trees = 0.0, StepCounts(), TreeCounts()
    if not is_new:
        earlier = cast(StatisticsReading, before)
        since_s, steps, trees = earlier.uptime_s, earlier.statistics.steps, earlier.statistics.trees
    held, elapsed_s, is_stage = now.statistics, now.uptime_s - since_s, reader.role == "stage"
    num_steps = held.steps.num_steps - steps.num_steps
    num_tree_rounds = held.trees.num_tree_rounds - trees.num_tree_rounds
    num_nodes, num_accepted = held.trees.num_nodes - trees.num_nodes, held.trees.num_accepted - trees.num_accepted
    produced = {"target": held.trees.num_tokens - trees.num_tokens, "draft": num_nodes}.get(reader.role)
    return Row(
        role=reader.role,
        address=reader.address,
        model=held.model,
        version=now.version,
        layers=f"{held.layers[0]}:{held.layers[1]}" if held.layers is not None else "",
        uptime_s=now.uptime_s,
        num_sessions=None if is_stage else held.num_sessions,
        num_slots=held.num_slots,
        num_slots_used=held.num_slots_used,
        num_slots_warm=None if is_stage else held.num_slots_warm,
        num_waiting=held.num_waiting,
        num_running=held.num_running,
        used_bytes=held.used_bytes,
        budget_bytes=held.budget_bytes,
        steps_per_s=_ratio(num_steps, elapsed_s),
        busy_share=_ratio(held.steps.busy_s - steps.busy_s, elapsed_s),
        rows_per_step=_ratio(held.steps.num_rows - steps.num_rows, num_steps),
        sessions_per_step=_ratio(held.steps.num_sequences - steps.num_sequences, num_steps),
        tokens_per_s=_ratio(produced, elapsed_s) if produced is not None else None,
        mean_acceptance_length=1 + num_accepted / num_tree_rounds if num_tree_rounds else None,
        acceptance_rate=_ratio(num_accepted, num_nodes) if reader.role == "target" else None,
        num_reused_tokens=held.num_reused_tokens,
        num_refused=held.num_refused,
        num_preempted=held.num_preempted,
    )


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole > 0 else None


def _show_json(rows: Sequence[Row]) -> None:
    sys.stdout.write(json.dumps({"workers": [asdict(row) for row in rows]}) + "\n")
    sys.stdout.flush()


def _show_once(rows: Sequence[Row]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    console.print(_table(rows))
    for row in rows:
        if row.state != "ok":
            console.print(visible(row.detail), markup=False, highlight=False, soft_wrap=True)
    sys.stdout.flush()


async def _show_live(looks: AsyncGenerator[list[Row]]) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as live:
        async for rows in looks:
            troubles = [Text(visible(row.detail)) for row in rows if row.state != "ok"]
            live.update(Group(_table(rows), *troubles, Text("Ctrl-C ends.", style="dim")), refresh=True)


def _table(rows: Sequence[Row]) -> Table:
    from rich.table import Table

    names = ("sessions", "queue", "slots", "KV", "steps/s", "rows/step", "busy", "tokens/s", "accepted", "reused")
    table = Table(box=None, pad_edge=False)
    table.add_column("worker", no_wrap=True)
    table.add_column("model", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        role = f"{row.role} {row.layers}".strip()
        where = f"{role} {row.address}".replace("[", "\\[")
        table.add_row(where, *(_cells(row) if row.state == "ok" else (row.state,)))
    return table


def _cells(row: Row) -> list[str]:
    warm = f" +{row.num_slots_warm} warm" if row.num_slots_warm else ""
    if row.num_slots_warm is None:
        warm = " open or warm"
    length = row.mean_acceptance_length
    return [
        visible(row.model).replace("[", "\\["),
        str(row.num_sessions) if row.num_sessions is not None else _UNKNOWN,
        str(row.num_waiting),
        f"{row.num_slots_used}/{row.num_slots}{warm}",
        _bytes(row),
        _shown(row.steps_per_s),
        _shown(row.rows_per_step),
        f"{row.busy_share:.0%}" if row.busy_share is not None else _UNKNOWN,
        _shown(row.tokens_per_s),
        f"{length:.2f} a round" if length is not None else _UNKNOWN,
        str(row.num_reused_tokens),
    ]


def _shown(value: float | None) -> str:
    return f"{value:.1f}" if value is not None else _UNKNOWN


def _bytes(row: Row) -> str:
    if not row.used_bytes and not row.budget_bytes:
        return _UNKNOWN
    used, gib = row.used_bytes / 2**30, row.budget_bytes / 2**30
    return f"{used:.2f}/{gib:.2f} GiB" if row.budget_bytes else f"{used:.2f} GiB"
