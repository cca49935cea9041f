"""The typer application that each study adds its command to. Knows no study."""

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def describe() -> None:
    """Train the embedded pair, or repeat a study that the documentation quotes."""
