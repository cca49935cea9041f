"""The command `specsplit`: its subcommands, and the one place where an exception becomes a sentence and exit code."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from specsplit.cli import chat, options, plan, top
from specsplit.cli.logs import is_debugging
from specsplit.core import defaults
from specsplit.core.errors import SpecSplitError

INTERRUPTED = 130
EXAMPLES = """Examples:

specsplit orchestrate --prompt 'def fibonacci(n):'

specsplit orchestrate --prompt-file - --temperature 0.8 --seed 7 --json

specsplit orchestrate --target-model ./large --draft-model ./small --prompt Hi
"""
SERVICE_EXAMPLES = """Examples:

specsplit draft --model ./small --listen 0.0.0.0:7002

specsplit target --model ./large --listen 0.0.0.0:7001

specsplit orchestrate --draft draft-host:7002 --target target-host:7001 --prompt Hi
"""

GATEWAY_EXAMPLES = """Examples:

specsplit serve

specsplit serve --target-model ./large --draft-model ./small --dtype bf16

specsplit serve --target target-host:7001 --draft draft-host:7002 --http 0.0.0.0:8000 --api-key-file keys
"""
STAGE_EXAMPLES = """Examples:

specsplit stage --model ./large --layers 0:16 --listen 0.0.0.0:7101

specsplit stage --model ./large --layers 16:32 --listen 0.0.0.0:7102

specsplit target --model ./large --stages host-a:7101,host-b:7102 --listen 0.0.0.0:7001
"""
CHECK_EXAMPLES = """Examples:

specsplit stage-check --model ./large --stages host-a:7101,host-b:7102
"""

app = typer.Typer(
    name="specsplit",
    help="Disaggregated speculative decoding: a draft proposes token trees, a target verifies them.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Serve a large model faster: a small one proposes, the large one verifies, the text is the large one's."""
    if version:
        import specsplit

        typer.echo(specsplit.__version__)
        raise typer.Exit


@app.command(epilog=EXAMPLES)
def orchestrate(
    ctx: typer.Context,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    prompts_file: options.PromptsFile = None,
    output: options.Output = None,
    concurrency: options.Concurrency = defaults.CONCURRENCY,
    chat: options.Chat = False,
    max_new_tokens: options.MaxNewTokens = defaults.MAX_NEW_TOKENS,
    temperature: options.Temperature = defaults.TEMPERATURE,
    top_p: options.TopP = defaults.TOP_P,
    top_k: options.TopK = defaults.TOP_K,
    min_p: options.MinP = defaults.MIN_P,
    seed: options.Seed = None,
    stop: options.Stop = None,
    presence_penalty: options.PresencePenalty = defaults.PRESENCE_PENALTY,
    frequency_penalty: options.FrequencyPenalty = defaults.FREQUENCY_PENALTY,
    repetition_penalty: options.RepetitionPenalty = defaults.REPETITION_PENALTY,
    logit_bias: options.LogitBias = None,
    ignore_eos: options.IgnoreEos = False,
    mode: options.ModeOption = defaults.MODE,
    nodes: options.Nodes = None,
    depth: options.Depth = None,
    branching: options.Branching = defaults.DEFAULT_BRANCHING,
    lookup: options.Lookup = defaults.LOOKUP,
    compare: options.Compare = False,
    explain: options.Explain = False,
    target_model: options.TargetModel = defaults.EMBEDDED,
    draft_model: options.DraftModel = None,
    draft_vocab: options.DraftVocab = None,
    dtype: options.DtypeOption = None,
    device: options.DeviceOption = defaults.DEVICE,
    threads: options.Threads = None,
    context: options.Context = None,
    config: options.Config = None,
    target: options.Target = None,
    draft: options.Draft = None,
    timeout: options.Timeout = None,
    retry: options.Retry = defaults.RETRY_S,
    draft_patience: options.DraftPatience = defaults.DRAFT_PATIENCE_S,
    logprobs: options.Logprobs = None,
    json: options.Json = False,
    trace_file: options.TraceFile = None,
    print_config: options.PrintConfig = False,
) -> None:
    """Continue prompts with the target's text, at the draft's pace, in this process or with workers elsewhere."""
    from specsplit.cli.orchestrate import run

    raise typer.Exit(_interruptible(partial(run, owns_process=ctx.obj is True), ctx))


