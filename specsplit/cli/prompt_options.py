"""Options of the commands that generate text: the prompt, how tokens are sampled, and how rounds speculate.

Imports nothing heavy, since `--help` waits for it.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specsplit.core.defaults import DEFAULT_BRANCHING, DEFAULT_DEPTH, DEFAULT_NODES, Mode

_PROMPT, _SAMPLING, _SPECULATION = "Prompt", "Sampling", "Speculation"


def option(names: str, panel: str, text: str, default: str | None = None, metavar: str | None = None) -> Any:
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
Prompt = Annotated[str | None, option("--prompt -p", _PROMPT, "The prompt, instead of PROMPT.", "none", "TEXT")]
PromptFile = Annotated[
    str | None,
    option("--prompt-file -f", _PROMPT, "File to read the prompt from; - for standard input.", "none", "FILE"),
]
PromptsFile = Annotated[
    str | None,
    option(
        "--prompts-file",
        _PROMPT,
        "File with many prompts, one JSON object a line; - for standard input.",
        "none",
        "FILE",
    ),
]
Output = Annotated[
    str | None,
    option(
        "--output", _PROMPT, "File for the answers to --prompts-file; one that exists is continued.", "none", "FILE"
    ),
]
Concurrency = Annotated[
    int, option("--concurrency", _PROMPT, "Prompts of --prompts-file that are answered at a time.", metavar="N")
]
Chat = Annotated[bool, option("--chat", _PROMPT, "Wrap the prompt in the model's chat template.", "off")]
ChatTemplateKwargs = Annotated[
    str | None,
    option(
        "--chat-template-kwargs",
        _PROMPT,
        'Variables of the chat template, such as {"enable_thinking": false}.',
        "none",
        "JSON",
    ),
]

MaxNewTokens = Annotated[int, option("--max-new-tokens -n", _SAMPLING, "Tokens of the answer, at most.", metavar="N")]
Temperature = Annotated[
    float,
    option(
        "--temperature -t", _SAMPLING, "0 takes the likeliest token each time; above 0 tokens are sampled.", metavar="X"
    ),
]
TopP = Annotated[
    float,
    option(
        "--top-p", _SAMPLING, "Sample from the likeliest tokens whose probabilities sum to X; 1 keeps all.", metavar="X"
    ),
]
TopK = Annotated[int, option("--top-k", _SAMPLING, "Sample from the N likeliest tokens; 0 keeps all.", metavar="N")]
MinP = Annotated[
    float,
    option(
        "--min-p",
        _SAMPLING,
        "Sample from tokens at least X times as likely as the likeliest; 0 keeps all.",
        metavar="X",
    ),
]
Seed = Annotated[
    int | None, option("--seed -s", _SAMPLING, "The same seed repeats a sampled text exactly.", "64 random bits", "N")
]
Stop = Annotated[
    list[str] | None, option("--stop", _SAMPLING, "End the answer before this text; may be repeated.", "none", "S")
]
PresencePenalty = Annotated[
    float,
    option(
        "--presence-penalty",
        _SAMPLING,
        "Subtracted from the logit of each token that the answer has already.",
        metavar="X",
    ),
]
FrequencyPenalty = Annotated[
    float,
    option(
        "--frequency-penalty", _SAMPLING, "The same, once for each time that the answer has the token.", metavar="X"
    ),
]
RepetitionPenalty = Annotated[
    float,
    option(
        "--repetition-penalty",
        _SAMPLING,
        "Makes tokens of prompt and answer less likely if it is above 1.",
        metavar="X",
    ),
]
LogitBias = Annotated[
    list[str] | None,
    option("--logit-bias", _SAMPLING, "Add X to the logit of token ID; may be repeated.", "none", "ID=X"),
]
IgnoreEos = Annotated[bool, option("--ignore-eos", _SAMPLING, "Go on after an end-of-sequence token.", "off")]

ModeOption = Annotated[
    Mode,
    option(
        "--mode", _SPECULATION, "How to speculate: overlap and stream draft while the target verifies; plain does not."
    ),
]
Lookup = Annotated[
    bool,
    option(
        "--lookup/--no-lookup",
        _SPECULATION,
        "Also propose the tokens that followed the same words earlier in the text.",
    ),
]
Nodes = Annotated[
    int | None,
    option(
        "--nodes",
        _SPECULATION,
        "Nodes of a tree that are verified in one round, at most.",
        f"{DEFAULT_NODES}, or auto's choice",
        "N",
    ),
]
Depth = Annotated[
    int | None,
    option(
        "--depth",
        _SPECULATION,
        "Levels of a tree, at most.",
        f"{DEFAULT_DEPTH}, or auto's choice; that of --nodes where pingpong drafts chains by default",
        "D",
    ),
]
Branching = Annotated[
    int | None,
    option(
        "--branching",
        _SPECULATION,
        "Children of a node, at most; 1 drafts chains.",
        f"{DEFAULT_BRANCHING}, or 1 in pingpong where further children slow this target",
        "B",
    ),
]
Explain = Annotated[bool, option("--explain", _SPECULATION, "Show how each round was run, and why.", "off")]
Compare = Annotated[
    bool, option("--compare", _SPECULATION, "Also generate without speculation, and compare the two.", "off")
]
