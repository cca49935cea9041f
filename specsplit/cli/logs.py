"""Sends the package's log to stderr: warnings and failures of a service, and everything if SPECSPLIT_DEBUG is set."""

from __future__ import annotations

import logging
import os

from specsplit.core.defaults import ENV_DEBUG

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def is_debugging() -> bool:
    return os.environ.get(ENV_DEBUG, "0") not in ("", "0")


def set_up_logging(*, is_service: bool) -> None:
    """Send the log to stderr, or nowhere; a root logger that has a handler already keeps it."""
    # A command that answers its user says in its own words what a service would log.
    if is_service or is_debugging():
        logging.basicConfig(level=logging.INFO if is_debugging() else logging.WARNING, format=_FORMAT)
        return
    logger = logging.getLogger("specsplit")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
