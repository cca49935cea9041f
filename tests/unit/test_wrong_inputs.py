"""Wrong input to every command: one sentence and the right exit code, no traceback, and no wait.

The inputs are made from the options that a command declares, so a new option is tried without a line here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

from specsplit.cli.commands import app
from specsplit.cli.main import main

COMMANDS = {
    f"{group}{info.name or info.callback.__name__}": info.callback
    for group, parser in [("", app), *((f"{each.name} ", each.typer_instance) for each in app.registered_groups)]
    for info in (parser.registered_commands if parser is not None else ())
    if info.callback
}
NEEDED = {
    "orchestrate": ["a"],
    "lmtp": ["--stdio"],
    "stage": ["--layers", "0:1"],
    "certs dev": [os.devnull],
    "draft-vocab": ["--corpus", __file__, "--output", os.devnull],
}
"""Arguments without which a command would refuse anything, whatever else is wrong."""
NUMBERS = ("many", "1.2.3", "", " ", "1,5", "0x", "--")
ADDRESSES = ("nowhere", ":1", "host:", "a:99999", "a b:1", "http://a:1", "a:-1")
MODELS = ("./nowhere", "model.gguf", "not a name!", "/dev/null", "~nobody-here/x")
FILES = ("no/such/folder/file", "/")
WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("--target", "--draft", "--stages", "--spares", "--listen", "--http", "--lmtp"), ADDRESSES),
    **dict.fromkeys(("--target-model", "--draft-model", "--model"), MODELS),
    **dict.fromkeys(("--config", "--prompt-file", "--prompts-file", "--trace-file"), FILES),
    "--layers": ("x", "3:1", "1:", ":1", "1-2"),
    "--kv-memory": ("5%", "2", "-1GiB"),
    "--host": ("a b", "a..b", "*"),
    "--threads": ("many", "0", "-1", "1.5"),
    "--logit-bias": ("5", "a=b", "=1"),
}
TABLES = (
    "[target",
    "x = 1",
    "[target]\nmodle = 1",
    "[draft]\nthreads = 0",
    "temperature = 1",
    "[orchestrator]\nmode = 3",
)
MOST = 60 if os.environ.get("SPECSPLIT_TEST_ALL") == "1" else 4
"""Wrong inputs for each command."""


def _options(command: str) -> dict[str, Any]:
    """Return the long names of a command's options that are shown, with the types of their values."""
    found: dict[str, Any] = {}
    for hint in get_type_hints(COMMANDS[command], include_extras=True).values():
        kind, option = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)
        # In an annotation typer keeps the first name as the default, which stands in the signature there.
        names = [
            name for name in (getattr(option, "default", None), *(getattr(option, "param_decls", None) or ())) if name
        ]
        long = [name for name in names if isinstance(name, str) and name.startswith("--")]
        if long and option is not None and not option.hidden:
            found[long[0].partition("/")[0]] = _kind(kind)
    return found


def _kind(kind: Any) -> Any:
    """Return the type of one value: that of an optional one, or of an item of a list."""
    if get_origin(kind) is Literal or not get_args(kind):
        return kind
    return _kind(next(each for each in get_args(kind) if each is not type(None)))


def _wrong(command: str) -> Iterator[list[str]]:
    """Yield arguments of which one is wrong; those that are most different from each other come first."""
    options = _options(command)
    guard = next((name for name in ("--target-model", "--model") if name in options), None)
    # Whatever is taken for right in spite of all goes on to a model that there is not, and never serves.
    needed = [*NEEDED.get(command, []), *([guard, "./nowhere"] if guard is not None else [])]
    yield [*needed, "--no-such-option"]
    yield [*needed, "one", "two", "three"]
    for name, kind in options.items():
        if kind in (int, float):
            yield from ([*needed, f"{name}={value}"] for value in NUMBERS)
        elif get_origin(kind) is Literal:
            yield from ([*needed, f"{name}={value}"] for value in ("nothing", "", "AUTO"))
        elif kind is bool:
            yield [*needed, f"{name}=3"]
        elif name in WORDS:
            yield from ([*needed, name, value] for value in WORDS[name])
    for name, kind in options.items():
        yield [*needed, f"{name}s-"]
        if kind is not bool:
            yield [*needed, name]
    # Whoever has seen an option at another command tries it here.
    yield from ([*needed, f"{name}=1"] for name in sorted(EVERY_OPTION - options.keys()))


def _spread(cases: list[list[str]], most: int) -> list[list[str]]:
    """Return at most so many of the cases, evenly spread."""
    return [cases[index * len(cases) // most] for index in range(most)] if len(cases) > most else cases


EVERY_OPTION = {name for command in COMMANDS for name in _options(command)}


def test_there_are_enough_wrong_inputs_for_each_command():
    assert min(len(list(_wrong(command))) for command in COMMANDS) >= 60


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_input_is_one_sentence(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    cases = list(_wrong(command))
    if "--config" in _options(command):
        for number, table in enumerate(TABLES):
            Path(f"{number}.toml").write_text(table)
            cases.insert(2 + number, [*cases[0][:-1], "--config", f"{number}.toml"])
    for case in _spread(cases, MOST):
        code = main([*command.split(), *case])
        out, err = capsys.readouterr()
        assert code in (1, 2), (case, out, err)
        assert "Traceback" not in out + err
        # The doctor reports what is wrong in its table, unless its own options are.
        if not (command == "doctor" and code == 1):
            *notes, said = err.splitlines()
            assert said.startswith("Error: "), (case, err)
            assert said.endswith("."), (case, err)
            assert "Unexpected" not in said, (case, err)
            assert out == ""
            assert all(not note.startswith("Error") for note in notes)
