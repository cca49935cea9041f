"""The section of a file of `draft_kinds`: `auto` against plain decoding by kind of draft. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.environment import is_clean
from benchmarks.report.console import BUSY_SHARE
from benchmarks.report.tables import Section, inflated
from benchmarks.research.drafts.kinds import read
from benchmarks.research.drafts.table import row_of
from specsplit.core.errors import InvalidRequest

Record = Mapping[str, Any]


def of_draft_kinds(path: Path, name: str) -> Section:
    """Return the section; of a kind that was measured again, the last record counts.

    Raises:
        InvalidRequest: the file is damaged.
    """
    records = list({record["kind_of_draft"]: record for record in read(path)}.values())
    try:
        return _section(path, records)
    except (KeyError, TypeError) as error:
        raise InvalidRequest(f"A line of {path} is damaged; measure again.", param="file") from error


def _section(path: Path, records: list[Record]) -> Section:
    settings, bounds = records[0]["settings"], records[0]["bounds"]
    section = Section(f"{path.name}: drafts of every kind{inflated(settings)}")
    without_lookup = "" if settings["lookup"] else ", without lookup"
    section.text(
        f"Target {settings['target']}{inflated(settings)}{without_lookup}: {settings['num_prompts']} prompts x "
        f"{settings['num_new_tokens']} tokens, temperature {settings['temperature']:g}, {settings['threads']} threads "
        "of each worker. Auto and plain decoding did every prompt alternately over the same worker processes. A dying "
        "draft is killed in the middle of each generation of auto, a returning one is started again there. Brackets "
        f"are ranges of pairs; the bar, of decoding, is a median >= {bounds['median']:g} and a lowest pair >= "
        f"{bounds['low']:g} of at least {bounds['num_pairs']} pairs."
    )
    shares = [record["neighbours_share"] for record in records if record["neighbours_share"] is not None]
    if max(shares, default=0.0) > BUSY_SHARE:
        section.warn(f"Others used up to {max(shares):.0%} of the processors meanwhile.")
    if not all(is_clean(record["provenance"]) for record in records):
        section.warn("Measured with changes that are in no commit.")
    columns = ("draft", "decoding", "with the prompt", "bar", "pairs", "runs in which the draft computed", "")
    section.table("Auto / plain decoding", columns, map(row_of, records))
    differing = [
        (record["kind_of_draft"], each["system"], each["task"], str(each["position"]), f"{each['margin']:.2g}")
        for record in records
        for each in record["differences"]
    ]
    section.table("Texts that differ from plain decoding's", ("draft", "mode", "task", "at", "margin"), differing)
    section.origin(records[0])
    return section
