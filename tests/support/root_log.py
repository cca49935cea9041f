"""The root logger of a test's own process, as it was before once the test is over."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

GRPC = "grpc._cython.cygrpc"


@contextmanager
def root_log() -> Iterator[io.StringIO]:
    """Give what this process logs to stderr, for the length of the block."""
    stream, root, package = io.StringIO(), logging.getLogger(), logging.getLogger("specsplit")
    handlers, levels = root.handlers[:], (root.level, package.level)
    # pytest has the same handlers in all tests of a process, and what is set up in a test reaches them.
    formatters = [handler.formatter for handler in handlers]
    root.handlers = [logging.StreamHandler(stream)]
    try:
        yield stream
    finally:
        logging.captureWarnings(capture=False)
        root.handlers = handlers
        for handler, formatter in zip(handlers, formatters, strict=True):
            handler.setFormatter(formatter)
        root.setLevel(levels[0])
        package.setLevel(levels[1])
        logging.getLogger(GRPC).filters.clear()
