"""The commands of `specsplit`, and the one place where an exception becomes a sentence and exit code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import typer

from specsplit.cli import certs, chat, draft_vocab, examples, keys, options, plan, prompt_options, top, trace
from specsplit.cli.failure import fail
from specsplit.cli.help import HELP_NAMES, Command, Group, HelpAll, ShortCommand, Version
from specsplit.cli.other_programs import refuse_short_options_of_others
from specsplit.cli.run_given import run_given
from specsplit.cli.standard_streams import drop_stdout, is_stdout_broken, open_closed_streams
from specsplit.core import defaults
from specsplit.core.errors import SpecSplitError

app = typer.Typer(
    name="specsplit",
    cls=Group,
    epilog=examples.ALL,
    help="Disaggregated speculative decoding: a draft proposes token trees, a target verifies them.",
    context_settings=HELP_NAMES,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Version = False,
) -> None:
    """Serve a large model faster: a small one proposes, the large one verifies, the text is the large one's."""
    if version:
        import specsplit

        typer.echo(specsplit.__version__)
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command(cls=Command, epilog=examples.ORCHESTRATE)
@options.loading
def orchestrate(
    ctx: typer.Context,
    text: prompt_options.Text = None,
    prompt: prompt_options.Prompt = None,
    prompt_file: prompt_options.PromptFile = None,
    prompts_file: prompt_options.PromptsFile = None,
    output: prompt_options.Output = None,
    concurrency: prompt_options.Concurrency = defaults.CONCURRENCY,
    chat: prompt_options.Chat = False,
    chat_template_kwargs: prompt_options.ChatTemplateKwargs = None,
    max_new_tokens: prompt_options.MaxNewTokens = defaults.MAX_NEW_TOKENS,
    temperature: prompt_options.Temperature = defaults.TEMPERATURE,
    top_p: prompt_options.TopP = defaults.TOP_P,
    top_k: prompt_options.TopK = defaults.TOP_K,
    min_p: prompt_options.MinP = defaults.MIN_P,
    seed: prompt_options.Seed = None,
    stop: prompt_options.Stop = None,
    presence_penalty: prompt_options.PresencePenalty = defaults.PRESENCE_PENALTY,
    frequency_penalty: prompt_options.FrequencyPenalty = defaults.FREQUENCY_PENALTY,
    repetition_penalty: prompt_options.RepetitionPenalty = defaults.REPETITION_PENALTY,
    logit_bias: prompt_options.LogitBias = None,
    ignore_eos: prompt_options.IgnoreEos = False,
    mode: prompt_options.ModeOption = defaults.MODE,
    nodes: prompt_options.Nodes = None,
    depth: prompt_options.Depth = None,
    branching: prompt_options.Branching = None,
    lookup: prompt_options.Lookup = defaults.LOOKUP,
    compare: prompt_options.Compare = False,
    explain: prompt_options.Explain = False,
    target_model: options.TargetModel = defaults.EMBEDDED,
    draft_model: options.DraftModel = None,
    revision: options.Revision = None,
    draft_revision: options.DraftRevision = None,
    draft_vocab: options.DraftVocab = None,
    dtype: options.DtypeOption = None,
    device: options.DeviceOption = defaults.DEVICE,
    threads: options.Threads = None,
    context: options.Context = None,
    draft_context: options.DraftContext = None,
    kv_memory: options.KVMemory = None,
    config: options.Config = None,
    target: options.Target = None,
    draft: options.Draft = None,
    priority: options.Priority = defaults.DEFAULT_PRIORITY,
    timeout: options.Timeout = None,
    retry: options.Retry = defaults.RETRY_S,
    draft_patience: options.DraftPatience = defaults.DRAFT_PATIENCE_S,
    audit: options.Audit = 0.0,
    auditor: options.Auditor = None,
    logprobs: options.Logprobs = None,
    json: options.Json = False,
    trace_file: options.TraceFile = None,
    print_config: options.PrintConfig = False,
    help_all: HelpAll = False,
) -> None:
    """Continue a prompt, or many, with models in this process or with workers elsewhere."""
    from specsplit.cli.orchestrate import run

    raise typer.Exit(run_given(partial(run, owns_process=ctx.obj is True), ctx))


@app.command(cls=Command, epilog=examples.SERVICE)
@options.draft_limited
@options.served
def draft(
    ctx: typer.Context,
    model: options.Model = defaults.EMBEDDED,
    revision: options.Revision = None,
    vocab: options.ServedVocab = None,
    dtype: options.DtypeOption = None,
    device: options.ServedDevice = defaults.DEVICE,
    threads: options.ServedThreads = None,
    context: options.ServedDraftContext = None,
    kv_memory: options.KVMemory = None,
    config: options.Config = None,
    served_name: options.ServedName = None,
    listen: options.Listen = defaults.LISTEN,
    sessions: options.Sessions = None,
    queue: options.Queue = None,
    step_tokens: options.StepTokens = None,
    prefill_chunk: options.PrefillChunk = None,
    prefix_reuse: options.ReusePrefixes = defaults.PREFIX_REUSE,
    session_ttl: options.SessionTtl = defaults.SESSION_TTL_S,
    drain: options.Drain = defaults.DRAIN_S,
    trace_file: options.TraceFile = None,
    print_config: options.PrintConfig = False,
    default_context: options.DefaultContext = None,
    all_cores: options.AllCores = False,
    parent: options.Parent = None,
    help_all: HelpAll = False,
) -> None:
    """Serve a draft, which proposes token trees, until SIGTERM or Ctrl-C."""
    from specsplit.cli.serve import run

    raise typer.Exit(run_given(partial(run, "draft"), ctx))


