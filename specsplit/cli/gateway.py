"""`specsplit serve`: start or reach the workers, serve HTTP over them, print the address, and drain at a signal."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from specsplit.assembly.generation_settings import generation_settings
from specsplit.assembly.models import check_models
from specsplit.cli.logs import note, set_up_logging
from specsplit.cli.ports import check_ports
from specsplit.cli.print_config import print_config
from specsplit.cli.serve import NOT_SETTINGS, serve_until_signal
from specsplit.cli.spared import spare
from specsplit.cli.tracing import tracing
from specsplit.core.errors import InvalidSettings, MissingExtra
from specsplit.engine import event_loop

if TYPE_CHECKING:
    from specsplit.assembly.gateway import RunningGateway
    from specsplit.core.sections import GatewaySettings
    from specsplit.core.settings import EffectiveSettings

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_OF_REQUESTS = (
    *("max_new_tokens", *_SAMPLING, "logit_bias", "logprobs", "seed", "stop", "ignore_eos"),
    *("chat", "chat_template_kwargs", "priority"),
)
"""Settings of the orchestrator that are values of a request: a gateway takes them from its clients alone."""


def run(given: Mapping[str, Any], *, owns_process: bool = False) -> int:
    """Run the command with the options `given` on the command line; return its exit code."""
    given = _with_model(given)
    chosen = {name: value for name, value in given.items() if name not in NOT_SETTINGS}
    effective = generation_settings(chosen, config=given.get("config"), as_options=True, purpose="gateway")
    if given.get("print_config"):
        print_config(effective, as_json=False)
        return 0
    settings = effective.settings
    # Before the HTTP server is imported, which takes a second, and before workers would make the same complaint.
    check_models(settings)
    if owns_process:
        spare("torch")  # models run in processes of their own
    with gateway_extra("serve"):
        from specsplit.assembly.gateway import serving_gateway
    set_up_logging(settings.gateway, "gateway")
    chosen = settings.gateway
    check_ports(http=chosen.http, lmtp=chosen.lmtp, health=chosen.health, metrics=chosen.metrics)
    note_unused(effective)
    arguments = worker_arguments(given, chosen)

    def opening() -> AbstractAsyncContextManager[RunningGateway]:
        return serving_gateway(settings, arguments, note)

    with tracing(given, "gateway"):
        return event_loop.run(serve_until_signal(opening, _describe, settings.gateway.drain))


def note_unused(effective: EffectiveSettings) -> None:
    """Say which values of a request the settings have, since no gateway uses them."""
    # No error: one settings file, or the environment of one container, may be for other commands as well.
    keys = [f"orchestrator.{name}" for name in _OF_REQUESTS]
    unused = [origin.name for key in keys if (origin := effective.origins.get(key)) is not None]
    if unused:
        note(f"Not used by a gateway, whose clients say it in each request: {', '.join(unused)}.")


def worker_arguments(given: Mapping[str, Any], settings: GatewaySettings) -> list[str]:
    """Return the options that every worker started by a gateway has: its settings file, and log and trace as here."""
    config = ["--config", given["config"]] if given.get("config") else []
    trace = ["--trace-file", str(given["trace_file"])] if given.get("trace_file") else []
    return ["--log-format", settings.log_format, "--log-level", settings.log_level, *config, *trace]


def _with_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with a model that stands alone as the option that it stands for.

    Raises:
        InvalidSettings: there are both, or there are two names for a model.
    """
    if given.get("served_name") and any("=" in each for each in given.get("target", ())):
        raise InvalidSettings("--target NAME=HOST:PORT has a name already; leave --served-name out.")
    options = dict(given)
    model = options.pop("served_model", None)
    if model is None:
        return options
    if "target_model" in options:
        raise InvalidSettings("The model stands twice, alone and behind --target-model; leave one out.")
    return {**options, "target_model": model}


@contextmanager
def gateway_extra(command: str) -> Generator[None]:
    """Name the remedy if an import of the block lacks a package.

    Raises:
        MissingExtra: one is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"specsplit {command} needs {error.name}: install it with pip install 'specsplit[gateway]'."
        ) from error


def _describe(running: RunningGateway) -> dict[str, Any]:
    lmtp = {"lmtp": running.lmtp.address} if running.lmtp is not None else {}
    return {"role": "gateway", "models": running.model_names, **lmtp, **running.beside}
