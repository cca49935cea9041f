"""`specsplit draft-vocab`: counts the tokens of texts and writes the frequent ones for `--draft-vocab`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from specsplit.cli.help import ShortCommand
from specsplit.cli.run_given import run_given
from specsplit.core.errors import InvalidRequest
from specsplit.core.paths import expanded
from specsplit.model.extra import require_worker_extra
from specsplit.model.source import check_source
from specsplit.model.vocab_file import DEFAULT_DRAFT_VOCAB, write_vocab_file

app = typer.Typer()


@app.command("draft-vocab", cls=ShortCommand)
def draft_vocab(
    ctx: typer.Context,
    corpus: Annotated[
        list[str],
        typer.Option("--corpus", help="File with text in which tokens are counted; may be repeated.", metavar="FILE"),
    ],
    output: Annotated[str, typer.Option("--output", help="File to write.", metavar="FILE")],
    model: Annotated[str, typer.Option("--model", "-m", help="Folder or hub id of the draft.", metavar="M")],
    size: Annotated[int, typer.Option("--size", min=1, help="Tokens to keep.", metavar="N")] = DEFAULT_DRAFT_VOCAB,
) -> None:
    """Write the tokens that are frequent in texts, for a draft's head of these alone: see --draft-vocab."""
    raise typer.Exit(run_given(lambda given: run(model, corpus, size, output), ctx))


def run(model: str, corpus: Sequence[str], size: int, output: str) -> int:
    """Write the `size` most frequent tokens of the files to `output`, and print the share of a text that they cover.

    The share is that of the last tenth of each file, counted by the rest, since a small corpus flatters its own tokens.

    Raises:
        InvalidRequest: a file cannot be read or written, `output` is -, or the corpus is empty.
        ModelNotFound, ModelDamaged: the model or its tokenizer cannot be read.
    """
    if not corpus:
        raise InvalidRequest("Name at least one text to count in with --corpus.", param="corpus")
    if output == "-":
        # Standard output has the share; a file of that name is never meant.
        raise InvalidRequest("--output must name a file, not -.", param="output")
    texts = [_read(Path(name)) for name in corpus]
    check_source(model, "draft")
    require_worker_extra()
    from specsplit.model import draft_vocab
    from specsplit.model.files import load_config, load_tokenizer
    from specsplit.model.source import resolve

    path, name = resolve(model, "draft")
    config = load_config(path, name)
    tokenizer, _ = load_tokenizer(path, name, config)
    if tokenizer is None:
        raise InvalidRequest(f"{name} has no tokenizer files; add its tokenizer.json.", param="model")
    cuts = [len(text) * 9 // 10 for text in texts]
    counts = draft_vocab.count_tokens([text[:cut] for text, cut in zip(texts, cuts, strict=True)], tokenizer)
    held_out = draft_vocab.count_tokens([text[cut:] for text, cut in zip(texts, cuts, strict=True)], tokenizer)
    if not counts:
        raise InvalidRequest("The corpus has no tokens; name other files with --corpus.", param="corpus")
    counts_of_all, num_tokens = counts + held_out, min(tokenizer.num_tokens, config.get_text_config().vocab_size)
    covered = draft_vocab.coverage(held_out, draft_vocab.most_frequent(counts, size, num_tokens))
    chosen = draft_vocab.most_frequent(counts_of_all, size, num_tokens)
    write_vocab_file(expanded(output), chosen, tokenizer.vocab_hash)
    found = {"output": output, "size": len(chosen), "num_tokens": counts_of_all.total(), "held_out_coverage": covered}
    typer.echo(json.dumps(found))
    return 0


def _read(path: Path) -> str:
    try:
        return expanded(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}).", param="corpus") from error
