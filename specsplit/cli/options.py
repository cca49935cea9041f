"""Every option of the command line once: its name, help, panel and default, shared by the commands.

The settings define what an option means. This file imports nothing heavy, since `--help` waits for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any, Literal

import typer

from specsplit.core.defaults import DEFAULT_DEPTH, DEFAULT_NODES, DeviceName, Dtype, EndsAt, Mode, PrefixReuse
from specsplit.core.errors import InvalidSettings

_PROMPT, _SAMPLING, _SPECULATION = "Prompt", "Sampling", "Speculation"
_MODELS, _STAGES, _SERVICES, _GATEWAY, _OUTPUT = "Models", "Stages", "Services", "Gateway", "Output"
_LINKS = "Links"


def _option(names: str, panel: str, text: str, default: str | None = None, metavar: str | None = None) -> Any:
    """Describe an option; `default` is shown if the parameter's own default would tell the user nothing.

    `names` has the long one and perhaps, behind a blank, the short one.
    """
    if default is not None:
        text = f"{text} [dim]\\[default: {default}][/dim]"
    if default == "off":
        # A flag takes no value; without a metavar the help would show BOOLEAN for one.
        metavar = " "
    return typer.Option(*names.split(), help=text, rich_help_panel=panel, show_default=default is None, metavar=metavar)


Text = Annotated[
    str | None,
    typer.Argument(help="Text to continue; without one, standard input.", metavar="PROMPT", show_default=False),
]
ServedModel = Annotated[
    str | None,
    typer.Argument(help="Model to serve, as --target-model names it.", metavar="MODEL", show_default=False),
]
Prompt = Annotated[str | None, _option("--prompt -p", _PROMPT, "The prompt, as an option.", "none", "TEXT")]
PromptFile = Annotated[
    str | None,
    _option("--prompt-file -f", _PROMPT, "File to read the prompt from, - for standard input.", "none", "FILE"),
]
PromptsFile = Annotated[
    str | None,
    _option("--prompts-file", _PROMPT, "Answer many: one JSON object a line, - for standard input.", "none", "FILE"),
]
Output = Annotated[
    str | None, _option("--output", _PROMPT, "File for their answers; it is continued if it exists.", "none", "FILE")
]
Concurrency = Annotated[int, _option("--concurrency", _PROMPT, "How many of them are answered at once.", metavar="N")]
Chat = Annotated[bool, _option("--chat", _PROMPT, "Wrap the prompt in the model's chat template.", "off")]
ChatTemplateKwargs = Annotated[
    str | None,
    _option(
        "--chat-template-kwargs", _PROMPT, 'Variables of the template, as {"enable_thinking": false}.', "none", "JSON"
    ),
]

MaxNewTokens = Annotated[int, _option("--max-new-tokens -n", _SAMPLING, "Stop after so many tokens.", metavar="N")]
Temperature = Annotated[float, _option("--temperature -t", _SAMPLING, "0 takes the best token each time.", metavar="X")]
TopP = Annotated[float, _option("--top-p", _SAMPLING, "Keep the likeliest tokens that sum to it.", metavar="X")]
TopK = Annotated[int, _option("--top-k", _SAMPLING, "Keep so many of the likeliest tokens, 0 for all.", metavar="N")]
MinP = Annotated[
    float, _option("--min-p", _SAMPLING, "Keep tokens at least so likely, relative to the best.", metavar="X")
]
Seed = Annotated[int | None, _option("--seed -s", _SAMPLING, "Repeat a sampled text exactly.", "64 random bits", "N")]
Stop = Annotated[list[str] | None, _option("--stop", _SAMPLING, "End before this text; may be repeated.", "none", "S")]
PresencePenalty = Annotated[
    float, _option("--presence-penalty", _SAMPLING, "Taken from tokens already generated.", metavar="X")
]
FrequencyPenalty = Annotated[
    float, _option("--frequency-penalty", _SAMPLING, "The same, once for each time.", metavar="X")
]
RepetitionPenalty = Annotated[
    float, _option("--repetition-penalty", _SAMPLING, "Divides the logits of all tokens seen.", metavar="X")
]
LogitBias = Annotated[
    list[str] | None,
    _option("--logit-bias", _SAMPLING, "Add X to the logit of token ID; may be repeated.", "none", "ID=X"),
]
IgnoreEos = Annotated[bool, _option("--ignore-eos", _SAMPLING, "Go on after an end-of-sequence token.", "off")]

ModeOption = Annotated[
    Mode, _option("--mode", _SPECULATION, "overlap and stream draft while the target verifies; plain never speculates.")
]
Lookup = Annotated[
    bool, _option("--lookup/--no-lookup", _SPECULATION, "Also guess what followed the same words before.")
]
Nodes = Annotated[
    int | None,
    _option(
        "--nodes", _SPECULATION, "Tree nodes verified per round at most.", f"{DEFAULT_NODES}, or auto's choice", "N"
    ),
]
Depth = Annotated[
    int | None,
    _option("--depth", _SPECULATION, "Levels of the tree at most.", f"{DEFAULT_DEPTH}, or auto's choice", "D"),
]
Branching = Annotated[int, _option("--branching", _SPECULATION, "Children of one node; 1 drafts a chain.", metavar="B")]
Explain = Annotated[bool, _option("--explain", _SPECULATION, "Show how each round was run, and why.", "off")]
Compare = Annotated[bool, _option("--compare", _SPECULATION, "Also decode plainly and compare.", "off")]

TargetModel = Annotated[
    str, _option("--target-model -m", _MODELS, "Folder or hub id of the model whose text it is.", metavar="M")
]
DraftModel = Annotated[
    str | None,
    _option(
        "--draft-model -d",
        _MODELS,
        "Folder or hub id of the draft.",
        "none; the embedded one for the embedded target",
        "M",
    ),
]
_MODELS_OF = {"revision": ("model", "target_model", "served_model"), "draft_revision": ("draft_model",)}
_REVISION = "Branch, tag or commit of the {} on the hub."
Revision = Annotated[str | None, _option("--revision", _MODELS, _REVISION.format("model"), "its main branch", "R")]
DraftRevision = Annotated[
    str | None, _option("--draft-revision", _MODELS, _REVISION.format("draft"), "its main branch", "R")
]
_VOCAB = "Tokens that the draft's head computes: the N lowest, or those of a file of draft-vocab."
DraftVocab = Annotated[str | None, _option("--draft-vocab", _MODELS, _VOCAB, "all", "N|FILE")]
ServedVocab = Annotated[str | None, _option("--vocab", _MODELS, _VOCAB, "all", "N|FILE")]
DtypeOption = Annotated[
    Dtype | None,
    _option(
        "--dtype",
        _MODELS,
        "Number format of the weights; to int8 and int4 they are rounded.",
        "the checkpoint's, or fp32 on a CPU without it and for a small draft",
    ),
]
DeviceOption = Annotated[
    DeviceName, _option("--device", _MODELS, "Where both models run: cpu, cuda or cuda:N.", metavar="D")
]
Threads = Annotated[
    str | None, _option("--threads", _MODELS, "CPU threads of each model.", "auto: what forwards gain from", "N")
]
Context = Annotated[
    int | None, _option("--context -c", _MODELS, "Tokens of prompt and answer.", "the model's, at most 4096", "N")
]
_KV = "Memory for the KV cache of all sessions, in bytes or as a fraction of what is free."
KVMemory = Annotated[str | None, _option("--kv-memory", _MODELS, _KV, "each session's context in full", "8GiB|0.85")]
Config = Annotated[
    str | None, _option("--config", _MODELS, "Settings file (TOML).", "the variable SPECSPLIT_CONFIG", "FILE")
]

Target = Annotated[
    str | None, _option("--target", _SERVICES, "Use the target that serves there.", "one in this process", "HOST:PORT")
]
Draft = Annotated[
    str | None, _option("--draft", _SERVICES, "Use the draft that serves there.", "none with --target", "HOST:PORT")
]
Timeout = Annotated[
    float | None, _option("--timeout", _SERVICES, "Give a request up after so many seconds.", "never", "S")
]
Retry = Annotated[
    float, _option("--retry", _SERVICES, "Try an unreachable target again for so many seconds.", metavar="S")
]
DraftPatience = Annotated[
    float, _option("--draft-patience", _SERVICES, "Wait for a proposal at least so many seconds.", metavar="S")
]

Audit = Annotated[
    float, _option("--audit", _SERVICES, "Have this share of rounds recomputed by another target.", metavar="RATE")
]
Auditor = Annotated[
    str | None,
    _option("--auditor", _SERVICES, "A target that is trusted to do that.", "replicas do it", "HOST:PORT"),
]

Model = Annotated[str, _option("--model -m", _MODELS, "Folder or hub id of the model to serve.", metavar="M")]
ServedDevice = Annotated[
    DeviceName, _option("--device", _MODELS, "Where the model runs: cpu, cuda or cuda:N.", metavar="D")
]
ServedName = Annotated[
    str | None, _option("--served-name", _SERVICES, "The model's name for clients.", "that of its folder", "NAME")
]
ServedThreads = Annotated[
    str | None, _option("--threads", _MODELS, "CPU threads of the model.", "auto: what forwards gain from", "N")
]
StageThreads = Annotated[int | None, _option("--threads", _MODELS, "CPU threads of the stage.", "one per core", "N")]
Listen = Annotated[
    str, _option("--listen -l", _SERVICES, "Address to serve on; port 0 picks a free one.", metavar="HOST:PORT")
]
Sessions = Annotated[int, _option("--sessions", _SERVICES, "Sessions held at a time, one KV slot each.", metavar="N")]
Queue = Annotated[int | None, _option("--queue", _SERVICES, "Requests that may wait for a slot.", "4 x sessions", "N")]
StepTokens = Annotated[
    int | None, _option("--step-tokens", _SERVICES, "Tokens and nodes of a step at most.", "what times give", "N")
]
PrefillChunk = Annotated[
    int | None, _option("--prefill-chunk", _SERVICES, "Tokens of one prompt in a step at most.", "what times give", "N")
]
CallerSessions = Annotated[
    int | None, _option("--caller-sessions", _SERVICES, "Sessions of one caller at a time.", "any number", "N")
]
CallerStreams = Annotated[
    int | None, _option("--caller-streams", _SERVICES, "Streams of one caller at a time.", "any number", "N")
]
_TOKENS = "Tokens of prompts and texts that one caller may use a second."
CallerTokens = Annotated[float | None, _option("--caller-tokens-per-second", _SERVICES, _TOKENS, "any number", "N")]
CallerRequests = Annotated[
    int | None, _option("--caller-requests", _GATEWAY, "Requests of one key answered at a time.", "any number", "N")
]
KeyTokens = Annotated[float | None, _option("--caller-tokens-per-second", _GATEWAY, _TOKENS, "any number", "N")]
ReusePrefixes = Annotated[
    PrefixReuse,
    _option(
        "--prefix-reuse", _SERVICES, "Let requests that begin alike share forwards: of one caller, of all, or off."
    ),
]
SessionTtl = Annotated[
    float, _option("--session-ttl", _SERVICES, "Free the slot of a session idle for so many seconds.", metavar="S")
]
Drain = Annotated[
    float, _option("--drain", _SERVICES, "When told to stop, finish for up to so many seconds.", metavar="S")
]

Layers = Annotated[
    str | None, _option("--layers", _STAGES, "From layer A to B - 1, counted from 0.", "none: name them", "A:B")
]
FirstLayers = Annotated[
    str | None,
    _option("--layers", _STAGES, "The first layers, which it holds itself; the stages have the others.", "none", "0:B"),
]
Stages = Annotated[
    str | None,
    _option("--stages", _STAGES, "Stages that hold the layers, in order.", "none", "HOST:PORT,..."),
]
Spares = Annotated[
    str | None, _option("--spares", _STAGES, "Stages that take the place of a lost one.", "none", "HOST:PORT,...")
]
LocalStages = Annotated[
    int | None, _option("--local-stages", _STAGES, "Start so many stages here, and keep them running.", "none", "N")
]
Ends = Annotated[
    EndsAt, _option("--ends", _STAGES, "Where embedding and head are; with coordinator no stage sees a token.")
]
Next = Annotated[
    str | None,
    _option("--next", _STAGES, "Other hosts' stages that may follow this one, spares too.", "none", "HOST:PORT,..."),
]
StageRetry = Annotated[
    float, _option("--retry", _STAGES, "At the start, try unreachable stages again for so many seconds.", metavar="S")
]
StepTimeout = Annotated[
    float, _option("--step-timeout", _STAGES, "Give up a stage that is on one step for so many seconds.", metavar="S")
]
Parent = Annotated[int | None, typer.Option("--parent", hidden=True)]
"""Id of the process that started this worker; the worker ends when that process does."""

TlsCert = Annotated[str | None, _option("--tls-cert", _LINKS, "Certificate of this process.", "none", "FILE")]
TlsKey = Annotated[str | None, _option("--tls-key", _LINKS, "Its key, without a password.", "none", "FILE")]
TlsCa = Annotated[str | None, _option("--tls-ca", _LINKS, "CA of all certificates, its own too.", "none", "FILE")]
Insecure = Annotated[
    bool, _option("--insecure/--no-insecure", _LINKS, "Let links without certificates leave this machine.", "off")
]
Health = Annotated[
    str | None, _option("--health", _LINKS, "Address for health checks alone, in plaintext.", "none", "HOST:PORT")
]
Metrics = Annotated[
    str | None, _option("--metrics", _LINKS, "Address for Prometheus alone, in plaintext.", "none", "HOST:PORT")
]
MetricsCompat = Annotated[
    Literal["vllm"] | None,
    _option("--metrics-compat", _LINKS, "Give metrics the names of vLLM, too.", "ours alone"),
]
LogFormat = Annotated[Literal["text", "json"], _option("--log-format", _OUTPUT, "Lines of the log.")]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    _option("--log-level", _OUTPUT, "Log from this level on; info has a line for each session refused or lost."),
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
linked, logged = also(LINK_OPTIONS), also({**LINK_OPTIONS, **LOG_OPTIONS})
served = also({**LINK_OPTIONS, **SERVICE_OPTIONS, **LOG_OPTIONS})
"""Decorators of commands with links, of those that serve somebody, and of those that serve calls."""
draft_limited, target_limited = also(CALLER_OPTIONS), also({"caller_streams": (CallerStreams, None), **CALLER_OPTIONS})
gateway_limited = also({"caller_requests": (CallerRequests, None), "caller_tokens_per_second": (KeyTokens, None)})
"""Decorators of commands that limit what one caller may have."""

Stdio = Annotated[bool, typer.Option("--stdio", help="Frames come on stdin and go to stdout.")]
Lmtp = Annotated[
    str | None, _option("--lmtp", _GATEWAY, "Address for LMTP alone; /lmtp of --http has it too.", metavar="HOST:PORT")
]
Http = Annotated[str, _option("--http", _GATEWAY, "Address to serve on; port 0 picks a free one.", metavar="HOST:PORT")]
Targets = Annotated[
    list[str] | None,
    _option(
        "--target",
        _SERVICES,
        "Serve the target there; once for each model, or replica.",
        "started here",
        "[NAME=]HOST:PORT",
    ),
]
Drafts = Annotated[
    list[str] | None,
    _option("--draft", _SERVICES, "Use the draft there, for the target of its name.", "none", "[NAME=]HOST:PORT"),
]
GatewayRetry = Annotated[
    float | None,
    _option("--retry", _SERVICES, "Try a lost target again for so many seconds.", "5, or 30 if started here", "S"),
]
StartedSessions = Annotated[
    int | None, _option("--sessions", _SERVICES, "Sessions that workers started here hold at a time.", "4", "N")
]
ApiKeyFile = Annotated[
    str | None, _option("--api-key-file", _GATEWAY, "Let in the keys of this file alone.", "nobody needs a key", "FILE")
]
AllowAnonymous = Annotated[
    bool, _option("--allow-anonymous", _GATEWAY, "Serve other machines without keys, too.", "off")
]
LogMessages = Annotated[
    str | None,
    _option("--log-messages", _GATEWAY, "Write LMTP's messages to the end of a file.", "none", "FILE"),
]
LogPrompts = Annotated[bool, _option("--log-prompts", _GATEWAY, "Do not mask the prompts in it.", "off")]
MaxBodyMib = Annotated[int, _option("--max-body-mib", _GATEWAY, "Refuse larger requests.", metavar="MIB")]
SpecDecodeMetrics = Annotated[
    Literal["none", "summary", "detailed"],
    _option("--per-request-spec-decode-metrics", _GATEWAY, "Tell in answers how speculation did."),
]

Logprobs = Annotated[
    int | None,
    _option("--logprobs", _OUTPUT, "Add log-probabilities of tokens and of the K likeliest to --json.", "none", "K"),
]
Json = Annotated[bool, _option("--json -j", _OUTPUT, "Print one JSON object on one line.", "off")]
TraceFile = Annotated[
    str | None,
    _option("--trace-file --trace", _OUTPUT, "Write spans of every round, one JSON line each.", "none", "FILE"),
]
PrintConfig = Annotated[
    bool, _option("--print-config", _OUTPUT, "Print the settings in effect, and where each comes from.", "off")
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
