"""`specsplit trace` on the command line. Imports nothing heavy, since `--help` waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specsplit.cli.help import ShortCommand

EXAMPLES = """Examples:

specsplit orchestrate --trace run.jsonl 'def fibonacci(n):' && specsplit trace run.jsonl

specsplit trace gateway.jsonl target.jsonl draft.jsonl stage-*.jsonl --svg rounds.svg
"""
app = typer.Typer()


@app.command("trace", cls=ShortCommand, epilog=EXAMPLES)
def trace(
    files: Annotated[
        list[Path], typer.Argument(help="Files of --trace, one of each process.", metavar="FILE...", show_default=False)
    ],
    request: Annotated[
        str | None,
        typer.Option(
            "--request",
            help="Show the request whose id, session or trace begins so. [dim]\\[default: the first][/dim]",
            show_default=False,
            metavar="ID",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="Rounds to show; 0 for all.", metavar="N")] = 40,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", help="Also draw the timeline as a picture.", show_default=False, metavar="OUT"),
    ] = None,
) -> None:
    """Draw the rounds of a request on a time line: who computed, and who waited for whom."""
    from specsplit.cli.trace_view import run

    raise typer.Exit(run(files, request, rounds, svg))
