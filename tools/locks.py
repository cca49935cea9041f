"""Writes the versions and hashes of what each image holds (requirements/), and lists of it for whoever checks them.

`python -m tools.locks` needs `uv`, `python -m tools.locks --sbom FOLDER` needs `cyclonedx-bom`; make installs them.
An image's torch is its builder's choice, of a CPU or CUDA build, so torch and what only torch needs stand in none.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "requirements"
EXTRAS = {"orchestrator": ("otlp",), "gateway": ("gateway", "otlp"), "worker": ("worker", "otlp")}
"""The extras of each image; a cluster may name a collector of traces to every pod."""
BUILD = "build"
"""The lock of what builds our own package in the images."""
_TORCHS = ("cuda", "nvidia-", "torch", "triton")
"""How the names of torch and of what only it needs begin."""
_LINUX = ("--python-version", "3.11", "--python-platform", "linux")
_FORM = ("--generate-hashes", "--no-header", "--no-annotate")


def write() -> None:
    """Write all locks, of the versions in constraints.txt."""
    LOCKS.mkdir(exist_ok=True)
    for image, extras in EXTRAS.items():
        chosen = [part for extra in extras for part in ("--extra", extra)]
        _compile(ROOT / "pyproject.toml", image, *chosen, "--constraint", str(ROOT / "constraints.txt"))
    with tempfile.TemporaryDirectory(prefix="specsplit-locks-") as scratch:
        needs = Path(scratch) / "build.in"
        needs.write_text("hatchling\n", encoding="utf-8")
        _compile(needs, BUILD)


def _compile(source: Path, name: str, *more: str) -> None:
    command = (
        str(Path(sys.executable).parent / "uv"),
        "pip",
        "compile",
        "--quiet",
        str(source),
        *_LINUX,
        *_FORM,
        *more,
    )
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    (LOCKS / f"{name}.txt").write_text("".join(f"{entry}\n" for entry in _entries(found)), encoding="utf-8")


def _entries(text: str) -> list[str]:
    """Return the requirements with their hashes, but for torch's."""
    whole = text.replace("\\\n", "\\\0").splitlines()
    return [each.replace("\0", "\n") for each in whole if each and not each.startswith((*_TORCHS, "#", "-"))]


def list_contents(folder: Path) -> None:
    """Write a CycloneDX list of the contents of each image into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for image in EXTRAS:
        lock, listed = LOCKS / f"{image}.txt", folder / f"specsplit-{image}.cdx.json"
        maker = str(Path(sys.executable).parent / "cyclonedx-py")
        project = ("--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible", "--output-file", str(listed))
        subprocess.run((maker, "requirements", str(lock), *project), check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sbom"]:
        list_contents(Path(sys.argv[2]))
    else:
        write()
