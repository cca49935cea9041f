"""The page: files to sections, sections to HTML that asks nothing of the network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchmarks import results_file
from benchmarks.environment import require_clean
from benchmarks.report import plots, sections
from benchmarks.report.plots import DARK, LIGHT, Palette, Plot
from benchmarks.report.tables import Section
from benchmarks.research import sections as studies
from benchmarks.research.calibration.section import of_calibration
from benchmarks.research.cells_section import of_cells
from benchmarks.research.drafts.section import of_draft_kinds
from benchmarks.research.load_section import of_load
from benchmarks.research.rounds.section import of_profile
from benchmarks.results_file import RUN, SWEEP
from specsplit.core.errors import InvalidRequest, InvalidSettings

TEMPLATE = Path(__file__).with_name("page.html.j2")
Record = Mapping[str, Any]
_OF_LINE: dict[str, Callable[[Record, Path, str], Section]] = {
    "smoke": of_cells,
    "bars": of_cells,
    "load": of_load,
    "profile": of_profile,
    **studies.OF_LINE,
}
_OF_FILE: dict[str, Callable[[Path, str], Section]] = {
    "run": lambda path, name: sections.of_run(results_file.read(path, RUN), name),
    "sweep": lambda path, name: sections.of_sweep(results_file.read(path, SWEEP), name),
    "calibration": of_calibration,
    "draft_kinds": of_draft_kinds,
}
_KINDS = f"a results file of {', '.join((*_OF_FILE, *_OF_LINE))}"
_LINE = TypeAdapter(dict[str, Any])
_LINES_OF_THEIR_OWN = ("bars", "load", "coupling_study", "stage_sessions", "exactness", "long-prompt", "draft-window")
"""Kinds whose files have a section per line; in files of the others the last line counts."""


def build(files: Sequence[Path], tick: Callable[[str], None], *, needs_commit: bool = True) -> list[Section]:
    """Return the sections of the files.

    Raises:
        InvalidRequest: a file is missing, damaged or no results file; or, if it `needs_commit`, it was measured with
            changes that are in no commit.
    """
    found: list[Section] = []
    used: set[str] = set()
    for path in files:
        name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-") or "file"
        found += _sections(path, _first_line(path), partial(_unique, name, used), needs_commit=needs_commit)
        tick(path.name)
    return found


def _unique(name: str, used: set[str]) -> str:
    """Return the name, with a number behind it if another section has it: the plots' files and ids begin with it."""
    numbered = (f"{name}-{number}" for number in count(2))
    free = name if name not in used else next(each for each in numbered if each not in used)
    used.add(free)
    return free


def _sections(path: Path, first: Record, new_name: Callable[[], str], *, needs_commit: bool) -> list[Section]:
    kind = str(first.get("kind") if first.get("kind") in _OF_FILE else first.get("benchmark"))
    if kind not in (*_OF_FILE, *_OF_LINE):
        raise InvalidRequest(f"{path} is not {_KINDS}.", param="file")
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        chosen = lines if kind in (*_OF_FILE, *_LINES_OF_THEIR_OWN) else lines[-1:]
        if needs_commit:
            require_clean(path, [json.loads(line)["provenance"] for line in chosen if '"provenance"' in line])
        if kind in _OF_FILE:
            return [_OF_FILE[kind](path, new_name())]
        return [_OF_LINE[kind](json.loads(line), path, new_name()) for line in chosen]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"The last line of {path} is damaged; measure again.", param="file") from error


def _first_line(path: Path) -> Record:
    line = results_file.content_of(path).partition(b"\n")[0]
    try:
        return _LINE.validate_json(line)
    except ValueError as error:
        raise InvalidRequest(f"{path} is not {_KINDS}.", param="file") from error


def render(found: Sequence[Section], tick: Callable[[str], None]) -> str:
    """Return the page."""
    from jinja2 import Environment
    from markupsafe import Markup

    def svg(plot: Plot) -> Markup:
        drawn = plots.inline_svg(plot)
        tick(plot.name)
        return Markup(drawn)  # our own drawing; its title is escaped there

    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(sections=found, svg=svg, light=_variables(LIGHT), dark=_variables(DARK)) + "\n"


def _variables(palette: Palette) -> str:
    facts = {"--paper": palette.paper, "--ink": palette.ink, "--faint": palette.faint}
    facts |= {f"--series-{index}": colour for index, colour in enumerate(palette.series)}
    return " ".join(f"{name}: {colour};" for name, colour in facts.items())


def write(page: str, output: Path) -> None:
    """Write the page whole or not at all.

    Raises:
        InvalidSettings: it cannot be written.
    """
    scratch = output.with_name(f".{output.name}.part")
    try:
        scratch.write_text(page, encoding="utf-8")
        scratch.replace(output)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise InvalidSettings(f"The report {output} cannot be written ({error.strerror}); check --output.") from error
