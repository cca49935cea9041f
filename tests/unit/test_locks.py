"""The versions and hashes of the images' contents are those of constraints.txt, and hold what the package asks for."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.support.kubernetes import ROOT
from tools.locks import BUILD, EXTRAS, LOCKS

ENTRY = re.compile(
    r"^([a-z0-9-]+)==(\S+)(?: ; [^\\]*)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE
)


def _versions(name: str) -> dict[str, str]:
    """Return the versions of a lock; each has a hash, and nothing else stands there."""
    text = (LOCKS / f"{name}.txt").read_text(encoding="utf-8")
    assert ENTRY.sub("", text) == ""
    return {package: version for package, version, _ in ENTRY.findall(text)}


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _tested() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


@pytest.mark.parametrize("image", EXTRAS)
def test_an_image_holds_what_the_package_asks_for_in_the_tested_versions(image: str) -> None:
    held, tested, project = _versions(image), _tested(), _project()["project"]
    asked = [
        *project["dependencies"],
        *(each for extra in EXTRAS[image] for each in project["optional-dependencies"][extra]),
    ]
    needs = {need.name.replace("_", "-"): need for need in map(Requirement, asked) if need.name != "torch"}
    assert needs.keys() <= held.keys()
    assert all(need.specifier.contains(held[name]) for name, need in needs.items())
    assert {name: held[name] for name in held.keys() & tested.keys()} == {
        name: tested[name] for name in held.keys() & tested.keys()
    }
    assert "torch" not in held


def test_what_builds_the_package_has_hashes() -> None:
    assert {Requirement(each).name for each in _project()["build-system"]["requires"]} <= _versions(BUILD).keys()
