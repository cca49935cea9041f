"""Where a study's results come from, and the refusal to keep those that nobody could have again."""

from __future__ import annotations

from pathlib import Path

from benchmarks.environment import is_clean, provenance, require_bench_extra
from benchmarks.report import console as report
from specsplit.core.errors import InvalidRequest


def origin_for(output: Path | None) -> dict[str, object]:
    """Return the provenance of a study, before it measures anything.

    Raises:
        MissingExtra: packages of the extra `bench` are missing.
        InvalidRequest: there is a results file and the checkout has changes, or the file cannot be written.
    """
    require_bench_extra()
    origin = provenance()
    if output is not None and not is_clean(origin):
        raise InvalidRequest("A results file needs a checkout without changes; commit first, or leave out --output.")
    report.check_output(output)
    return origin
