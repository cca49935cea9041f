"""`specsplit lmtp`: start or reach the workers, and speak LMTP with one client over stdin and stdout."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from specsplit.assembly.generation_settings import generation_settings
from specsplit.assembly.models import check_models
from specsplit.cli.gateway import gateway_extra, note_unused, worker_arguments
from specsplit.cli.logs import note, set_up_logging
from specsplit.cli.serve import NOT_SETTINGS
from specsplit.cli.spared import spare
from specsplit.cli.tracing import tracing
from specsplit.core.errors import InvalidSettings
from specsplit.engine import event_loop

_FOR_SERVE = ("gateway.metrics", "gateway.health", "gateway.drain")
"""Settings of `serve` for which there is nothing to do here."""


def run(given: Mapping[str, Any], *, owns_process: bool = False) -> int:
    """Run the command with the options `given` on the command line; return its exit code."""
    chosen = {name: value for name, value in given.items() if name not in (*NOT_SETTINGS, "stdio")}
    effective = generation_settings(chosen, config=given.get("config"), as_options=True, purpose="gateway")
    settings = effective.settings
    # Closed by whoever started this; if that was a shell, `main` has opened /dev/null as the first two.
    if None in (sys.stdin, sys.stdout, sys.__stdin__, sys.__stdout__):
        raise InvalidSettings("LMTP over --stdio needs an open stdin and stdout, and one of them is closed.")
    check_models(settings)  # before the HTTP server is imported, which takes a second
    if owns_process:
        spare("torch")  # models run in processes of their own
    with gateway_extra("lmtp"):
        from specsplit.assembly.gateway import serving_models
        from specsplit.gateway.lmtp.message_log import message_log
        from specsplit.gateway.lmtp.session import LmtpServer
        from specsplit.gateway.lmtp.stdio import serve_stdio, write_status
    set_up_logging(settings.gateway, "gateway")
    # No error: one settings file, or the environment of one container, may be for `serve` as well.
    unused = [origin.name for key in _FOR_SERVE if (origin := effective.origins.get(key)) is not None]
    if unused:
        note(f"Not used by lmtp, which opens no port and ends with its client: {', '.join(unused)}.")
    note_unused(effective)
    arguments = worker_arguments(given, settings.gateway)

    async def serve() -> None:
        async with serving_models(settings, arguments, note) as models:
            note("LMTP on stdin and stdout: one frame a line.")
            write_status("ready", models=[model.name for model in models.ready])
            await serve_stdio(LmtpServer(models, log=log))

    chosen_log = settings.gateway.log_messages, settings.gateway.log_prompts
    with tracing(given, "gateway"), message_log(chosen_log[0], shows_prompts=chosen_log[1]) as log:
        write_status("loading")
        event_loop.run(serve())
    return 0
