"""Settings: where a value comes from, and what is said about a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsplit.core import defaults
from specsplit.core.errors import InvalidRequest, InvalidSettings
from specsplit.core.settings import (
    FLAT_KEYS,
    GATEWAY_KEYS,
    KEYS,
    SERVICE_KEYS,
    OrchestratorSettings,
    load_settings,
    override,
)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in KEYS:
        monkeypatch.delenv(_variable(key), raising=False)
    monkeypatch.delenv("SPECSPLIT_CONFIG", raising=False)


def _variable(key: str) -> str:
    return f"SPECSPLIT_{key.replace('.', '_').upper()}"


def _config(folder: Path, text: str) -> Path:
    path = folder / "specsplit.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = _config(tmp_path, "[orchestrator]\nnodes = 1\ndepth = 1\nbranching = 1\n[draft]\nthreads = 1\n")
    monkeypatch.setenv("SPECSPLIT_ORCHESTRATOR_NODES", "2")
    monkeypatch.setenv("SPECSPLIT_ORCHESTRATOR_DEPTH", "2")
    effective = load_settings({"nodes": 3}, config=config, as_options=True)
    chosen = effective.settings.orchestrator
    assert (chosen.nodes, chosen.depth, chosen.branching) == (3, 2, 1)
    assert chosen.max_new_tokens == defaults.MAX_NEW_TOKENS
    layers = {key: layer for key, _, layer in effective.rows()}
    assert layers["orchestrator.nodes"] == "command line"
    assert layers["orchestrator.depth"] == "environment"
    assert layers["orchestrator.branching"] == f"file {config}"
    assert layers["orchestrator.temperature"] == "default"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECSPLIT_CONFIG", str(_config(tmp_path, "[target]\nthreads = 3\n")))
    monkeypatch.setenv("SPECSPLIT_API_KEY", "the key of chat --endpoint")
    assert load_settings().settings.target.threads == 3


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("STOP", "[END]", "stop", ("[END]",)),
        ("STOP", '["a", "b"]', "stop", ("a", "b")),
        ("STOP", "5", "stop", ("5",)),
        ("LOGIT_BIAS", "5=1.5, 7=-2", "logit_bias", ((5, 1.5), (7, -2.0))),
        ("CHAT", "true", "chat", True),
        ("TOP_P", "0.9", "top_p", 0.9),
        ("SEED", str(2**64 - 1), "seed", 2**64 - 1),
        ("SEED", "", "seed", None),
        ("CHAT_TEMPLATE_KWARGS", '{"enable_thinking": false}', "chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_every_kind_of_value_can_come_from_the_environment(
    variable: str, text: str, field: str, value: object, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(f"SPECSPLIT_ORCHESTRATOR_{variable}", text)
    assert getattr(load_settings().settings.orchestrator, field) == value


def test_a_file_writes_biases_as_a_table_or_as_the_command_line_does(tmp_path: Path):
    table = _config(tmp_path, '[orchestrator]\nlogit_bias = {"5" = 1.5}\n')
    assert load_settings(config=table).settings.orchestrator.logit_bias == ((5, 1.5),)
    listed = _config(tmp_path, '[orchestrator]\nlogit_bias = ["5=1.5"]\n')
    assert load_settings(config=listed).settings.orchestrator.logit_bias == ((5, 1.5),)


def test_a_file_writes_variables_of_the_template_as_a_table(tmp_path: Path):
    for text in (
        "chat_template_kwargs = {a = false, b = 1}\n",
        "[orchestrator.chat_template_kwargs]\na = false\nb = 1\n",
    ):
        config = _config(tmp_path, f"[orchestrator]\n{text}")
        assert load_settings(config=config).settings.orchestrator.chat_template_kwargs == {"a": False, "b": 1}


def test_shared_options_reach_both_engines():
    settings = load_settings({"dtype": "bf16", "threads": 2, "device": "cuda"}).settings
    assert (settings.draft.dtype, settings.draft.threads, settings.draft.device) == ("bf16", 2, "cuda")
    assert (settings.target.dtype, settings.target.threads, settings.target.device) == ("bf16", 2, "cuda")


@pytest.mark.parametrize("key", KEYS)
def test_every_setting_has_a_flat_name_or_belongs_to_one_role_only(key: str):
    flat = any(key in keys for keys in FLAT_KEYS.values())
    of_a_service = any((key,) in names.values() for names in (*SERVICE_KEYS.values(), GATEWAY_KEYS))
    assert flat or of_a_service


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("SPECSPLIT_TARGET_THREAD", "SPECSPLIT_TARGET_THREADS"),
        ("SPECSPLIT_ORCHESTRATOR_TEMPRATURE", "SPECSPLIT_ORCHESTRATOR_TEMPERATURE"),
        ("SPECSPLIT_CONFG", "SPECSPLIT_CONFIG"),
        ("SPECSPLIT_DRAFT", "SPECSPLIT_DRAFT_MODEL"),
    ],
)
def test_an_unknown_variable_is_refused_by_name(variable: str, nearest: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(InvalidSettings, match=rf"{variable}; the nearest one is {nearest}\.$"):
        load_settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[target]\nmodle = 'x'\n", r"There is no setting target\.modle; the nearest one is target\.model\.$"),
        ("[targets]\nmodel = 'x'\n", r"There is no table targets; the nearest one is target\.$"),
        ("target = 'x'\n", r"target must be a table"),
        ("temperature = 1\n", r"what --temperature sets is temperature under \[orchestrator\]\.$"),
        ("[orchestrator]\ndraft = 'a:1'\n", r"what --draft sets is address under \[draft\]\.$"),
        ("[target\n", r"is not valid TOML"),
        (f"[target]\nmodel = {'[' * 3000}{']' * 3000}\n", r"is not valid TOML"),
        (
            "[target]\nthreads = 0\n",
            r"^target\.threads in .*specsplit\.toml must be at least 1, not 0\.$",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(text: str, message: str, tmp_path: Path):
    with pytest.raises(InvalidSettings, match=message):
        load_settings(config=_config(tmp_path, text))


def test_auto_stands_for_a_number_of_threads_that_is_measured(tmp_path: Path):
    config = _config(tmp_path, "[target]\nthreads = 3\n[draft]\nthreads = 2\n")
    settings = load_settings({"threads": "auto"}, config=config).settings
    assert (settings.target.threads, settings.draft.threads) == (None, None)
    with pytest.raises(InvalidSettings, match="threads must be a whole number, not 'many'"):
        load_settings({"threads": "many"})


def test_a_file_may_begin_with_the_mark_of_a_windows_editor(tmp_path: Path):
    assert load_settings(config=_config(tmp_path, "\ufeff[target]\nthreads = 3\n")).settings.target.threads == 3


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(InvalidSettings, match="cannot be read"):
        load_settings(config=tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 0}, r"^--nodes must be at least 1, not 0\.$"),
        ({"dtype": "fp8"}, r"^--dtype must be fp32, bf16, fp16, int8 or int4, not 'fp8'\.$"),
        ({"seed": -1}, r"^--seed must be at least 0, not -1\.$"),
        ({"logit_bias": ["5"]}, r"^--logit-bias must look like ID=X"),
        ({"logit_bias": ["x=5"]}, r"^--logit-bias must be a whole number, not 'x'\.$"),
        ({"stop": [""]}, r"^--stop must not be empty"),
        ({"target_model": ""}, r"^--target-model must not be empty"),
        ({"threds": 2}, r"^There is no setting threds; the nearest one is threads\.$"),
    ],
)
def test_a_wrong_option_is_named_as_it_was_typed(given: dict[str, object], message: str):
    with pytest.raises(InvalidSettings, match=message):
        load_settings(given, as_options=True)


def test_a_wrong_variable_is_named_as_it_was_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECSPLIT_TARGET_THREADS", "many")
    with pytest.raises(InvalidSettings, match=r"^SPECSPLIT_TARGET_THREADS must be a whole number, not 'many'\.$"):
        load_settings()


@pytest.mark.parametrize(
    ("given", "draft", "lacks_draft"),
    [
        ({}, "embedded", False),
        ({"target_model": "large"}, None, True),
        ({"target_model": "large", "draft_model": "small"}, "small", False),
        ({"draft_model": "small"}, "small", False),
        ({"mode": "plain"}, None, False),
        ({"mode": "plain", "draft_model": "small"}, None, False),
    ],
)
def test_the_embedded_draft_serves_the_embedded_target_only(
    given: dict[str, object], draft: str | None, lacks_draft: bool
):
    settings = load_settings(given).settings
    assert (settings.draft_source, settings.lacks_draft) == (draft, lacks_draft)


def test_pingpong_without_a_draft_is_refused():
    with pytest.raises(InvalidSettings, match="--draft-model"):
        load_settings({"mode": "pingpong", "target_model": "large"})


TARGET, DRAFT = "127.0.0.1:7001", "127.0.0.1:7002"


@pytest.mark.parametrize(
    ("given", "draft", "lacks_draft"),
    [
        ({"target": TARGET, "draft": DRAFT}, DRAFT, False),
        ({"target": TARGET}, None, True),
        ({"target": TARGET, "mode": "plain"}, None, False),
        ({"target": TARGET, "draft": DRAFT, "mode": "plain"}, None, False),
        ({"draft": DRAFT, "mode": "plain"}, None, False),
    ],
)
def test_a_remote_target_speculates_with_a_remote_draft_only(
    given: dict[str, object], draft: str | None, lacks_draft: bool
):
    settings = load_settings(given).settings
    assert (settings.draft_address, settings.lacks_draft) == (draft, lacks_draft)
    assert settings.is_remote == ("target" in given)
    if settings.is_remote:
        assert settings.draft_source is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"draft": DRAFT},
            r"^--draft needs a target as well: name one with --target or --target-model, or leave --draft",
        ),
        ({"target": TARGET, "target_model": "m"}, r"^--target-model is for a model loaded here and --target for a"),
        ({"draft": DRAFT, "draft_model": "m"}, r"^--draft-model is for a model loaded here and --draft for a"),
        (
            {"target": TARGET, "draft": DRAFT, "draft_vocab": "9"},
            r"^--draft-vocab is for a model loaded here and --draft",
        ),
        (
            {"target_model": "m", "draft": DRAFT, "draft_context": 64},
            r"^--draft-context is for a model loaded here and",
        ),
        ({"target": TARGET, "sessions": 2}, r"^--sessions is for a model loaded here and --target for"),
        ({"target": TARGET, "device": "cuda"}, r"^--device is for a model loaded here and --target for"),
        ({"target": TARGET, "context": 64}, r"^--context is for a model loaded here and --target for"),
        ({"target": TARGET, "mode": "pingpong"}, r"^Mode pingpong needs a draft: name one with --draft, or"),
        ({"target": "nonsense"}, r"^--target must be HOST:PORT, such as 127\.0\.0\.1:7001, not 'nonsense'\.$"),
        ({"target": "127.0.0.1:0"}, r"^--target must name the port on which the worker listens"),
        ({"target": "127.0.0.1:65536"}, r"^--target must be HOST:PORT"),
        ({"target": "http://127.0.0.1:80"}, r"^--target must be HOST:PORT"),
        ({"target": ":80"}, r"^--target must be HOST:PORT"),
        ({"target": "::1:80"}, r"^--target must be HOST:PORT"),
        ({"retry": -1.0}, r"^--retry must be at least 0"),
        ({"timeout": 0.0}, r"^--timeout must be above 0"),
        ({"timeout": float("inf")}, r"^--timeout must be a finite number"),
        ({"draft_patience": float("nan")}, r"^--draft-patience must be"),
    ],
)
def test_settings_of_workers_that_contradict_or_are_malformed_are_refused(given: dict[str, object], message: str):
    with pytest.raises(InvalidSettings, match=message):
        load_settings(given, as_options=True)


@pytest.mark.parametrize(
    ("given", "configured", "placed"),
    [
        ({"target": TARGET, "draft_model": "m"}, {}, (TARGET, None, "m")),
        ({"target_model": "m", "draft": DRAFT}, {}, (None, DRAFT, None)),
        ({"target": TARGET, "draft_model": "m", "device": "cuda", "context": 64}, {}, (TARGET, None, "m")),
        ({"target": TARGET}, {"DRAFT_MODEL": "m"}, (TARGET, None, "m")),
        ({"draft_model": "m"}, {"TARGET_ADDRESS": TARGET, "DRAFT_ADDRESS": DRAFT}, (TARGET, None, "m")),
        ({"target_model": "m", "draft": DRAFT}, {"TARGET_ADDRESS": TARGET}, (None, DRAFT, None)),
        ({}, {"TARGET_ADDRESS": TARGET, "DRAFT_ADDRESS": DRAFT, "DRAFT_MODEL": "m"}, (TARGET, DRAFT, None)),
        ({"target": TARGET, "draft_model": "m", "mode": "lookup"}, {}, (TARGET, None, None)),
    ],
)
def test_one_may_be_here_and_the_other_elsewhere(
    given: dict[str, object],
    configured: dict[str, str],
    placed: tuple[str | None, str | None, str | None],
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in configured.items():
        monkeypatch.setenv(f"SPECSPLIT_{name}", value)
    settings = load_settings(given).settings
    assert (settings.target.address, settings.draft_address, settings.draft_source) == placed
    assert settings.has_local_model == (placed[0] is None or placed[2] is not None)
    assert not settings.runs_side_by_side


@pytest.mark.parametrize("address", ["127.0.0.1:1", "target.svc.local:65535", "[::1]:7001"])
def test_an_address_is_a_host_and_a_port(address: str):
    assert load_settings({"target": address}).settings.target.address == address


def test_a_target_named_by_the_caller_beats_a_configured_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECSPLIT_TARGET_ADDRESS", TARGET)
    monkeypatch.setenv("SPECSPLIT_DRAFT_ADDRESS", DRAFT)
    assert load_settings().settings.draft_address == DRAFT
    local = load_settings({"target_model": "m", "device": "cuda"})
    assert (local.settings.is_remote, local.settings.draft_address) == (False, None)
    assert "target.address" not in local.origins
    with pytest.raises(InvalidSettings, match=r"^--device is for a model loaded here and SPECSPLIT_TARGET_ADDRESS for"):
        load_settings({"device": "cuda"}, as_options=True)


def test_one_file_serves_the_workers_and_those_who_use_them(tmp_path: Path):
    config = _config(
        tmp_path, f'[target]\nmodel = "m"\ndevice = "cuda"\nlisten = "0.0.0.0:7001"\naddress = "{TARGET}"\n'
    )
    assert load_settings(config=config).settings.is_remote
    served = load_settings({"model": "n", "sessions": 8}, config=config, purpose="target").settings.target
    assert (served.model, served.device, served.listen, served.sessions) == ("n", "cuda", "0.0.0.0:7001", 8)


def test_a_service_takes_its_own_role_only():
    settings = load_settings({"model": "m", "threads": 2, "listen": "127.0.0.1:7001"}, purpose="draft").settings
    assert (settings.draft.model, settings.draft.threads, settings.target.threads) == ("m", 2, None)
    with pytest.raises(InvalidSettings, match="There is no setting target_model"):
        load_settings({"target_model": "m"}, purpose="target")
    with pytest.raises(InvalidSettings, match=r"^--listen must be HOST:PORT"):
        load_settings({"listen": "7001"}, as_options=True, purpose="draft")


@pytest.mark.parametrize(
    "given", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"min_p": 2.0}, {"top_k": -1}]
)
def test_sampling_values_out_of_range_are_refused_as_requests(given: dict[str, float]):
    with pytest.raises(InvalidRequest, match=next(iter(given))):
        load_settings(given).settings.orchestrator.sampling()


def test_a_request_overrides_settings_and_none_leaves_them():
    settings = override(OrchestratorSettings(seed=1), temperature=0.5, seed=None)
    assert (settings.temperature, settings.seed) == (0.5, 1)
    with pytest.raises(InvalidSettings, match="the nearest one is temperature"):
        override(settings, temprature=1)
    with pytest.raises(InvalidSettings, match="max_new_tokens"):
        override(settings, max_new_tokens=0)


def test_settings_cannot_be_changed():
    settings = load_settings().settings
    with pytest.raises(ValueError, match="frozen"):
        settings.target.model = "other"  # pyright: ignore[reportAttributeAccessIssue]
