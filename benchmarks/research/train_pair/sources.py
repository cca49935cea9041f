"""Sources of the text: the standard library, and pinned packages as installed here or as pip downloads them.

Nothing is built or run: only the `.py` members of wheels and of installed packages are read. Knows no filter.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from specsplit.core.errors import InvalidSettings

FULL_LIST = Path(__file__).parent / "packages.txt"
SMALL_LIST = Path(__file__).parent / "packages_small.txt"
BATCH = 25
"""Packages per call of pip; one that fails is tried again package by package."""


@dataclass(frozen=True, slots=True)
class Package:
    """A pinned package and its licence."""

    name: str
    version: str
    licence: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def key(self) -> str:
        """The name and version as file names have them."""
        return f"{re.sub(r'[-_.]+', '_', self.name).lower()}-{self.version}"


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a package, not yet decoded."""

    package: str
    path: str
    content: bytes


def read_packages(path: Path) -> list[Package]:
    """Return the packages of a list with lines `name==version  # licence`.

    Raises:
        InvalidSettings: a line has another form.
    """
    packages: list[Package] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        found = re.fullmatch(r"(\S+)==(\S+)\s+# (.+)", line)
        if found is None:
            raise InvalidSettings(f"{path.name} has a line that is not `name==version  # licence`: {line}")
        packages.append(Package(*found.groups()))
    return packages


def standard_library() -> Iterator[Source]:
    """Read the interpreter's own library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if "site-packages" not in relative.parts and "dist-packages" not in relative.parts:
            yield Source("python", relative.as_posix(), path.read_bytes())


def installed(package: Package) -> Distribution | None:
    """Return the package as installed here, if in the pinned version (a local label such as +cpu does not count)."""
    try:
        found = distribution(package.name)
    except PackageNotFoundError:
        return None
    return found if found.version.partition("+")[0] == package.version else None


def wheels(folder: Path) -> dict[str, Path]:
    """Return the wheels of a folder by `Package.key`."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.whl")):
        name, version = path.name.split("-")[:2]
        found[Package(name, version.partition("+")[0], "").key] = path
    return found


def download(packages: Sequence[Package], folder: Path, pip_arguments: Sequence[str]) -> list[Package]:
    """Download the wheels that are neither installed nor in `folder` yet; return the packages that pip did not find.

    `pip_arguments` go to pip as they are, for instance `--no-index --find-links FOLDER`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    at_hand = wheels(folder)
    wanted = [package for package in packages if package.key not in at_hand and installed(package) is None]
    for start in range(0, len(wanted), BATCH):
        batch = wanted[start : start + BATCH]
        if not _pip_download(batch, folder, pip_arguments):
            for package in batch:
                _pip_download([package], folder, pip_arguments)
    at_hand = wheels(folder)
    return [package for package in wanted if package.key not in at_hand]


def _pip_download(packages: Iterable[Package], folder: Path, pip_arguments: Sequence[str]) -> bool:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    requirements = [package.requirement for package in packages]
    answer = subprocess.run(
        [*command, "--dest", str(folder), *pip_arguments, *requirements], capture_output=True, text=True, check=False
    )
    return answer.returncode == 0


def package_sources(package: Package, folder: Path) -> Iterator[Source]:
    """Read the Python files of a package, from where it is installed or from its wheel in `folder`."""
    found = installed(package)
    if found is not None:
        for file in sorted(found.files or [], key=str):
            path = Path(str(file.locate()))
            if file.suffix == ".py" and path.is_file():
                yield Source(package.name, file.as_posix(), path.read_bytes())
        return
    wheel = wheels(folder).get(package.key)
    if wheel is None:
        return
    with zipfile.ZipFile(wheel) as archive:
        for member in sorted(archive.namelist()):
            if member.endswith(".py"):
                yield Source(package.name, member, archive.read(member))
