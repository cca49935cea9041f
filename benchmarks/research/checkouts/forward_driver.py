"""Times forwards of one target with the specsplit of one checkout, one JSON line in and one out; run as a script there.

It uses the loader and the runner only, which are the same in checkouts since the second house.
"""

import json
import random
import resource
import sys
from pathlib import Path
from time import perf_counter

import torch

from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import load_model

_REPEATS = 3


def main() -> None:
    """Load the model of the first line, time a step for each line after it."""
    options = json.loads(sys.stdin.readline())
    began_s = perf_counter()
    loaded = load_model(options.pop("model"), role="target", **options)
    load_s = perf_counter() - began_s
    rss_mib = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    torch.set_num_threads(options["threads"])
    exactness = getattr(loaded.runner, "exactness", "near ties")
    print(json.dumps({"load_s": load_s, "rss_mib": rss_mib, "exactness": exactness}), flush=True)
    ids = [random.Random(0).randrange(loaded.vocab_size) for _ in range(loaded.context)]
    held = 0
    for line in sys.stdin:
        step = json.loads(line)
        base, rows, wanted = step["context"], step["rows"], step["rows"] if step["rows"] <= 16 else 1
        while held < base:
            count = min(512, base - held)
            loaded.runner.forward([SequenceInput(0, held, ids[held : held + count])])
            held += count
        times = []
        for _ in range(_REPEATS if rows <= 16 else 1):
            began_s = perf_counter()
            loaded.runner.forward([SequenceInput(0, base, ids[:rows], num_logits=wanted)])
            times.append(perf_counter() - began_s)
        print(json.dumps({"seconds": min(times)}), flush=True)


if __name__ == "__main__":
    main()
