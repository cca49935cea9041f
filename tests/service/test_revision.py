"""Revisions of a model on the hub: which files are read, what identities say, and what the doctor shows.

The hub is its cache on disk, read by the loading code of every role in offline mode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from specsplit import Pipeline
from specsplit.cli.main import main
from specsplit.core.errors import InvalidSettings, ModelNotFound, PeerMismatch
from specsplit.model.identity import weights_hash
from specsplit.model.loader import load_model
from specsplit.model.source import check_source, public_name
from specsplit.orchestrator.replicas import Replicas
from specsplit.stages.shard.chain_model import load_chain_model
from specsplit.stages.shard.loader import ShardSpec, load_shard, shard_hash
from specsplit.target.engine import TargetEngine
from tests.support.hub_cache import fill_cache
from tests.support.processes import WorkerProcess, run

NAME = "somebody/model"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def commits(cache: Path) -> dict[str, str]:
    """The commits of the two revisions that are in the cache."""
    return fill_cache(cache, NAME, {"main": 1, "v1": 2})


@pytest.fixture(autouse=True)
def _here(cache: Path, commits: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))


def _snapshot(cache: Path, commit: str) -> Path:
    return cache / "models--somebody--model" / "snapshots" / commit


@pytest.mark.parametrize(("behind", "revision"), [("", "main"), ("@main", "main"), ("@v1", "v1")])
def test_every_file_is_of_the_revision(cache: Path, commits: dict[str, str], behind: str, revision: str):
    commit = commits[revision]
    truth = weights_hash(_snapshot(cache, commit))
    model = load_model(NAME + behind, role="target", threads=1, context=32, record=False)
    assert (model.identity.model_revision, model.identity.weights_hash) == (commit, truth)
    chain = load_chain_model(NAME + behind, context=32)
    assert (chain.model_revision, chain.weights_hash) == (commit, truth)
    spec = ShardSpec(0, 1, has_embedding=True)
    shard = load_shard(NAME + behind, spec)
    of_files = shard_hash(_snapshot(cache, commit), spec)
    assert (shard.model_revision, shard.weights_hash) == (commit, of_files) == (commit, shard_hash(NAME + behind, spec))


def test_a_commit_is_a_revision_and_names_hide_it(commits: dict[str, str]):
    model = load_model(f"{NAME}@{commits['v1']}", role="draft", threads=1, context=32, record=False)
    assert model.identity.model_revision == commits["v1"]
    assert public_name(f"{NAME}@v1") == NAME


def test_a_folder_of_the_hubs_cache_knows_its_commit(cache: Path, commits: dict[str, str], tmp_path: Path):
    of_hub = load_model(str(_snapshot(cache, commits["v1"])), role="target", threads=1, context=32, record=False)
    assert of_hub.identity.model_revision == commits["v1"]
    tmp_path.joinpath("snapshots").mkdir()
    tmp_path.joinpath("snapshots", "mine").symlink_to(_snapshot(cache, commits["v1"]))
    of_mine = load_model(str(tmp_path / "snapshots" / "mine"), role="target", threads=1, context=32, record=False)
    assert of_mine.identity.model_revision == ""


def test_a_revision_that_is_not_cached_is_named():
    with pytest.raises(ModelNotFound, match=f"^{NAME}@v9 is not cached here and the model hub cannot be reached"):
        check_source(f"{NAME}@v9", "target")


@pytest.mark.parametrize("source", ["embedded@v1", f"{Path(__file__).parent}@v1"])
def test_what_is_not_on_the_hub_has_no_revisions(source: str):
    with pytest.raises(InvalidSettings, match=r"is not on the hub, so it has no revision v1; leave the revision out"):
        check_source(source, "target")


def test_a_folder_may_have_the_sign_of_a_revision_in_its_name(tmp_path: Path):
    folder = tmp_path / "model@v1"
    folder.mkdir()
    with pytest.raises(ModelNotFound, match=r"model@v1 holds no config.json"):
        check_source(str(folder), "target")


def test_a_pipeline_takes_revisions_of_both_models():
    def text(target: str, draft: str) -> tuple[int, ...]:
        with Pipeline(target, draft, mode="pingpong", context=64, threads=1) as pipeline:
            return tuple(pipeline.generate("ab", max_new_tokens=8, ignore_eos=True).token_ids)

    assert text(f"{NAME}@v1", f"{NAME}@main") == text(f"{NAME}@v1", f"{NAME}@v1") != text(NAME, NAME)


async def test_replicas_of_two_revisions_are_told_apart(commits: dict[str, str]):
    engines = {
        revision: TargetEngine(load_model(f"{NAME}@{revision}", role="target", threads=1, context=32, record=False))
        for revision in commits
    }
    replicas = Replicas(dict(engines))
    try:
        with pytest.raises(PeerMismatch, match=f"revision {commits['v1']}.* instead of .*revision {commits['main']}"):
            await replicas.check()
    finally:
        for engine in engines.values():
            await engine.aclose()


def test_the_doctor_shows_commits_of_models_here(commits: dict[str, str], capfd: Capture):
    arguments = ["--target-model", NAME, "--revision", "v1", "--draft-model", NAME, "--context", "32", "--json"]
    assert main(["doctor", *arguments]) == 0
    checks = {check["name"]: check["detail"] for check in json.loads(capfd.readouterr().out)["checks"]}
    assert checks["target revision"] == f"{commits['v1']} of {NAME}@v1"
    assert checks["draft revision"] == f"{commits['main']} of {NAME}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--revision", "v1"], "--revision is that of a model on the hub: name the model with it."),
        (["-m", NAME, "--draft-revision", "v1"], "--draft-revision is that of a model on the hub: name the model"),
        (["-m", "embedded", "--revision", "v1"], "embedded is not on the hub, so it has no revision v1; leave the"),
        (["--target", "a:1", "--revision", "v1"], "--revision is that of a model on the hub: name the model with it."),
    ],
)
def test_a_revision_of_nothing_on_the_hub_is_refused(arguments: list[str], words: str, capfd: Capture):
    assert main(["orchestrate", "a", *arguments]) == 2
    assert f"Error: {words}" in capfd.readouterr().err


@pytest.fixture
def target(tmp_path: Path) -> Iterator[WorkerProcess]:
    """A target of the older revision, started as a user does."""
    worker = WorkerProcess("target", tmp_path, "--model", NAME, "--revision", "v1", "--context", "32", is_fresh=True)
    yield worker
    worker.close()


def test_a_worker_tells_its_commit_over_the_wire(target: WorkerProcess, commits: dict[str, str]):
    assert target.ready["model"] == NAME
    code, out, _ = run("doctor", "--target", target.address, "--json")
    checks = {check["name"]: check["detail"] for check in json.loads(out)["checks"]}
    assert (code, checks["target revision"]) == (0, f"{commits['v1']} of {NAME}")
