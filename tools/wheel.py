"""Builds wheel and sdist, and writes text with the wheel where nothing else of this checkout can be imported.

`python -m tools.wheel FOLDER`. The environment that it makes borrows the dependencies of this one, which took minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("README.md", "LICENSE", "pyproject.toml", "specsplit/py.typed", "specsplit/model/embedded/README.md")
"""Some files that a source distribution has to have."""


def main(folder: Path) -> int:
    """Build into `folder` and check what was built; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="specsplit-wheel-") as scratch:
        _build(folder.resolve(), Path(scratch) / "backend")
        (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            held = {name.partition("/")[2] for name in archive.getnames()}
        missing = [name for name in NEEDED if name not in held]
        if missing:
            sys.stderr.write(f"{sdist.name} lacks {', '.join(missing)}.\n")
            return 1
        answer = _write_text(wheel.resolve(), Path(scratch) / "installed")
    sys.stdout.write(json.dumps({"wheel": wheel.name, "sdist": sdist.name, **answer}) + "\n")
    return 0


def _build(folder: Path, backend: Path) -> None:
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    _run(sys.executable, "-m", "pip", "install", "--quiet", "--target", str(backend), *requires)
    build = (sys.executable, "-m", "hatchling", "build", "--directory", str(folder), "--target")
    _run(*build, "sdist", PYTHONPATH=str(backend))
    # The wheel is made from the sdist, as pip makes one for who installs the sdist.
    (sdist,), source = folder.glob("*.tar.gz"), backend.with_name("source")
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    _run(*build, "wheel", cwd=next(source.iterdir()), PYTHONPATH=str(backend))


def _write_text(wheel: Path, home: Path) -> dict[str, object]:
    """Install the wheel alone, and return its version and how many tokens its embedded pair wrote offline."""
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python*/site-packages")
    _run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel))
    # What a .pth file names comes behind the environment's own; .pth files in it, of an editable install, do nothing.
    (site / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    command = home / "bin" / "specsplit"
    version = _run(str(command), "--version", cwd=home)
    prompt = ("def add(a, b):", "--max-new-tokens", "16", "--json")
    answer = json.loads(_run(str(command), "orchestrate", *prompt, cwd=home, HF_HUB_OFFLINE="1"))
    where = _run(str(python), "-c", "import specsplit; print(specsplit.__file__)", cwd=home)
    assert Path(where).is_relative_to(site), f"the text came from {where}"
    return {"version": version, "tokens": len(answer["token_ids"])}


def _run(*command: str, cwd: Path = ROOT, **changes: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | changes
    done = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
