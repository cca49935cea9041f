"""Generates with the specsplit of one checkout, one JSON line in and one out; run as a script in that checkout.

It uses `specsplit.Pipeline` only, which is the same in old and new checkouts, and imports nothing of `benchmarks`.
"""

import json
import sys
from time import perf_counter

from specsplit import Pipeline


def generate(pipeline: Pipeline, request: dict) -> dict:
    """Generate once and return the time with what has to be the same in both checkouts."""
    began_s = perf_counter()
    result = pipeline.generate(request["prompt"], **request["options"])
    wall_s = perf_counter() - began_s
    return {"wall_s": wall_s, "token_ids": list(result.token_ids), "target_forwards": result.target_forwards}


def main() -> None:
    """Open a pipeline with the options of the first line, generate for each line after it."""
    with Pipeline(**json.loads(sys.stdin.readline())["open"]) as pipeline:
        print("{}", flush=True)
        for line in sys.stdin:
            print(json.dumps(generate(pipeline, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
