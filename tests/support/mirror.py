"""A program that writes one line of JSON about the process it runs in, copies stdin to stdout, and exits with 3."""

from __future__ import annotations

import json
import os
import shutil
import sys

import torch

if __name__ == "__main__":
    found = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109 - as text
        "parent": os.getppid(),
        "process": os.getpid(),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(found), flush=True)  # noqa: T201 - its answer
    shutil.copyfileobj(sys.stdin, sys.stdout)
    print("the end", file=sys.stderr)  # noqa: T201 - its answer
    sys.exit(3)
