"""The section of the page for a line of `load`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import plots
from benchmarks.report.plots import Plot
from benchmarks.report.sections import warn, warn_if_short
from benchmarks.report.tables import NONE, Record, Section, models_of, shown, spread, threads_of

_THREADS_OF_OLDER = "each worker of a MODE@loopback has as many, so a mode with a draft twice as many as plain decoding"
_RATES = ("load", "tokens/s", "over generate or direct", "over fewest", "over peak", "in limits")
_WAITS = ("load", "ttft ms", "itl ms", "e2e ms", "refused", "refused in ms")


def of_load(record: Record, path: Path, name: str) -> Section:
    """Return the section of a line of `load`: rates, goodput and waits of every system under every load."""
    settings, limits = record["settings"], record["settings"]["limits"]
    section = Section(f"{path.name}: {_title(record)}")
    if not record["is_complete"]:
        section.warn(f"Not whole: {record.get('error') or 'it was interrupted.'}")
    for system, error in record.get("warm_up_errors", {}).items():
        section.warn(f"{system} failed in its warm-up, so its first requests may have been slower: {error}")
    warn(section, record, record)
    place = settings["endpoint"]
    systems = f"The server at {place['url']}" if place else models_of(settings)
    section.text(
        f"{systems}, {threads_of(record, _THREADS_OF_OLDER)}, {settings['sessions']} slots, "
        f"{settings['num_requests']} requests of {shown(settings['lengths'])} new tokens at each number of clients, "
        f"{record['num_rounds']} alternating rounds. In the limits: first token within "
        f"{limits['ttft_s'] * 1e3:g} ms, then {limits['itl_s'] * 1e3:g} ms "
        "a token at most. Over generate: transformers' on batches of as many; over direct: a server over the same "
        "workers without it; over fewest: the fewest clients; over peak: an open loop over the best closed one."
    )
    points: Sequence[Record] = record["points"]
    listed = [(f"{load_name(point)}, {name}", each) for point in points for name, each in point["systems"].items()]
    section.table("Rates, medians with ranges", _RATES, [_rates(*each) for each in listed])
    section.table("Waits, p50/p90/p99 of all rounds", _WAITS, [_waits(*each) for each in listed])
    for point in points:
        wrong = {system: each for system, each in point["texts"].items() if each["num_different"]}
        for system, each in wrong.items():
            told = f"{each['num_different']} of {each['num_compared']} texts differ"
            section.warn(f"{system}, {load_name(point)}: {told} from plain decoding's.")
        for system, each in point["systems"].items():
            if each["num_failed"]:
                section.warn(f"{system}, {load_name(point)}: {each['num_failed']} requests failed: {each['errors'][0]}")
        for system, rounds in point.get("samples", {}).items():
            if not all(rounds):
                section.warn(
                    f"{system}, {load_name(point)}: the closed loops of a round served nothing, so nothing was sent."
                )
    _warn_of_short_answers(section, record)
    for temperature in dict.fromkeys(point["temperature"] for point in points):
        section.add([_plot(name, temperature, [each for each in points if each["temperature"] == temperature])])
    section.origin(record)
    return section


def _warn_of_short_answers(section: Section, record: Record) -> None:
    """Say which systems made fewer tokens than they were asked for, so that their requests took less time."""
    lengths = record["settings"]["lengths"]
    for point in record["points"]:
        for name, rounds in point.get("samples", {}).items():
            done = [each for row in rounds for each in row if each[-1] == "done"]
            made, asked = sum(each[-2] for each in done), sum(lengths[each[0] % len(lengths)] for each in done)
            warn_if_short(section, f"{name}, {load_name(point)}", made, asked)


def _title(record: Record) -> str:
    """Return what tells the line from the others of its file: systems, loads, and the minute in which it began."""
    settings = record["settings"]
    clients = [str(each) for each in dict.fromkeys(point["clients"] for point in record["points"]) if each]
    loads = f"{', '.join(clients)} client{'s' if clients != ['1'] else ''}"
    loads += " and an open loop" if any(point["clients"] is None for point in record["points"]) else ""
    began = record["provenance"]["time"][:16].replace("T", " ")
    return f"{', '.join(settings['systems'])} under {loads}, T {shown(settings['temperatures'])}, {began}"


def load_name(point: Record) -> str:
    """Return the conditions of a load in words."""
    count = point["clients"]
    loop = f"{count} client{'s' if count > 1 else ''}" if count else "open loop"
    return f"T {point['temperature']:g}, {loop}"


def _rates(name: str, system: Record) -> list[str]:
    base = system.get("over_generate") or system.get("over_direct")
    ratios = (base, system.get("over_fewest_clients"), system.get("over_peak"))
    return [name, spread(system["tokens_per_s"], 0), *map(spread, ratios), f"{system['good_share']['median']:.0%}"]


def _waits(name: str, system: Record) -> list[str]:
    waits = [_ms(system[each]) for each in ("ttft_s", "itl_s", "e2e_s")]
    return [name, *waits, f"{system['refused_share']['median']:.0%}", _ms(system["refused_s"])]


def _ms(quantiles: Record | None) -> str:
    return "/".join(f"{value * 1e3:.3g}" for value in quantiles.values()) if quantiles else NONE


def _plot(name: str, temperature: float, points: Sequence[Record]) -> Plot:
    closed = [point for point in points if point["clients"]]
    systems = list(closed[0]["systems"])
    series = {
        each: [(point["clients"], point["systems"][each]["tokens_per_s"]) for point in closed] for each in systems
    }
    title = f"Tokens per second over clients, T {temperature:g}"
    return Plot(
        f"{name}-clients-{temperature:g}".replace(".", "-"), title, plots.lines(title, series, "clients", "tokens/s")
    )