@app.command(cls=Command, epilog=examples.SERVICE)
@options.target_limited
@options.served
def target(
    ctx: typer.Context,
    model: options.Model = defaults.EMBEDDED,
    draft_model: options.DraftBeside = None,
    revision: options.Revision = None,
    draft_revision: options.DraftRevision = None,
    draft_vocab: options.DraftVocab = None,
    dtype: options.DtypeOption = None,
    device: options.ServedDevice = defaults.DEVICE,
    threads: options.ServedThreads = None,
    context: options.Context = None,
    draft_context: options.DraftContext = None,
    kv_memory: options.KVMemory = None,
    config: options.Config = None,
    layers: options.FirstLayers = None,
    stages: options.Stages = None,
    spares: options.Spares = None,
    local_stages: options.LocalStages = None,
    ends: options.Ends = defaults.ENDS,
    retry: options.StageRetry = defaults.RETRY_S,
    step_timeout: options.StepTimeout = defaults.STEP_TIMEOUT_S,
    served_name: options.ServedName = None,
    listen: options.Listen = defaults.LISTEN,
    sessions: options.Sessions = None,
    queue: options.Queue = None,
    step_tokens: options.StepTokens = None,
    prefill_chunk: options.PrefillChunk = None,
    prefix_reuse: options.ReusePrefixes = defaults.PREFIX_REUSE,
    session_ttl: options.SessionTtl = defaults.SESSION_TTL_S,
    drain: options.Drain = defaults.DRAIN_S,
    trace_file: options.TraceFile = None,
    print_config: options.PrintConfig = False,
    parent: options.Parent = None,
    help_all: HelpAll = False,
) -> None:
    """Serve a target, which verifies token trees, until SIGTERM or Ctrl-C; its layers are here or on stages."""
    from specsplit.cli.serve import run

    raise typer.Exit(run_given(partial(run, "target"), ctx))


@app.command(cls=Command, epilog=examples.GATEWAY)
@options.gateway_limited
@options.served
def serve(
    ctx: typer.Context,
    served_model: options.ServedModel = None,
    http: options.Http = defaults.HTTP,
    lmtp: options.Lmtp = None,
    log_messages: options.LogMessages = None,
    log_prompts: options.LogPrompts = False,
    api_key_file: options.ApiKeyFile = None,
    allow_anonymous: options.AllowAnonymous = False,
    max_body_mib: options.MaxBodyMib = 1,
    served_name: options.ServedName = None,
    per_request_spec_decode_metrics: options.SpecDecodeMetrics = "none",
    target_model: options.TargetModel = defaults.EMBEDDED,
    draft_model: options.DraftModel = None,
    revision: options.Revision = None,
    draft_revision: options.DraftRevision = None,
    draft_vocab: options.DraftVocab = None,
    dtype: options.DtypeOption = None,
    device: options.DeviceOption = defaults.DEVICE,
    threads: options.Threads = None,
    context: options.Context = None,
    draft_context: options.DraftContext = None,
    kv_memory: options.KVMemory = None,
    config: options.Config = None,
    target: options.Targets = None,
    draft: options.Drafts = None,
    sessions: options.StartedSessions = None,
    queue: options.StartedQueue = None,
    retry: options.GatewayRetry = None,
    draft_patience: options.DraftPatience = defaults.DRAFT_PATIENCE_S,
    audit: options.Audit = 0.0,
    auditor: options.Auditor = None,
    drain: options.Drain = defaults.DRAIN_S,
    mode: prompt_options.ModeOption = defaults.MODE,
    nodes: prompt_options.Nodes = None,
    depth: prompt_options.Depth = None,
    branching: prompt_options.Branching = None,
    lookup: prompt_options.Lookup = defaults.LOOKUP,
    trace_file: options.TraceFile = None,
    print_config: options.PrintConfig = False,
    help_all: HelpAll = False,
) -> None:
    """Serve OpenAI's HTTP API over workers elsewhere, or over workers that it starts here and keeps running."""
    from specsplit.cli.gateway import run

    raise typer.Exit(run_given(partial(run, owns_process=ctx.obj is True), ctx))