@app.command(epilog=SERVICE_EXAMPLES)
def draft(
    ctx: typer.Context,
    model: options.Model = defaults.EMBEDDED,
    vocab: options.ServedVocab = None,
    dtype: options.DtypeOption = None,
    device: options.ServedDevice = defaults.DEVICE,
    threads: options.ServedThreads = None,
    context: options.Context = None,
    config: options.Config = None,
    listen: options.Listen = defaults.LISTEN,
    sessions: options.Sessions = defaults.SERVED_SESSIONS,
    queue: options.Queue = None,
    prefix_reuse: options.ReusePrefixes = defaults.PREFIX_REUSE,
    session_ttl: options.SessionTtl = defaults.SESSION_TTL_S,
    drain: options.Drain = defaults.DRAIN_S,
    trace_file: options.TraceFile = None,
    print_config: options.PrintConfig = False,
    parent: options.Parent = None,
) -> None:
    """Serve a draft, which proposes token trees, until SIGTERM or Ctrl-C."""
    from specsplit.cli.serve import run

    raise typer.Exit(_interruptible(partial(run, "draft"), ctx))


@app.command(epilog=SERVICE_EXAMPLES)
def target(
    ctx: typer.Context,
    model: options.Model = defaults.EMBEDDED,
    dtype: options.DtypeOption = None,
    device: options.ServedDevice = defaults.DEVICE,
    threads: options.ServedThreads = None,
    context: options.Context = None,
    config: options.Config = None,
    stages: options.Stages = None,
    spares: options.Spares = None,
    local_stages: options.LocalStages = None,
    ends: options.Ends = defaults.ENDS,
    retry: options.StageRetry = defaults.RETRY_S,
    step_timeout: options.StepTimeout = defaults.STEP_TIMEOUT_S,
    listen: options.Listen = defaults.LISTEN,
    sessions: options.Sessions = defaults.SERVED_SESSIONS,
    queue: options.Queue = None,
    prefix_reuse: options.ReusePrefixes = defaults.PREFIX_REUSE,
    session_ttl: options.SessionTtl = defaults.SESSION_TTL_S,
    drain: options.Drain = defaults.DRAIN_S,
    trace_file: options.TraceFile = None,
    print_config: options.PrintConfig = False,
    parent: options.Parent = None,
) -> None:
    """Serve a target, which verifies token trees, until SIGTERM or Ctrl-C; its layers are here or on stages."""
    from specsplit.cli.serve import run

    raise typer.Exit(_interruptible(partial(run, "target"), ctx))


@app.command(epilog=GATEWAY_EXAMPLES)
def serve(
    ctx: typer.Context,
    http: options.Http = defaults.HTTP,
    lmtp: options.Lmtp = None,
    api_key_file: options.ApiKeyFile = None,
    allow_anonymous: options.AllowAnonymous = False,
    max_body_mib: options.MaxBodyMib = 1,
    per_request_spec_decode_metrics: options.SpecDecodeMetrics = "none",
    target_model: options.TargetModel = defaults.EMBEDDED,
    draft_model: options.DraftModel = None,
    dtype: options.DtypeOption = None,
    device: options.DeviceOption = defaults.DEVICE,
    threads: options.Threads = None,
    context: options.Context = None,
    config: options.Config = None,
    target: options.Targets = None,
    draft: options.Drafts = None,
    sessions: options.StartedSessions = None,
    retry: options.GatewayRetry = None,
    draft_patience: options.DraftPatience = defaults.DRAFT_PATIENCE_S,
    drain: options.Drain = defaults.DRAIN_S,
    mode: options.ModeOption = defaults.MODE,
    nodes: options.Nodes = None,
    depth: options.Depth = None,
    branching: options.Branching = defaults.DEFAULT_BRANCHING,
    lookup: options.Lookup = defaults.LOOKUP,
    trace_file: options.TraceFile = None,
    print_config: options.PrintConfig = False,
) -> None:
    """Serve OpenAI's HTTP API over workers elsewhere, or over workers that it starts here and keeps running."""
    from specsplit.cli.gateway import run

    raise typer.Exit(_interruptible(run, ctx))


@app.command()
def lmtp(
    ctx: typer.Context,
    stdio: options.Stdio,
    target_model: options.TargetModel = defaults.EMBEDDED,
    draft_model: options.DraftModel = None,
    dtype: options.DtypeOption = None,
    threads: options.Threads = None,
    context: options.Context = None,
    config: options.Config = None,
    target: options.Targets = None,
    draft: options.Drafts = None,
    mode: options.ModeOption = defaults.MODE,
) -> None:
    """Speak LMTP with one client over stdin and stdout, one frame a line, until stdin ends; see also serve --lmtp."""
    from specsplit.cli.lmtp import run

    raise typer.Exit(_interruptible(run, ctx))


@app.command(epilog=STAGE_EXAMPLES)
def stage(
    ctx: typer.Context,
    model: options.Model = defaults.EMBEDDED,
    layers: options.Layers = None,
    ends: options.Ends = defaults.ENDS,
    dtype: options.DtypeOption = None,
    device: options.ServedDevice = defaults.DEVICE,
    threads: options.StageThreads = None,
    context: options.Context = None,
    config: options.Config = None,
    listen: options.Listen = defaults.LISTEN,
    sessions: options.Sessions = defaults.SERVED_SESSIONS,
    drain: options.Drain = defaults.DRAIN_S,
    trace_file: options.TraceFile = None,
    print_config: options.PrintConfig = False,
    parent: options.Parent = None,
) -> None:
    """Serve some layers of a target, until SIGTERM or Ctrl-C."""
    from specsplit.cli.stage import run

    raise typer.Exit(_interruptible(run, ctx))


