"""`specsplit top` on the command line. Imports nothing heavy, since `--help` waits for it."""

from __future__ import annotations

from typing import Annotated

import typer

from specsplit.cli import options
from specsplit.cli.help import ShortCommand

EXAMPLES = """Examples:

specsplit top --target target-host:7001 --draft draft-host:7002 --insecure

specsplit top --target host-a:7001 --stage host-b:7101 --stage host-c:7102 --insecure --once --json
"""
app = typer.Typer()
_WORKERS, _OUTPUT = "Workers", "Output"


def _addresses(name: str, role: str) -> typer.models.OptionInfo:
    text = f"Watch the {role} there; may be repeated. [dim]\\[default: those of the settings][/dim]"
    return typer.Option(name, help=text, rich_help_panel=_WORKERS, show_default=False, metavar="HOST:PORT")


@app.command("top", cls=ShortCommand, epilog=EXAMPLES)
@options.linked
def top(
    ctx: typer.Context,
    target: Annotated[list[str] | None, _addresses("--target", "target")] = None,
    draft: Annotated[list[str] | None, _addresses("--draft", "draft")] = None,
    stage: Annotated[list[str] | None, _addresses("--stage", "stage")] = None,
    interval: Annotated[
        float,
        typer.Option("--interval", min=0.1, help="Seconds between two looks.", rich_help_panel=_OUTPUT, metavar="S"),
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one table and end.", rich_help_panel=_OUTPUT, metavar=" ")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at each look.", rich_help_panel=_OUTPUT, metavar=" ")
    ] = False,
    config: options.Config = None,
) -> None:
    """Watch workers and stages: sessions, queue, slots, steps, tokens per second, acceptance, reused prefixes."""
    from specsplit.cli.top_view import View, run

    view = View(interval_s=interval, is_once=once, is_json=as_json)
    links = {name: value for name, value in options.given(ctx).items() if name in options.LINK_OPTIONS}
    raise typer.Exit(run({"target": target, "draft": draft, "stage": stage}, view, config, links))
