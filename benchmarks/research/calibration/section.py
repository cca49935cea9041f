"""The section of a file of `calibration`: a reliability diagram per run, and how well each estimate tells right nodes.

Measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import is_clean
from benchmarks.report.plots import Plot
from benchmarks.report.tables import NONE, Section, number
from benchmarks.research.calibration.diagram import reliability
from benchmarks.research.calibration.merits import title_of
from benchmarks.results_file import SCHEMA
from specsplit.core.errors import InvalidRequest

Record = Mapping[str, Any]
KIND = "calibration"
_NAMES = {
    "calibrated": "calibrated",
    "frozen": "calibrated, first half's table",
    "sent": "sent by the draft",
    "own": "draft's own probability",
}
_METRICS = {"auc": "AUC", "ece": "calibration error", "brier": "Brier score"}
_PARTS = {"drafted": "all prompts", "second_half": "second half of the prompts"}


def read(path: Path) -> list[Record]:
    """Return the records of a file; a last line that was cut off is left out.

    Raises:
        InvalidRequest: it cannot be read, has another schema, or a line is damaged.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        found: list[Record] = [json.loads(line) for line in lines if line]
        schemas = {record["schema"] for record in found if record["kind"] == KIND}
    except OSError as error:
        raise InvalidRequest(f"The results file {path} cannot be read ({error.strerror}).", param="file") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"A line of {path} is damaged; measure again.", param="file") from error
    if schemas != {SCHEMA} or any(record["kind"] != KIND for record in found):
        raise InvalidRequest(f"{path} has lines that are none of `calibration` with schema {SCHEMA}.", param="file")
    return found


def of_calibration(path: Path, name: str) -> Section:
    """Return the section of a file of `calibration`.

    Raises:
        InvalidRequest: the file is damaged.
    """
    records = read(path)
    section = Section(f"{path.name}: are the estimates right?")
    settings = records[0]["settings"]
    try:
        section.text(
            f"Target {settings['target']}, draft {settings['draft']}: {settings['num_prompts']} prompts that no model "
            f"was trained on, up to {settings['num_new_tokens']} tokens each. Every node that committed tokens decided "
            "counts, verified or not, with the estimate from before those tokens were known, given that its parent is "
            "right. Figures are of the nodes that the draft proposed; intervals are 95 %, over prompts (in the diagram "
            "of a share of independent nodes), and lie high for the calibration error, to which noise only adds. "
            "Greedily, what the draft sends is its own probability."
        )
        if not all(is_clean(record["provenance"]) for record in records):
            section.warn("Measured with changes that are in no commit.")
        _metrics(section, records)
        for place, record in enumerate(records, 1):
            _run(section, record, f"{name}-reliability-{place}")
    except (KeyError, TypeError) as error:
        raise InvalidRequest(f"A line of {path} is damaged; measure again.", param="file") from error
    section.origin(records[0])
    return section


def _metrics(section: Section, records: Sequence[Record]) -> None:
    for part, prompts in _PARTS.items():
        listed: list[Sequence[str]] = []
        for record in records:
            if record[part] is None:
                continue
            found = record[part]
            for estimate, values in found["estimates"].items():
                behind = found["differences"].get(estimate)
                listed.append(
                    (
                        title_of(record),
                        _NAMES[estimate],
                        *(_spread(values[metric]) for metric in _METRICS),
                        _spread(behind["auc"]) if behind is not None else NONE,
                        str(found["num_nodes"]),
                        number(found["share_right"], 3),
                    )
                )
        section.table(
            f"Estimates of the draft's nodes, {prompts}",
            ("run", "estimate", *_METRICS.values(), "AUC of calibrated minus this", "nodes", "right"),
            listed,
        )


def _run(section: Section, record: Record, name: str) -> None:
    """Add the diagram of one run, its bins and its groups."""
    found = record["drafted"]
    title = f"Reliability, {title_of(record)}: {found['num_nodes']} nodes"
    series = {_NAMES[estimate]: values["bins"] for estimate, values in found["estimates"].items()}
    section.add([Plot(name, title, reliability(title, series))])
    section.table(
        f"Bins, {title_of(record)}",
        ("estimate", "nodes", "mean estimate", "right", "from", "to"),
        [
            (
                _NAMES[estimate],
                str(each["count"]),
                *(number(each[key], 3) for key in ("predicted", "observed", "low", "high")),
            )
            for estimate, values in found["estimates"].items()
            for each in values["bins"]
        ],
        is_folded=True,
    )
    section.table(
        f"Kinds of nodes, {title_of(record)}; {record['num_late_nodes']} more came late",
        (
            "",
            "nodes",
            "right",
            *(f"{what}, {_NAMES[name]}" for what in ("mean", "AUC") for name in ("calibrated", "sent", "own")),
        ),
        [
            (
                f"{kind} {each['value']}",
                str(each["num_nodes"]),
                number(each["share_right"], 3),
                *(number(each[name], 3) for name in ("calibrated", "sent", "own")),
                *(number(each["auc"][name], 3) for name in ("calibrated", "sent", "own")),
            )
            for kind, groups in record["groups"].items()
            for each in groups
        ],
        is_folded=True,
    )


def _spread(value: Record | None) -> str:
    return NONE if value is None else f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