@app.command(cls=ShortCommand)
@options.logged
def lmtp(
    ctx: typer.Context,
    stdio: options.Stdio,
    log_messages: options.LogMessages = None,
    log_prompts: options.LogPrompts = False,
    target_model: options.TargetModel = defaults.EMBEDDED,
    draft_model: options.DraftModel = None,
    revision: options.Revision = None,
    draft_revision: options.DraftRevision = None,
    dtype: options.DtypeOption = None,
    device: options.DeviceOption = defaults.DEVICE,
    threads: options.Threads = None,
    context: options.Context = None,
    config: options.Config = None,
    target: options.Targets = None,
    draft: options.Drafts = None,
    mode: prompt_options.ModeOption = defaults.MODE,
    trace_file: options.TraceFile = None,
) -> None:
    """Speak LMTP with one client over stdin and stdout, one frame a line, until stdin ends; see also serve --lmtp."""
    from specsplit.cli.lmtp import run

    raise typer.Exit(run_given(partial(run, owns_process=ctx.obj is True), ctx))


@app.command(cls=Command, epilog=examples.STAGE)
@options.served
def stage(
    ctx: typer.Context,
    model: options.Model = defaults.EMBEDDED,
    revision: options.Revision = None,
    layers: options.Layers = None,
    next: options.Next = None,
    ends: options.Ends = defaults.ENDS,
    dtype: options.DtypeOption = None,
    device: options.ServedDevice = defaults.DEVICE,
    threads: options.StageThreads = None,
    context: options.Context = None,
    kv_memory: options.KVMemory = None,
    config: options.Config = None,
    listen: options.Listen = defaults.LISTEN,
    sessions: options.StageSessions = defaults.SERVED_SESSIONS,
    drain: options.Drain = defaults.DRAIN_S,
    trace_file: options.TraceFile = None,
    print_config: options.PrintConfig = False,
    parent: options.Parent = None,
    help_all: HelpAll = False,
) -> None:
    """Serve some layers of a target, until SIGTERM or Ctrl-C."""
    from specsplit.cli.stage import run

    raise typer.Exit(run_given(run, ctx))


@app.command("stage-check", cls=Command, epilog=examples.STAGE_CHECK)
@options.linked
def stage_check(
    ctx: typer.Context,
    model: options.Model = defaults.EMBEDDED,
    revision: options.Revision = None,
    stages: options.Stages = None,
    ends: options.Ends = defaults.ENDS,
    dtype: options.DtypeOption = None,
    device: options.ServedDevice = defaults.DEVICE,
    threads: options.ServedThreads = None,
    context: options.Context = None,
    config: options.Config = None,
    json: options.Json = False,
    help_all: HelpAll = False,
) -> None:
    """Send a known packet down a chain of stages and compare every boundary with the model in one process."""
    from specsplit.cli.stage_check import run

    raise typer.Exit(run_given(run, ctx))


for other in (chat, plan, top, trace, draft_vocab):
    app.registered_commands += other.app.registered_commands
app.add_typer(keys.app, name="keys")
app.add_typer(certs.app, name="certs")


@app.command(cls=ShortCommand)
@options.loading
def doctor(
    ctx: typer.Context,
    target_model: options.TargetModel = defaults.EMBEDDED,
    draft_model: options.DraftModel = None,
    revision: options.Revision = None,
    draft_revision: options.DraftRevision = None,
    draft_vocab: options.DraftVocab = None,
    dtype: options.DtypeOption = None,
    device: options.DeviceOption = defaults.DEVICE,
    threads: options.Threads = None,
    context: options.Context = None,
    draft_context: options.DraftContext = None,
    kv_memory: options.KVMemory = None,
    config: options.Config = None,
    target: options.Target = None,
    draft: options.Draft = None,
    json: options.Json = False,
) -> None:
    """Check versions, settings, and the models here or the workers elsewhere; exit 0 if all is well."""
    from specsplit.cli.doctor import run

    raise typer.Exit(run_given(run, ctx))


def run(arguments: Sequence[str] | None) -> int:
    """Run the command line and return its exit code; see `specsplit.cli.main`.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed before a command ran.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        open_closed_streams()
    # These libraries read these when they are imported. Errors of theirs that matter are reported in our own words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    for stream in (sys.stdout, sys.stderr):
        # The encoding of an odd locale may lack a character of the answer, which is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        refuse_short_options_of_others(words)
        code: Any = app(args=arguments, prog_name="specsplit", standalone_mode=False, obj=arguments is None)
        sys.stdout.flush()
    except SpecSplitError as error:
        return fail(error, str(error), error.exit_code, words)
    except BrokenPipeError:
        drop_stdout()
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and is_stdout_broken():
            return fail(error, f"Standard output cannot be written ({error.strerror}).", 1, words)
        if "KeyboardInterrupt" in str(error):
            # pydantic makes a SchemaError of Ctrl-C while a class of its own is built.
            raise KeyboardInterrupt from error
        # Imported here, since it brings pydantic, which a plain start need not wait for.
        from specsplit.cli.usage import sentence, usage_sentence

        usage = usage_sentence(error)
        if usage is not None:
            return fail(error, usage, 2, words)
        hint = f"Set {defaults.ENV_DEBUG}=1 for the traceback."
        return fail(error, f"Unexpected {type(error).__name__}: {sentence(str(error))} {hint}", 1, words)
    return code if isinstance(code, int) else 0
