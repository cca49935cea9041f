"""Pages of metrics as Prometheus reads them, from ports of real processes; for tests."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import LIMIT_S, ROOT

WITH_THE_FIRST_EVENT = {"specsplit:requests_over_limit_total", "specsplit:resync_total"}
"""Samples that are there when one of their labels has something to count."""
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Values by name and labels."""


def scraped(address: str) -> Samples:
    """Return what the page at an address says, read by Prometheus's own parser."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT_S) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return samples_of(answer.read().decode())


def samples_of(page: str) -> Samples:
    """Return the values of a page."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples), "no sample stands twice"
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    """Return the one value of a name whose labels are at least these."""
    (found,) = (count for (key, own), count in samples.items() if key == name and labels.items() <= own)
    return found


def names(samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]) -> set[str]:
    return {name for name, _ in samples}


def documented(role: str) -> set[str]:
    """Return the samples that docs/observability.md promises for a process: its table's names, without labels."""
    page, _, _ = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8").partition("## The log")
    found: set[str] = set()
    for cells, on, meaning in re.findall(r"^\| (`[a-z].*?`) \| ([a-z, ]+) \| (.*) \|$", page, re.MULTILINE):
        places = {"all": ("gateway", "target", "draft", "stage"), "workers": ("target", "draft"), "stages": ("stage",)}
        places["cut target"] = ("target",)
        if role in [each for place in on.split(", ") for each in places.get(place, (place,))]:
            ending = "_count" if "histogram" in meaning else ""
            found |= {f"specsplit:{name}{ending}" for name in re.findall(r"`([a-z0-9_]+)(?:\{[a-z_,]+\})?`", cells)}
    return found
