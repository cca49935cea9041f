"""What of the package's log reaches stderr: a service's warnings and failures, and with SPECSPLIT_DEBUG everything.

A command that answers its user says the same in its own words, so there the log is silent.
"""

from __future__ import annotations

import logging
import os

from specsplit.core.defaults import ENV_DEBUG

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def is_debugging() -> bool:
    return os.environ.get(ENV_DEBUG, "0") not in ("", "0")


def set_up_logging(*, is_service: bool) -> None:
    """Send the log to stderr, or nowhere; a root logger that has a handler already keeps what it has."""
    if is_service or is_debugging():
        logging.basicConfig(level=logging.INFO if is_debugging() else logging.WARNING, format=_FORMAT)
        return
    logger = logging.getLogger("specsplit")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
