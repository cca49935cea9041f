"""`specsplit stage`: load some layers of a target, serve them, print the address, and drain at a signal."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from specsplit.assembly.named_settings import check_insecure, check_memory
from specsplit.cli.logs import set_up_logging
from specsplit.cli.print_config import print_config
from specsplit.cli.serve import (
    NOT_SETTINGS,
    check_service,
    described,
    end_with_parent,
    serve_until_signal,
    terminable,
)
from specsplit.cli.tracing import tracing
from specsplit.core.errors import InvalidSettings
from specsplit.core.settings import load_settings
from specsplit.engine import event_loop
from specsplit.model.source import check_source
from specsplit.stages.loading import load_stage
from specsplit.stages.serve import serving_stage


def run(given: Mapping[str, Any]) -> int:
    """Run the command with the options `given` on the command line; return its exit code."""
    end_with_parent(given)
    chosen = {name: value for name, value in given.items() if name not in NOT_SETTINGS}
    effective = load_settings(chosen, config=given.get("config"), as_options=True, purpose="stage")
    if given.get("print_config"):
        print_config(effective, as_json=False, roles=("stage",))
        return 0
    settings = effective.settings.stage
    set_up_logging(settings, "stage")
    if settings.layers is None:
        raise InvalidSettings("A stage needs to know its layers: name them with --layers A:B, such as --layers 0:12.")
    check_source(settings.model, "target")
    check_memory(effective, "stage")
    check_insecure(effective, "stage")
    check_service(settings, "stage")
    with tracing(given, "stage"):
        # Loading takes minutes, so Ctrl-C and SIGTERM have to end it, too.
        with terminable():
            shard = load_stage(settings)
        ready = {"role": "stage", "model": shard.name, "layers": settings.layers}
        return event_loop.run(
            serve_until_signal(lambda: serving_stage(shard, settings), partial(described, ready), settings.drain)
        )
