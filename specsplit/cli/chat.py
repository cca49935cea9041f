"""`specsplit chat` on the command line. Imports nothing heavy, since `--help` waits for it."""

from __future__ import annotations

from typing import Annotated

import typer

from specsplit.cli import options
from specsplit.cli.help import Command, HelpAll
from specsplit.core import defaults

EXAMPLES = """Examples:

specsplit chat

specsplit chat --target-model ./large --draft-model ./small --system 'Answer in one sentence.'

specsplit chat --endpoint http://127.0.0.1:8000
"""
app = typer.Typer()


@app.command("chat", cls=Command, epilog=EXAMPLES)
@options.linked
def chat(
    ctx: typer.Context,
    raw: Annotated[bool, typer.Option("--raw", help="Go on with the text itself, without a chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="Instructions to the model.", metavar="TEXT")] = None,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", help="Use an OpenAI endpoint; its key is in SPECSPLIT_API_KEY.", metavar="URL"),
    ] = None,
    chat_template_kwargs: options.ChatTemplateKwargs = None,
    max_new_tokens: options.MaxNewTokens = defaults.MAX_NEW_TOKENS,
    temperature: options.Temperature = defaults.TEMPERATURE,
    top_p: options.TopP = defaults.TOP_P,
    top_k: options.TopK = defaults.TOP_K,
    min_p: options.MinP = defaults.MIN_P,
    presence_penalty: options.PresencePenalty = defaults.PRESENCE_PENALTY,
    frequency_penalty: options.FrequencyPenalty = defaults.FREQUENCY_PENALTY,
    repetition_penalty: options.RepetitionPenalty = defaults.REPETITION_PENALTY,
    seed: options.Seed = None,
    mode: options.ModeOption = defaults.MODE,
    target_model: options.TargetModel = defaults.EMBEDDED,
    draft_model: options.DraftModel = None,
    dtype: options.DtypeOption = None,
    device: options.DeviceOption = defaults.DEVICE,
    threads: options.Threads = None,
    context: options.Context = None,
    config: options.Config = None,
    target: options.Target = None,
    draft: options.Draft = None,
    help_all: HelpAll = False,
) -> None:
    """Talk with a model in the terminal; what the draft proposed is underlined."""
    from specsplit.cli.chat_session import run

    raise typer.Exit(run(options.given(ctx)))
