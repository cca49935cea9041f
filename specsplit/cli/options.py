"""Every option of the command line once, those of `prompt_options` aside: its name, help, panel and default.

The settings define what an option means. This file imports nothing heavy, since `--help` waits for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any, Literal

import typer

from specsplit.cli.prompt_options import option
from specsplit.core.defaults import (
    MOST_SERVED,
    QUEUE_PER_SESSION,
    SERVED_SESSIONS,
    DeviceName,
    Dtype,
    EndsAt,
    PrefixReuse,
)
from specsplit.core.errors import InvalidSettings

_MODELS, _STAGES, _SERVICES, _GATEWAY, _OUTPUT = "Models", "Stages", "Services", "Gateway", "Output"
_LINKS = "Links"

ServedModel = Annotated[
    str | None,
    typer.Argument(help="Model to serve, as --target-model names it.", metavar="MODEL", show_default=False),
]
TargetModel = Annotated[
    str,
    option("--target-model -m", _MODELS, "Folder or hub id of the target, the model whose text it is.", metavar="M"),
]
DraftModel = Annotated[
    str | None,
    option(
        "--draft-model -d",
        _MODELS,
        "Folder or hub id of the draft.",
        "none; the embedded one for the embedded target",
        "M",
    ),
]
DraftBeside = Annotated[
    str | None,
    option(
        "--draft-model -d",
        _MODELS,
        "Folder or hub id of a draft that this process serves as well, on the same device.",
        "none",
        "M",
    ),
]
_MODELS_OF = {"revision": ("model", "target_model", "served_model"), "draft_revision": ("draft_model",)}
_REVISION = "Branch, tag or commit of the {} on the hub."
Revision = Annotated[str | None, option("--revision", _MODELS, _REVISION.format("model"), "its main branch", "R")]
DraftRevision = Annotated[
    str | None, option("--draft-revision", _MODELS, _REVISION.format("draft"), "its main branch", "R")
]
_VOCAB = "Tokens that the draft's head computes: the N lowest, all, or those of a file of draft-vocab."
_DEFAULT_VOCAB = "32768 of a large vocabulary on a CPU, else all"
DraftVocab = Annotated[str | None, option("--draft-vocab", _MODELS, _VOCAB, _DEFAULT_VOCAB, "N|all|FILE")]
ServedVocab = Annotated[str | None, option("--vocab --draft-vocab", _MODELS, _VOCAB, _DEFAULT_VOCAB, "N|all|FILE")]
DtypeOption = Annotated[
    Dtype | None,
    option(
        "--dtype",
        _MODELS,
        "Number format of the weights; int8 and int4 round them.",
        "the checkpoint's, or fp32 on a CPU without it and for a small draft",
    ),
]
DeviceOption = Annotated[
    DeviceName, option("--device", _MODELS, "Where both models run: cpu, cuda or cuda:N.", metavar="D")
]
Threads = Annotated[
    str | None, option("--threads", _MODELS, "CPU threads of each model.", "auto, the fastest number as measured", "N")
]
Record = Annotated[
    bool,
    option(
        "--record/--no-record",
        _MODELS,
        "Record each model's forward at load; without, the load is shorter and every token takes longer.",
    ),
]
Context = Annotated[
    int | None,
    option("--context -c", _MODELS, "Tokens of prompt and answer together.", "the model's, at most 4096", "N"),
]
_DRAFT_CONTEXT = "Tokens that the draft has of a text; of a longer one it reads the end."
DraftContext = Annotated[
    int | None, option("--draft-context", _MODELS, _DRAFT_CONTEXT, "the model's, at most 1024 on a CPU", "N")
]
ServedDraftContext = Annotated[
    int | None,
    option("--context --draft-context -c", _MODELS, _DRAFT_CONTEXT, "the model's, at most 1024 on a CPU", "N"),
]
_KV = "Memory for the KV cache of all sessions, in bytes or as a fraction of what is free."
KVMemory = Annotated[str | None, option("--kv-memory", _MODELS, _KV, "each session's context in full", "8GiB|0.85")]
Config = Annotated[
    str | None, option("--config", _MODELS, "Settings file (TOML).", "the variable SPECSPLIT_CONFIG", "FILE")
]

Target = Annotated[
    str | None,
    option("--target", _SERVICES, "Address of a target that serves elsewhere.", "one in this process", "HOST:PORT"),
]
Draft = Annotated[
    str | None,
    option("--draft", _SERVICES, "Address of a draft that serves elsewhere.", "none with --target", "HOST:PORT"),
]
Priority = Annotated[
    int, option("--priority", _SERVICES, "Who goes first of requests that wait for a slot: 9 before 0.", metavar="N")
]
Timeout = Annotated[
    float | None, option("--timeout", _SERVICES, "Seconds after which a request is given up.", "never", "S")
]
Retry = Annotated[
    float,
    option("--retry", _SERVICES, "Seconds for which a target that cannot be reached is tried again.", metavar="S"),
]
DraftPatience = Annotated[
    float, option("--draft-patience", _SERVICES, "Seconds after which the draft counts as slow, at least.", metavar="S")
]

Audit = Annotated[
    float, option("--audit", _SERVICES, "Share of the rounds that another target recomputes.", metavar="RATE")
]
Auditor = Annotated[
    str | None,
    option("--auditor", _SERVICES, "Address of a trusted target that recomputes them.", "replicas do it", "HOST:PORT"),
]

Model = Annotated[str, option("--model -m", _MODELS, "Folder or hub id of the model to serve.", metavar="M")]
ServedDevice = Annotated[
    DeviceName, option("--device", _MODELS, "Where the model runs: cpu, cuda or cuda:N.", metavar="D")
]
ServedName = Annotated[
    str | None, option("--served-name", _SERVICES, "The model's name for clients.", "that of its folder", "NAME")
]
ServedThreads = Annotated[
    str | None,
    option("--threads", _MODELS, "CPU threads of the model.", "auto, as measured; a draft on loopback has half", "N"),
]
StageThreads = Annotated[int | None, option("--threads", _MODELS, "CPU threads of the stage.", "as measured", "N")]
Listen = Annotated[
    str, option("--listen -l", _SERVICES, "Address to serve on; port 0 picks a free one.", metavar="HOST:PORT")
]
_MANY = f"{SERVED_SESSIONS} to {MOST_SERVED}, as the memory easily holds"
Sessions = Annotated[
    int | None, option("--sessions", _SERVICES, "Sessions at a time, each with a KV slot.", _MANY, "N")
]
StageSessions = Annotated[int, option("--sessions", _SERVICES, "Sessions at a time, each with a KV slot.", metavar="N")]
_WAITING = f"{QUEUE_PER_SESSION} x sessions"
Queue = Annotated[int | None, option("--queue", _SERVICES, "Requests that may wait for a slot.", _WAITING, "N")]
StepTokens = Annotated[
    int | None,
    option("--step-tokens", _SERVICES, "Tokens and nodes of a step, at most.", "chosen from measured times", "N"),
]
PrefillChunk = Annotated[
    int | None,
    option("--prefill-chunk", _SERVICES, "Tokens of one prompt in a step, at most.", "chosen from measured times", "N"),
]
CallerSessions = Annotated[
    int | None, option("--caller-sessions", _SERVICES, "Sessions of one caller at a time.", "any number", "N")
]
CallerStreams = Annotated[
    int | None, option("--caller-streams", _SERVICES, "Streams of one caller at a time.", "any number", "N")
]
_TOKENS = "Tokens of prompts and texts that one caller may use a second."
CallerTokens = Annotated[float | None, option("--caller-tokens-per-second", _SERVICES, _TOKENS, "any number", "N")]
CallerRequests = Annotated[
    int | None,
    option("--caller-requests", _GATEWAY, "Requests of one key that are answered at a time.", "any number", "N"),
]
KeyTokens = Annotated[float | None, option("--caller-tokens-per-second", _GATEWAY, _TOKENS, "any number", "N")]
ReusePrefixes = Annotated[
    PrefixReuse,
    option(
        "--prefix-reuse", _SERVICES, "Whether requests that begin alike share forwards: those of one caller, or of all."
    ),
]
SessionTtl = Annotated[
    float,
    option("--session-ttl", _SERVICES, "Seconds without a call after which a session loses its slot.", metavar="S"),
]
Drain = Annotated[
    float,
    option("--drain", _SERVICES, "Seconds for which it finishes requests after it is told to stop.", metavar="S"),
]

Layers = Annotated[
    str | None, option("--layers", _STAGES, "Layers A to B - 1, counted from 0.", "none: name them", "A:B")
]
FirstLayers = Annotated[
    str | None,
    option("--layers", _STAGES, "The first layers, which it holds itself; the stages have the others.", "none", "0:B"),
]
Stages = Annotated[
    str | None,
    option("--stages", _STAGES, "Addresses of the stages, in the order of their layers.", "none", "HOST:PORT,..."),
]
Spares = Annotated[
    str | None,
    option("--spares", _STAGES, "Addresses of stages that take the place of a lost one.", "none", "HOST:PORT,..."),
]
LocalStages = Annotated[
    int | None,
    option("--local-stages", _STAGES, "Number of stages to start on this machine and keep running.", "none", "N"),
]
Ends = Annotated[
    EndsAt,
    option("--ends", _STAGES, "Where embedding and head are computed; with coordinator, no stage sees a token."),
]
Next = Annotated[
    str | None,
    option(
        "--next",
        _STAGES,
        "Stages on other hosts that may come after this one, spares included.",
        "none",
        "HOST:PORT,...",
    ),
]
StageRetry = Annotated[
    float,
    option(
        "--retry", _STAGES, "Seconds for which stages that cannot be reached are tried again at the start.", metavar="S"
    ),
]
StepTimeout = Annotated[
    float, option("--step-timeout", _STAGES, "Seconds on one step after which a stage is given up.", metavar="S")
]
Parent = Annotated[int | None, typer.Option("--parent", hidden=True)]
"""Id of the process that started this worker; the worker ends when that process does."""

AllCores = Annotated[bool, typer.Option("--all-cores", hidden=True)]
"""Whether the target computes elsewhere, so that a draft on loopback may take every core; from who started it."""
DefaultContext = Annotated[int | None, typer.Option("--default-context", hidden=True)]
"""Tokens of a session without --context, if the model was made for as many; from the process that started this one."""

TlsCert = Annotated[str | None, option("--tls-cert", _LINKS, "Certificate of this process.", "none", "FILE")]
TlsKey = Annotated[str | None, option("--tls-key", _LINKS, "Its key, without a password.", "none", "FILE")]
TlsCa = Annotated[
    str | None,
    option("--tls-ca", _LINKS, "CA that signed the certificates of all processes, this one included.", "none", "FILE"),
]
Insecure = Annotated[
    bool, option("--insecure/--no-insecure", _LINKS, "Allow links without certificates to other machines.", "off")
]
Health = Annotated[
    str | None, option("--health", _LINKS, "Address for health checks only, in plaintext.", "none", "HOST:PORT")
]
Metrics = Annotated[
    str | None, option("--metrics", _LINKS, "Address for Prometheus only, in plaintext.", "none", "HOST:PORT")
]
MetricsCompat = Annotated[
    Literal["vllm"] | None,
    option("--metrics-compat", _LINKS, "Also give metrics the names that vLLM has for them.", "our names only"),
]
LogFormat = Annotated[Literal["text", "json"], option("--log-format", _OUTPUT, "Format of the log's lines.")]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    option("--log-level", _OUTPUT, "Lowest level that is logged; info has a line for each session refused or lost."),
]
LINK_OPTIONS = {
    "tls_cert": (TlsCert, None),
    "tls_key": (TlsKey, None),
    "tls_ca": (TlsCa, None),
    "insecure": (Insecure, False),
}
"""Options of every command with links to other processes, with their defaults."""
LOG_OPTIONS = {"log_format": (LogFormat, "text"), "log_level": (LogLevel, "info")}
SERVICE_OPTIONS = {"health": (Health, None), "metrics": (Metrics, None), "metrics_compat": (MetricsCompat, None)}


def also(options: Mapping[str, tuple[Any, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options to a command that reads them from its context."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            command(**{name: value for name, value in values.items() if name not in options})

        signature = inspect.signature(command, eval_str=True)
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in options.items()
        ]
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
        # typer reads the types here, and the defaults there.
        run.__annotations__ = {name: each.annotation for name, each in run.__signature__.parameters.items()}  # type: ignore[attr-defined]
        return run

    return add


CALLER_OPTIONS = {"caller_sessions": (CallerSessions, None), "caller_tokens_per_second": (CallerTokens, None)}
"""Limits of one caller at a worker."""
LOAD_OPTIONS = {"record": (Record, True)}
linked, loading = also(LINK_OPTIONS), also({**LOAD_OPTIONS, **LINK_OPTIONS})
logged = also({**LOAD_OPTIONS, **LINK_OPTIONS, **LOG_OPTIONS})
served = also({**LOAD_OPTIONS, **LINK_OPTIONS, **SERVICE_OPTIONS, **LOG_OPTIONS})
"""Decorators of commands with links; of those that load models as well; and of those of them that serve somebody, or
calls."""
draft_limited, target_limited = also(CALLER_OPTIONS), also({"caller_streams": (CallerStreams, None), **CALLER_OPTIONS})
gateway_limited = also({"caller_requests": (CallerRequests, None), "caller_tokens_per_second": (KeyTokens, None)})
"""Decorators of commands that limit what one caller may have."""

Stdio = Annotated[bool, typer.Option("--stdio", help="Read frames from stdin and write them to stdout.")]
Lmtp = Annotated[
    str | None,
    option("--lmtp", _GATEWAY, "Address for LMTP only; --http has it at /lmtp as well.", metavar="HOST:PORT"),
]
Http = Annotated[str, option("--http", _GATEWAY, "Address to serve on; port 0 picks a free one.", metavar="HOST:PORT")]
Targets = Annotated[
    list[str] | None,
    option(
        "--target",
        _SERVICES,
        "Address of a target to serve; once for each model or replica.",
        "started here",
        "[NAME=]HOST:PORT",
    ),
]
Drafts = Annotated[
    list[str] | None,
    option("--draft", _SERVICES, "Address of a draft for the target of that name.", "none", "[NAME=]HOST:PORT"),
]
GatewayRetry = Annotated[
    float | None,
    option("--retry", _SERVICES, "Seconds for which a lost target is tried again.", "5, or 30 if started here", "S"),
]
StartedSessions = Annotated[
    int | None, option("--sessions", _SERVICES, "Sessions at a time in workers started here.", _MANY, "N")
]
StartedQueue = Annotated[
    int | None, option("--queue", _SERVICES, "Requests that may wait in workers started here.", _WAITING, "N")
]
ApiKeyFile = Annotated[
    str | None, option("--api-key-file", _GATEWAY, "File with the keys that are let in.", "nobody needs a key", "FILE")
]
AllowAnonymous = Annotated[bool, option("--allow-anonymous", _GATEWAY, "Serve other machines without keys.", "off")]
LogMessages = Annotated[
    str | None,
    option("--log-messages", _GATEWAY, "File to which LMTP's messages are appended.", "none", "FILE"),
]
LogPrompts = Annotated[bool, option("--log-prompts", _GATEWAY, "Write prompts to --log-messages unmasked.", "off")]
MaxBodyMib = Annotated[int, option("--max-body-mib", _GATEWAY, "Largest body of a request, in MiB.", metavar="MIB")]
SpecDecodeMetrics = Annotated[
    Literal["none", "summary", "detailed"],
    option("--per-request-spec-decode-metrics", _GATEWAY, "Add figures of speculation to answers."),
]

Logprobs = Annotated[
    int | None,
    option(
        "--logprobs",
        _OUTPUT,
        "Add each token's log-probability, and those of the K likeliest tokens, to --json.",
        "none",
        "K",
    ),
]
Json = Annotated[bool, option("--json -j", _OUTPUT, "Print one JSON object on one line.", "off")]
TraceFile = Annotated[
    str | None,
    option("--trace-file --trace", _OUTPUT, "File for spans of every round, one JSON object a line.", "none", "FILE"),
]
PrintConfig = Annotated[
    bool, option("--print-config", _OUTPUT, "Print the settings in effect, and where each comes from.", "off")
]


def given(ctx: typer.Context) -> dict[str, Any]:
    """Return the options that stand on the command line, by parameter name."""
    # A default shown in --help is not passed on: environment and settings file would never win over it.
    chosen = {
        name: value
        for name, value in ctx.params.items()
        if (source := ctx.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }
    for name, models in _MODELS_OF.items():
        # The settings have one name for both: MODEL@REVISION.
        if (revision := chosen.pop(name, None)) is not None:
            model = next((each for each in models if each in chosen), None)
            if model is None:
                option = name.replace("_", "-")
                raise InvalidSettings(f"--{option} is that of a model on the hub: name the model with it.")
            chosen[model] = f"{chosen[model]}@{revision}"
    return chosen
