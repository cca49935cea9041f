"""Finding a model by its name: what cannot be had is refused at once, before torch and without waiting for a hub."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from specsplit import Pipeline
from specsplit.cli.main import main
from specsplit.core.errors import InvalidSettings, ModelError, ModelNotFound, ModelUnsupported
from specsplit.model.source import check_source, resolve


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache of this process, which is not told to stay offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def _endpoint(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub at a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        _endpoint(server.getsockname()[1], monkeypatch)


def _cached(cache: Path) -> Path:
    """Return the folder of somebody/model in the cache, which has a config only."""
    repository = cache / "models--somebody--model"
    folder = repository / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("model-q4_k_m.gguf", ModelUnsupported, "is a GGUF file, and models are read from safetensors"),
        ("org/name-GGUF:Q4_K_M", ModelUnsupported, "has GGUF files, and models are read from safetensors"),
        ("./nowhere", ModelNotFound, "There is no model folder at ./nowhere."),
        ("https://huggingface.co/a/b/tree/main", ModelNotFound, "is a web address; .* by its hub id, such as a/b"),
        ("x" * 5000, ModelNotFound, "^x{100} cannot be looked for .File name too long..$"),
        ("a\0b", ModelNotFound, r"^'a\\x00b' is neither a model folder"),
        ("not a name!", ModelNotFound, "is neither a model folder nor a valid hub id"),
        (__file__, ModelNotFound, "which is a file; name the folder that it is in"),
        (str(Path(__file__).parent), ModelNotFound, "holds no config.json, so it is not a model folder"),
    ],
)
def test_what_is_no_model_is_refused_by_its_name(source: str, kind: type[ModelError], message: str):
    with pytest.raises(kind, match=message):
        check_source(source, "target")


@pytest.mark.parametrize("more", [(), ("config.json",)])
def test_an_adapter_without_its_model_is_refused_as_one(more: tuple[str, ...], tmp_path: Path):
    for name in ("adapter_config.json", "adapter_model.safetensors", *more):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelUnsupported, match="is a LoRA adapter, not a whole model: merge it into its base model"):
        check_source(str(tmp_path), "target")


@pytest.mark.usefixtures("closed")
def test_a_hub_that_is_away_is_not_waited_for(hub: Path):
    with pytest.raises(ModelNotFound, match="somebody/model is not cached here and the model hub cannot be reached"):
        resolve("somebody/model", "target")
    folder = _cached(hub)
    assert resolve("somebody/model", "target") == (str(folder), "somebody/model")


@pytest.fixture
def silent(hub: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A hub that never answers; the time limits of the connections to it, as they are tried."""
    tried: list[float] = []
    is_over = threading.Event()

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(timeout)
        is_over.wait()
        raise OSError(f"{address} is silent")

    monkeypatch.setattr("socket.create_connection", connect)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://{hub.parent.name}-{hub.name}.invalid")
    yield tried
    is_over.set()


AWAY = "somebody/model is not cached here and the model hub cannot be reached; pass a local folder, or go online."


def test_python_asks_a_silent_hub_once_for_less_than_three_seconds(silent: list[float]):
    """The first model is the last that is waited for: the next ones are looked for in the cache at once."""
    for arguments in ({"target_model": "somebody/model"}, {"draft_model": "somebody/model"}):
        with pytest.raises(ModelNotFound) as caught:
            Pipeline(**arguments)  # type: ignore[arg-type]
        assert str(caught.value) == AWAY
    assert 0 < len(silent) <= 2, "one, or another one if a minute has passed"
    assert max(silent) < 3


@pytest.mark.parametrize(
    "command",
    [
        ["orchestrate", "a", "--target-model"],
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                ["orchestrate", "a", "--draft-model"],
                ["serve", "--target-model"],
                ["chat", "--raw", "--target-model"],
                ["target", "--model"],
                ["draft", "--model"],
                ["stage", "--layers", "0:1", "--model"],
                ["draft-vocab", "--corpus", __file__, "--output", "/dev/null", "--model"],
            )
        ),
    ],
    ids=lambda words: words[0],
)
def test_a_command_asks_a_silent_hub_once(command: list[str], silent: list[float], capsys: pytest.CaptureFixture[str]):
    assert main([*command, "somebody/model"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1]) == ("", f"Error: {AWAY}")
    assert len(silent) == 1
    assert silent[0] < 3


def test_a_plan_is_made_from_the_cache_alone(silent: list[float], capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--model", "somebody/model"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.startswith("Error: "), err.count("\n")) == ("", True, 1)
    assert not silent


@pytest.mark.usefixtures("hub")
def test_a_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        _endpoint(server.getsockname()[1], monkeypatch)
        assert resolve("somebody/model", "target") == ("somebody/model", "somebody/model")


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "all_proxy", "ALL_PROXY"])
@pytest.mark.usefixtures("hub")
def test_a_proxy_that_answers_is_the_way_to_the_hub(variable: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"https://{variable.lower()}.invalid")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv(variable, f"127.0.0.1:{server.getsockname()[1]}")
        assert resolve("somebody/model", "target") == ("somebody/model", "somebody/model")


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "ALL_PROXY"])
@pytest.mark.usefixtures("hub")
def test_a_proxy_without_a_valid_port_is_named_without_its_password(variable: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"https://{variable.lower()}.port.invalid")
    for proxy in ("http://proxy:port", "user:secret@proxy:port", "http://user:sec/ret@proxy:80", "http://[proxy"):
        monkeypatch.setenv(variable, proxy)
        with pytest.raises(InvalidSettings, match=f"^{variable} holds no valid URL; write it as http://host:port.$"):
            resolve("somebody/model", "target")


@pytest.mark.usefixtures("hub")
def test_an_endpoint_without_a_valid_port_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub:port")
    with pytest.raises(InvalidSettings, match="HF_ENDPOINT holds no valid URL"):
        resolve("somebody/model", "target")


def test_a_user_who_stays_offline_is_told_what_is_missing(hub: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="is not cached here"):
        check_source("somebody/model", "draft")
    _cached(hub)
    check_source("somebody/model", "draft")


@pytest.mark.parametrize("command", ["orchestrate", "target", "stage"])
def test_a_folder_without_a_model_is_refused_before_torch_is_imported(command: str, tmp_path: Path):
    more = {"orchestrate": ["a", "--target-model"], "stage": ["--layers", "0:1", "--model"]}.get(command, ["--model"])
    program = (
        "import sys; from specsplit.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit('torch was imported' if 'torch' in sys.modules else code)"
    )
    run = [sys.executable, "-c", program, command, *more, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        f"Error: {tmp_path} holds no config.json, so it is not a model folder.",
    )
