"""Draws a request's rounds on a time line in the terminal: a line per round and lane, all to one scale."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size

from specsplit.cli.render import note
from specsplit.cli.trace_file import Span, TracedRequest, covered_ns, read_spans, requests_in, shares, title
from specsplit.core.errors import InvalidSettings
from specsplit.core.paths import expanded

_COMPUTES, _WAITS, _NOTHING = "\N{FULL BLOCK}", "\N{LIGHT SHADE}", " "
_HEAD = 34
"""Columns in front of the bars."""
_LEAST_BAR, _MOST_BAR = 20, 120


def run(files: Sequence[Path], wanted: str | None, num_rounds: int, svg: Path | None) -> int:
    """Print the time line of one request of the files, and write it as a picture to `svg`; return the exit code.

    Raises:
        InvalidSettings: a file cannot be read or written, or there is no such request.
    """
    requests = requests_in(read_spans(files))
    if not requests:
        raise InvalidSettings("No request with a round is in these files; name those of the gateway or orchestrator.")
    chosen = next((each for each in requests if wanted is None or each.is_called(wanted)), None)
    if chosen is None:
        raise InvalidSettings(f"No request, session or trace of these files begins with {wanted}.")
    width = min(max(get_terminal_size().columns - _HEAD, _LEAST_BAR), _MOST_BAR)
    sys.stdout.write("\n".join([*_summary(chosen), *_lines(chosen, num_rounds, width), ""]))
    sys.stdout.flush()
    if len(requests) > 1 and wanted is None:
        note(f"The files have {len(requests) - 1} more requests; --request ID shows another one.")
    if svg is not None:
        from specsplit.cli.trace_svg import drawn

        try:
            expanded(svg).write_text(drawn(chosen), encoding="utf-8")
        except OSError as error:
            raise InvalidSettings(f"{svg} cannot be written ({error.strerror}); name another file.") from error
    return 0


def _summary(request: TracedRequest) -> list[str]:
    lines = [title(request), f"trace {request.span.trace_id}"]
    for lane, computed, waited in shares(request):
        if computed is None:
            lines.append(f"  {lane:<8} no spans of the {lane} in these files; name the file of its --trace as well")
            continue
        waits = f", {waited:4.0%} of it waited for" if lane in ("target", "draft") else ""
        lines.append(f"  {lane:<8} {computed:4.0%} of the time computing{waits}")
    lines.append(f"{_COMPUTES} computes  {_WAITS} waited for: its queue, its sampling and the way")
    return lines


def _lines(request: TracedRequest, num_rounds: int, width: int) -> list[str]:
    shown = request.rounds[:num_rounds] if num_rounds else request.rounds
    # All bars have one scale, so that a round that took long stands out; a prompt's would dwarf the others.
    usual = shown[1:] if len(shown) > 1 else shown
    scale_ns = max(1, *(each.end_ns - each.start_ns for each in usual))
    lines: list[str] = []
    for each in shown:
        end_ns = min(each.end_ns, each.start_ns + scale_ns)
        parts = list(request.during(each.start_ns, each.end_ns))
        lanes = [lane for lane in request.lanes if any(part.lane == lane for part in parts)]
        cut = ">" if end_ns < each.end_ns else ""
        num_cells = max(1, round(width * (end_ns - each.start_ns) / scale_ns))
        for place, lane in enumerate(lanes or [""]):
            bar = _bar([part for part in parts if part.lane == lane], each.start_ns, end_ns, num_cells)
            lines.append(f"{_named(each) if place == 0 else '':<24}{lane:>9} {bar}{cut}".rstrip())
    left = len(request.rounds) - len(shown)
    return [*lines, f"{left} more rounds; --rounds 0 shows all."] if left else lines


def _named(each: Span) -> str:
    attributes = each.attributes
    accepted = f"{attributes.get('accepted', 0)}/{attributes.get('nodes', 0)}"
    return f"{attributes.get('round', '?'):>4} {accepted:>7} {(each.end_ns - each.start_ns) / 1e6:8.2f} ms"


def _bar(parts: Sequence[Span], start_ns: int, end_ns: int, num_cells: int) -> str:
    """Return one lane of a round; a cell shows what fills most of its time."""
    cells: list[str] = []
    for cell in range(num_cells):
        begin = start_ns + (end_ns - start_ns) * cell // num_cells
        end = max(begin + 1, start_ns + (end_ns - start_ns) * (cell + 1) // num_cells)
        here = [part for part in parts if part.start_ns < end and part.end_ns > begin]
        computed = covered_ns([part for part in here if part.is_computing], begin, end)
        if 2 * computed >= end - begin:
            cells.append(_COMPUTES)
        else:
            cells.append(_WAITS if 2 * covered_ns(here, begin, end) >= end - begin else _NOTHING)
    return "".join(cells)
