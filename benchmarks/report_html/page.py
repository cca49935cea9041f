"""The page: files to sections, sections to HTML that asks nothing of the network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks import draft_kinds, plots, results_file, sweep_file, trace
from benchmarks.plots import DARK, LIGHT, Palette, Plot
from benchmarks.report_html import draft_kinds as draft_kinds_section
from benchmarks.report_html import sections
from benchmarks.report_html.html import Section
from benchmarks.research.calibration import section as calibration_section
from specsplit.core.errors import InvalidRequest, InvalidSettings

_KINDS = (
    "a results file of `run`, `sweep`, `sweep-tree`, `smoke`, `profile`, `calibration`, `coupling_study`, "
    "`draft_kinds` or `stage_sessions`, nor a trace file"
)
_LINES_OF_THEIR_OWN = ("coupling_study", "stage_sessions")
"""Kinds whose files have a section per line; of others the last line counts."""
_STYLE = """
body { margin: 0 auto; max-width: 72rem; padding: 1rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { margin-top: 3rem; padding-bottom: .3rem; border-bottom: 1px solid var(--faint); }
h4 { margin: 1.5rem 0 .4rem; } a { color: var(--series-0); }
figure { margin: 1.5rem 0; max-width: 52rem; } svg { height: auto; display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--faint); text-align: right; white-space: nowrap; }
tr > :first-child { text-align: left; padding-left: 0; font-weight: 600; }
details { margin: .6rem 0; } summary { cursor: pointer; }
.warning { border-left: 3px solid var(--series-1); padding-left: .7rem; }
""".strip()


def build(files: Sequence[Path], tick: Callable[[str], None]) -> list[Section]:
    """Return a section per file; of trace files one per file that holds a request, with what the others add to it.

    Raises:
        InvalidRequest: a file is missing, damaged or no results file.
    """
    found: list[Section] = []
    traces: list[Path] = []
    used: set[str] = set()
    for path in files:
        first = _first_line(path)
        if trace.is_trace(first):
            traces.append(path)
        else:
            name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-") or "file"
            found += _sections(path, first, _unique(name, used))
        tick(path.name)
    return found + [sections.of_trace(request, traces, _unique("trace", used)) for request in trace.requests(traces)]


def _unique(name: str, used: set[str]) -> str:
    while name in used:
        name += "-2"
    used.add(name)
    return name


def _sections(path: Path, first: Mapping[str, Any], name: str) -> list[Section]:
    if first.get("kind") == "run":
        return [sections.of_run(results_file.read(path), name)]
    if first.get("kind") == sweep_file.KIND:
        return [sections.of_sweep(sweep_file.read(path), name)]
    if first.get("kind") == calibration_section.KIND:
        return [calibration_section.of_calibration(path, name)]
    if first.get("benchmark") == draft_kinds.BENCHMARK:
        return [draft_kinds_section.of_draft_kinds(path)]
    makers = {
        "smoke": sections.of_smoke,
        "sweep-tree": sections.of_tree,
        "profile": sections.of_profile,
        "coupling_study": sections.of_coupling,
        "stage_sessions": sections.of_stage_sessions,
    }
    kind = str(first.get("benchmark"))
    make = makers.get(kind)
    if make is None:
        raise InvalidRequest(f"{path} is not {_KINDS}.", param="file")
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        chosen = lines if kind in _LINES_OF_THEIR_OWN else lines[-1:]
        return [make(json.loads(line), path, name) for line in chosen]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"The last line of {path} is damaged; measure again.", param="file") from error


def _first_line(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            line = file.readline()
    except OSError as error:
        raise InvalidRequest(f"The results file {path} cannot be read ({error.strerror}).", param="file") from error
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{path} is not {_KINDS}.", param="file") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{path} is not {_KINDS}.", param="file")
    return found


def all_plots(found: Sequence[Section]) -> list[Plot]:
    """Return the plots of all sections in order."""
    return [plot for section in found for plot in section.plots]


def render(found: Sequence[Section], tick: Callable[[str], None]) -> str:
    """Return the page."""
    toc = "".join(f'<li><a href="#s{n}">{escape(section.title)}</a></li>' for n, section in enumerate(found))
    body: list[str] = []
    for number, section in enumerate(found):
        body.append(f'<section id="s{number}"><h2>{escape(section.title)}</h2>')
        for part in section.parts:
            if isinstance(part, Plot):
                body.append(f"<figure>{plots.inline_svg(part)}</figure>")
                tick(part.name)
            else:
                body.append(part)
        body.append("</section>")
    style = f":root {{ color-scheme: light dark; {_variables(LIGHT)} }}\n"
    style += f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}\n{_STYLE}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>SpecSplit benchmarks</title><style>{style}</style></head>\n"
        f"<body><h1>SpecSplit benchmarks</h1><p>Ratios travel between machines, tokens per second do not.</p>"
        f"<ul>{toc}</ul>\n{''.join(body)}</body></html>\n"
    )


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
