"""`python -m tools.house`: print the table; the exit status is 1 if a bar is missed."""

from __future__ import annotations

import argparse
import sys

from tools.house import imports, prose, route, sizes, testing
from tools.house.measure import table

_SHOWN = 8


def main() -> int:
    """Measure what was asked for, print it, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__)
    parser.add_argument("--static", action="store_true", help="leave out the route, which runs the embedded pair")
    parser.add_argument("--route", metavar="MODE", choices=route.BARS, help="measure this mode's route alone")
    parser.add_argument("--calls", action="store_true", help="with --route: list functions by their calls a round")
    parser.add_argument("--all", action="store_true", help="list every place that misses a bar")
    asked = parser.parse_args()
    if asked.calls or asked.route:
        print(route.listing(asked.route or "plain"))
        return 0
    measures = [*sizes.measures(), *prose.measures(), *imports.measures(), *testing.measures()]
    if not asked.static:
        measures += route.measures()
    print(table(measures, None if asked.all else _SHOWN))
    return any(not measure.is_met for measure in measures)


if __name__ == "__main__":
    sys.exit(main())
