"""`specsplit keys`: API keys for the gateway. Imports nothing heavy, since `--help` waits for it."""

from __future__ import annotations

from typing import Annotated

import typer

from specsplit.cli.help import Group, ShortCommand

app = typer.Typer(cls=Group, help="API keys of the gateway.")


@app.callback(invoke_without_command=True)
def keys(ctx: typer.Context) -> None:
    """Make keys for `specsplit serve --api-key-file`."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command("new", cls=ShortCommand)
def new(name: Annotated[str, typer.Argument(help="The name of whoever gets the key.")]) -> None:
    """Make a key: it is printed once, on stderr, and its line for the file of keys on stdout."""
    from specsplit.gateway.keys import new_key

    key, line = new_key(name)
    typer.echo(f"The key, which is shown only now: {key}", err=True)
    typer.echo(line)
