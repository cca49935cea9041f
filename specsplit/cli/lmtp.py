"""`specsplit lmtp`: start or reach the workers, and speak LMTP with one client over stdin and stdout."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from specsplit.cli import render
from specsplit.cli.logs import set_up_logging
from specsplit.cli.serve import NOT_SETTINGS, tracing
from specsplit.core import event_loop
from specsplit.core.errors import MissingExtra
from specsplit.core.settings import load_settings


def run(given: Mapping[str, Any]) -> int:
    """Run the command with the options `given` on the command line; return its exit code."""
    chosen = {name: value for name, value in given.items() if name not in (*NOT_SETTINGS, "stdio")}
    settings = load_settings(chosen, config=given.get("config"), as_options=True, purpose="gateway").settings
    try:
        from specsplit.assembly.gateway import serving_models
        from specsplit.gateway.lmtp.stdio import serve_stdio
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"specsplit lmtp needs {error.name}: install it with pip install 'specsplit[gateway]'."
        ) from error
    set_up_logging(is_service=True)
    arguments = ("--config", given["config"]) if given.get("config") else ()

    async def serve() -> None:
        async with serving_models(settings, arguments, render.note) as models:
            render.note("LMTP on stdin and stdout: one frame a line.")
            # A client that has left reads nothing any more.
            with contextlib.suppress(BrokenPipeError):
                await serve_stdio(models)

    with tracing(given):
        event_loop.run(serve())
    return 0
