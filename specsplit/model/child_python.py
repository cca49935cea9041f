"""Python programs of this package that are started as processes: their command and their environment.

They run none of the files in the folder that the user happens to be in.
"""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

_HOME = str(Path(__file__).resolve().parents[2])
"""The folder that the package lies in."""


def python_command(module: str) -> list[str]:
    """Return the command that runs `module`, without its arguments."""
    # Without -P the current folder stands first on the path: a random.py there would be run instead of Python's own.
    return [sys.executable, "-P", "-m", module]


def python_environment(hidden: tuple[str, ...] = ()) -> dict[str, str]:
    """Return this process's environment for a child, which finds the package that runs here.

    Variables whose names begin with one of `hidden` are left out.
    """
    # An empty entry, as PYTHONPATH=$PYTHONPATH:/more leaves it, is the current folder, too.
    folders = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    known = [*folders, *site.getsitepackages(), site.getusersitepackages()]
    if _HOME not in [str(Path(folder).resolve()) for folder in known]:
        folders.append(_HOME)  # a checkout, which may have been found only because the user is in it
    # Names of settings count in small letters, too.
    seen = {name: value for name, value in os.environ.items() if not name.upper().startswith(hidden)}
    return {**seen, "PYTHONPATH": os.pathsep.join(folders)}