@app.command("stage-check", epilog=CHECK_EXAMPLES)
def stage_check(
    ctx: typer.Context,
    model: options.Model = defaults.EMBEDDED,
    stages: options.Stages = None,
    ends: options.Ends = defaults.ENDS,
    dtype: options.DtypeOption = None,
    device: options.ServedDevice = defaults.DEVICE,
    threads: options.ServedThreads = None,
    context: options.Context = None,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Send a known packet down a chain of stages and compare every boundary with the model in one process."""
    from specsplit.cli.stage_check import run

    raise typer.Exit(_interruptible(run, ctx))


app.registered_commands += [command for part in (chat, plan, top) for command in part.app.registered_commands]


keys = typer.Typer(help="API keys of the gateway.", no_args_is_help=True)
app.add_typer(keys, name="keys")


@keys.callback()
def keys_root() -> None:
    """Make keys for `specsplit serve --api-key-file`."""


@keys.command("new")
def keys_new(name: Annotated[str, typer.Argument(help="The name of whoever gets the key.")]) -> None:
    """Make a key: it is printed once, on stderr, and its line for the file of keys on stdout."""
    from specsplit.gateway.keys import new_key

    key, line = new_key(name)
    typer.echo(f"The key, which is shown only now: {key}", err=True)
    typer.echo(line)


@app.command("draft-vocab")
def draft_vocab(
    corpus: Annotated[list[str], typer.Option("--corpus", help="Text to count in; may be repeated.", metavar="FILE")],
    output: Annotated[str, typer.Option("--output", help="File to write.", metavar="FILE")],
    model: Annotated[str, typer.Option("--model", help="Folder or hub id of the draft.", metavar="M")],
    size: Annotated[int, typer.Option("--size", min=1, help="How many tokens to keep.", metavar="N")] = 32_768,
) -> None:
    """Write the tokens that are frequent in texts, for a draft's head of these alone: see --draft-vocab."""
    from specsplit.cli.draft_vocab import run

    raise typer.Exit(run(model, corpus, size, output))


@app.command()
def doctor(
    ctx: typer.Context,
    target_model: options.TargetModel = defaults.EMBEDDED,
    draft_model: options.DraftModel = None,
    draft_vocab: options.DraftVocab = None,
    dtype: options.DtypeOption = None,
    device: options.DeviceOption = defaults.DEVICE,
    threads: options.Threads = None,
    context: options.Context = None,
    config: options.Config = None,
    target: options.Target = None,
    draft: options.Draft = None,
    json: options.Json = False,
) -> None:
    """Check versions, settings, and the models here or the workers elsewhere; exit 0 if all is well."""
    from specsplit.cli.doctor import run

    raise typer.Exit(_interruptible(run, ctx))


def _interruptible(run: Callable[[Mapping[str, Any]], int], ctx: typer.Context) -> int:
    """Run a command and return its exit code; Ctrl-C before there is any text ends here, with a word to the user."""
    # typer would turn Ctrl-C into a silent exit.
    try:
        return run(options.given(ctx))
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        return INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C.

    Without `arguments` it takes those of the process, and may change settings of the whole process.
    """
    # Both libraries read these when they are imported. Errors of theirs that matter are reported in our own words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for stream in (sys.stdout, sys.stderr):
        # The encoding of an odd locale may lack a character of the answer, which is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code: Any = app(args=arguments, prog_name="specsplit", standalone_mode=False, obj=arguments is None)
        sys.stdout.flush()
    except SpecSplitError as error:
        return _fail(error, str(error), error.exit_code)
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit, and would report the broken pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the end of the line: nobody above could say it better
        # Errors of the option parser have this method; everything else is a defect of ours.
        message = getattr(error, "format_message", None)
        if message is not None:
            return _fail(error, f"{_sentence(message())} See --help.", 2)
        hint = f"Set {defaults.ENV_DEBUG}=1 for the traceback."
        return _fail(error, f"Unexpected {type(error).__name__}: {_sentence(str(error))} {hint}", 1)
    return code if isinstance(code, int) else 0


def _fail(error: BaseException, message: str, code: int) -> int:
    if is_debugging():
        traceback.print_exception(error)
    typer.echo(f"Error: {message}", err=True)
    return code


def _sentence(text: str) -> str:
    """Return `text` on one line, ending as a sentence does."""
    text = " ".join(text.split())
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."
