"""The cache of the model hub on disk, as a download leaves it: a repository with several revisions."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.support.model_zoo import FAMILIES, save_model


def fill_cache(cache: Path, repository: str, revisions: Mapping[str, int], family: str = "llama") -> dict[str, str]:
    """Lay out a random model for each revision, made of that seed; return the commits by revision."""
    root, commits = cache / f"models--{repository.replace('/', '--')}", dict[str, str]()
    for name in ("blobs", "refs", "snapshots"):
        (root / name).mkdir(parents=True)
    for revision, seed in revisions.items():
        commit = commits[revision] = f"{seed:040x}"
        made, snapshot = root / "blobs" / f"made-{seed}", root / "snapshots" / commit
        save_model(made, FAMILIES[family](), seed=seed)
        snapshot.mkdir()
        for file in made.iterdir():
            blob = root / "blobs" / f"{seed}-{file.name}"
            file.rename(blob)
            (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
        shutil.rmtree(made)
        (root / "refs" / revision).write_text(commit)
    return commits
