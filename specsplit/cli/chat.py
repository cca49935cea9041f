"""`specsplit chat` on the command line. Imports nothing heavy, since `--help` waits for it."""

from __future__ import annotations

from typing import Annotated

import typer

from specsplit.cli import options, prompt_options
from specsplit.cli.help import Command, HelpAll
from specsplit.cli.run_given import run_given
from specsplit.core import defaults

EXAMPLES = """Examples:

specsplit chat

specsplit chat --target-model ./large --draft-model ./small --system 'Answer in one sentence.'

specsplit chat --endpoint http://127.0.0.1:8000
"""
app = typer.Typer()


@app.command("chat", cls=Command, epilog=EXAMPLES)
@options.loading
def chat(
    ctx: typer.Context,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without a chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="Instructions to the model.", metavar="TEXT")] = None,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", help="Use an OpenAI endpoint; its key is in SPECSPLIT_API_KEY.", metavar="URL"),
    ] = None,
    chat_template_kwargs: prompt_options.ChatTemplateKwargs = None,
    max_new_tokens: prompt_options.MaxNewTokens = defaults.MAX_NEW_TOKENS,
    temperature: prompt_options.Temperature = defaults.TEMPERATURE,
    top_p: prompt_options.TopP = defaults.TOP_P,
    top_k: prompt_options.TopK = defaults.TOP_K,
    min_p: prompt_options.MinP = defaults.MIN_P,
    presence_penalty: prompt_options.PresencePenalty = defaults.PRESENCE_PENALTY,
    frequency_penalty: prompt_options.FrequencyPenalty = defaults.FREQUENCY_PENALTY,
    repetition_penalty: prompt_options.RepetitionPenalty = defaults.REPETITION_PENALTY,
    seed: prompt_options.Seed = None,
    mode: prompt_options.ModeOption = defaults.MODE,
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
    help_all: HelpAll = False,
) -> None:
    """Talk with a model in the terminal; what the draft proposed is underlined."""
    from specsplit.cli.chat_session import run

    raise typer.Exit(run_given(run, ctx))
