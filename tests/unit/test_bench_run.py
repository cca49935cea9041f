"""`run`: the registry, workloads, the numbers of a summary, and one real run resumed."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import measuring, metrics, registry, summary, workloads
from benchmarks.__main__ import app
from benchmarks.metrics import (
    bytes_per_token,
    decode_rate,
    decode_s_per_token,
    hit_rate,
    inter_arrival_s,
    inter_token_s,
    kept_share,
    rate,
    target_busy_fraction,
    tokens_per_round,
    waits,
)
from benchmarks.peers.openai_completions import Completions, first_model
from benchmarks.results_file import Run, read
from benchmarks.settings import Pair, ServedMode, Setup, Shape, chosen_pair, is_inflated
from benchmarks.systems import RunSample, Sample, Task
from specsplit.core.defaults import DRAFTLESS
from specsplit.core.errors import InvalidRequest, InvalidSettings, MissingExtra, WorkerFailed, WorkerUnreachable
from specsplit.core.types import SamplingParams
from tests.support.bench_runs import (
    SPECULATIVE,
    clean_provenance,
    made_file,
    made_header,
    made_sample,
    round_records,
    stored_sample,
)

# --- the registry


def test_every_mode_of_the_orchestrator_can_be_measured_in_every_place():
    setup = Setup(target_address="127.0.0.1:1", draft_address="127.0.0.1:2")
    for mode in ("plain", "pingpong", *registry.MODES):
        for name in (mode, f"{mode}@loopback", f"{mode}@remote"):
            entry = registry.find(name, setup)
            assert (entry.name, entry.mode, entry.is_ours) == (name, mode, True)
            assert callable(entry.make(setup))
    for name in ("bare", "generate", "assisted", "assisted-constant", "lookup-4", "lookup-10", "openai:http://h/v1"):
        entry = registry.find(name, setup)
        assert not entry.is_ours
        assert callable(entry.make(setup))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("beam", "no system 'beam'"),
        ("plain@moon", "no system"),
        ("bare@remote", "no system"),
        ("pingpong@remote", "--target-address and --draft-address"),
        ("plain@remote", "needs --target-address"),
        ("openai:localhost", "names no server"),
    ],
)
def test_a_system_that_cannot_be_made_is_refused_in_the_users_words(name: str, message: str):
    with pytest.raises(InvalidRequest, match=message):
        registry.find(name, Setup())


def test_systems_that_speculate_need_a_draft():
    alone = Setup(pair=Pair("somewhere", None))
    for name in DRAFTLESS:
        assert registry.find(name, alone).name == name
    for name in ("pingpong", "assisted"):
        with pytest.raises(InvalidRequest, match="--draft"):
            registry.find(name, alone)


def test_lookup_is_left_out_where_that_is_asked_for():
    for place in ("", "@loopback", "@remote"):
        alone = Setup(lookup=False, target_address="127.0.0.1:1", draft_address="127.0.0.1:2")
        with pytest.raises(InvalidRequest, match="--no-lookup"):
            registry.find(f"lookup{place}", alone)
        for setup in (alone, replace(alone, lookup=True)):
            made = registry.find(f"pingpong{place}", setup).make(setup)
            modes = [
                each for argument in made.args for each in (argument if isinstance(argument, tuple) else [argument])
            ]
            modes = [each for each in modes if isinstance(each, ServedMode)]
            assert [mode.lookup for mode in modes] == [setup.lookup]


def test_a_variant_of_a_mode_has_a_name_of_its_own():
    served: dict[str, ServedMode] = {}
    for name in ("auto", "auto-no-lookup", "plain-with-draft", "pingpong-no-lookup@loopback"):
        arguments = registry.find(name, Setup()).make(Setup()).args
        served[name] = next(
            each
            for argument in arguments
            for each in (argument if isinstance(argument, tuple) else (argument,))
            if isinstance(each, ServedMode)
        )
    assert {name: (mode.mode, mode.lookup, mode.loads_draft) for name, mode in served.items()} == {
        "auto": ("auto", True, True),
        "auto-no-lookup": ("auto", False, True),
        "plain-with-draft": ("plain", True, True),
        "pingpong-no-lookup@loopback": ("pingpong", False, True),
    }
    for name in ("lookup-no-lookup", "plain-no-lookup", "auto-with-draft", "generate-no-lookup"):
        with pytest.raises(InvalidRequest, match="no system"):
            registry.find(name, Setup())


def test_without_lookup_a_round_verifies_the_drafts_nodes_alone():
    chain = Shape(nodes=16, depth=3, branching=1)
    modes = (ServedMode("merged", "pingpong", chain), ServedMode("alone", "pingpong", chain, lookup=False))
    with registry.serve_modes(1, modes)() as served:
        text = workloads.load(workloads.CODE, 1)[0].text
        task = Task("a", served.encode(text), 48)
        merged, alone = (system.generate(task) for system in served.systems)
    assert merged.token_ids == alone.token_ids
    assert merged.result is not None
    assert alone.result is not None
    drafts, both = (each.result.speculative_decoding for each in (alone, merged))
    assert drafts.num_spec_steps >= 5
    assert drafts.num_draft_tokens <= 3 * drafts.num_spec_steps
    assert both.num_draft_tokens > 3 * both.num_spec_steps, "where lookup thinks otherwise, it adds nodes"


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    made = registry.find("openai:http://127.0.0.1:1/v1", Setup()).make(Setup())
    with pytest.raises(MissingExtra, match="openai"):
        made()


def test_the_pair_is_the_embedded_one_unless_a_target_is_named(tmp_path: Path):
    assert chosen_pair(None, None) == Pair()
    assert chosen_pair(None, "small") == Pair(draft="small")
    assert chosen_pair("large", None, "bf16", "cpu") == Pair("large", None, "bf16", "cpu")
    (tmp_path / "config.json").write_text('{"inflated_layers": 3}', encoding="utf-8")
    assert is_inflated(str(tmp_path))
    assert not is_inflated("embedded")


# --- workloads


def test_questions_are_taken_from_each_task_in_turn(tmp_path: Path):
    path = tmp_path / "questions.jsonl"
    kinds = ["writing", "writing", "qa", "rag", "qa", "writing"]
    lines = [{"question_id": n, "category": kind, "turns": [f"{kind} {n}", "more"]} for n, kind in enumerate(kinds)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    prompts = workloads.load(f"spec-bench:{path}", 5)
    assert [(prompt.id, prompt.category) for prompt in prompts] == [
        ("0", "mt_bench"),
        ("2", "qa"),
        ("3", "rag"),
        ("1", "mt_bench"),
        ("4", "qa"),
    ]
    assert prompts[0].text == "writing 0"
    assert len(workloads.load(f"spec-bench:{path}", None)) == 6
    with pytest.raises(InvalidRequest, match="--prompts"):
        workloads.load(f"spec-bench:{path}", 7)
    with pytest.raises(InvalidRequest, match="no workload"):
        workloads.load("poems", 1)


# --- metrics


def test_waits_are_spread_over_the_tokens_that_came_together():
    sample = stored_sample()
    assert [(round(seconds, 6), count) for seconds, count in waits([sample])] == [
        (0.2, 2),
        (0.05, 1),
        (0.1, 3),
        (0.05, 1),
        (0.1, 3),
    ]
    tokens, arrivals = inter_token_s([sample]), inter_arrival_s([sample])
    assert tokens is not None
    assert arrivals is not None
    assert tokens["p50"] == pytest.approx(0.1 / 3)
    assert arrivals["p50"] == pytest.approx(0.1)
    assert inter_token_s([stored_sample(sample=Sample(1.0, (1, 2)))]) is None


def test_counts_become_rates():
    samples = [stored_sample(), stored_sample(task="b")]
    assert rate(samples) == pytest.approx(22 / 1.3)
    assert decode_rate(samples) == pytest.approx(20 / 1.0)
    assert target_busy_fraction(samples) == pytest.approx(0.6)
    assert bytes_per_token(samples) == pytest.approx(100.0)
    assert tokens_per_round(samples) == 2.0
    assert (hit_rate(samples), kept_share(samples)) == (None, 0.0)
    ahead = replace(SPECULATIVE, num_ahead_rounds=4, num_kept_rounds=3)
    growing = [stored_sample(sample=made_sample(speculative_decoding=ahead))]
    assert (hit_rate(growing), kept_share(growing)) == (3 / 4, 3 / 5)
    here = stored_sample(sample=made_sample(wire=None))
    assert bytes_per_token([here]) is None
    assert decode_rate([stored_sample(sample=Sample(1.0, (1, 2)))]) is None


def test_tokens_that_come_first_together_are_not_decoded_behind_them():
    verified = stored_sample(sample=Sample(1.5, tuple(range(11)), 1.0, arrivals=((0.5, 3), (1.0, 4), (1.5, 4))))
    assert decode_rate([verified]) == pytest.approx(8)
    assert decode_s_per_token(verified) == pytest.approx(1 / 8)
    at_once = stored_sample(sample=Sample(1.5, tuple(range(11)), 0.0, arrivals=((0.5, 11),)))
    assert decode_s_per_token(at_once) is None


def test_spec_benchs_numbers_are_its_own():
    fast, slow = RunSample(0, "x", "a", 1.0, 30), RunSample(0, "x", "b", 3.0, 30)
    baseline = [RunSample(0, "p", "a", 3.0, 30), RunSample(0, "p", "b", 3.0, 30)]
    assert metrics.mean_tokens_per_s([fast, slow]) == pytest.approx(20.0)
    assert metrics.mean_tokens_per_s(baseline) == pytest.approx(10.0)
    assert metrics.mean_accepted_tokens([stored_sample()]) == pytest.approx(1 + 5 / 5)
    assert metrics.mean_accepted_tokens([fast]) is None


def _run(**systems: str | None) -> Run:
    header = made_header(3, **systems)
    return made_file(header, [each for number in range(3) for each in round_records(number, header)]).run()


def test_a_summary_holds_every_number_per_task_and_pooled():
    found = summary.summarise(_run(plain="plain", pingpong="pingpong", generate=None))["pingpong"]
    assert found["categories"].keys() == {"code", "prose"}
    for block in (found["pooled"], *found["categories"].values()):
        assert block["tokens_per_s"]["median"] == pytest.approx(11 / 0.65)
        assert block["decode_tokens_per_s"]["median"] == pytest.approx(20.0)
        assert block["speedup"].keys() == {"plain", "generate"}
        assert block["speedup"]["generate"]["median"] == pytest.approx(2.0)
        assert block["decode_speedup"].keys() == {"plain"}, "generate did not tell its decoding time"
        assert block["acceptance"]["by_depth"] == pytest.approx([3 / 4, 2 / 3])
        assert block["acceptance"]["path_acceptance_rate"] == pytest.approx(5 / 8)
        assert block["acceptance"]["node_acceptance_rate"] == pytest.approx(5 / 16)
        assert block["agreement"] == {"reference": "plain", "texts": 1.0, "tokens_before_the_first_difference": 1.0}
        assert block["ttft_s"]["p50"] == 0.1
        assert block["spec_bench"]["speedup"]["median"] == pytest.approx(1.0)
        assert "hit_rate" not in block
    assert json.loads(json.dumps(found)) == found


def test_the_limits_come_from_what_was_measured_beside_the_system():
    limits = summary.summarise(_run(pingpong="pingpong"))["pingpong"]["limits"]
    verify_s = (4 * 0.09 + 0.05) / 5
    assert limits["inputs"] == pytest.approx(
        {"A": 2.0, "D": 8 / 5, "t_d": 0.01, "t_v_n": verify_s, "t_v_1": 0.05, "r": 0.02, "h": 0.0}
    ), "four rounds of five rows and one of one row; two of the draft's ten forwards made no path longer"
    assert limits["L0"]["median"] == pytest.approx(2.0 / (0.016 + 0.02 + verify_s))
    assert limits["phi0"]["median"] == pytest.approx(20 * (0.036 + verify_s) / 2)
    assert limits["AR"]["median"] == pytest.approx(20.0)
    assert summary.summarise(_run(plain="plain", generate=None))["generate"]["limits"] is None


def test_with_a_temperature_only_our_systems_must_agree():
    header = made_header(1, plain="plain", generate=None)
    header["settings"]["temperature"] = 0.6
    assert summary.comparable_texts(header) == {"plain"}
    assert summary.comparable_texts(made_header(1, plain="plain", generate=None)) == {"plain", "generate"}
    assert summary.reference_of(["bare", "pingpong", "plain@loopback"]) == "plain@loopback"
    assert summary.reference_of(["bare", "pingpong"]) is None


# --- a server


@dataclass
class _Stream:
    """The client of a server that streams three chunks."""

    with_ids: bool = True
    asked: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def completions(self) -> _Stream:
        return self

    @property
    def models(self) -> _Stream:
        return self

    def list(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(id="large")]

    def create(self, **asked: Any) -> list[SimpleNamespace]:
        self.asked = asked
        ids = [[1], [2, 3]] if self.with_ids else [None, None]
        texts = [SimpleNamespace(text=f"x{n}", token_ids=each) for n, each in enumerate(ids)]
        chunks = [SimpleNamespace(choices=[text], usage=None) for text in texts]
        return [*chunks, SimpleNamespace(choices=[], usage=SimpleNamespace(completion_tokens=3))]


def test_a_server_is_asked_with_token_ids_and_measured_by_its_stream():
    client = _Stream()
    system = Completions("openai:http://h", client, first_model(client, "http://h"), ValueError)
    sample = system.generate(Task("a", (5, 6), 3, SamplingParams(temperature=0.5), seed=9))
    assert (sample.token_ids, sample.num_tokens) == ((1, 2, 3), 3)
    assert [count for _, count in sample.arrivals] == [1, 2]
    assert sample.ttft_s == sample.arrivals[0][0] <= sample.wall_s
    assert client.asked["prompt"] == [5, 6]
    assert (client.asked["model"], client.asked["seed"], client.asked["temperature"]) == ("large", 9, 0.5)
    silent = Completions("s", _Stream(with_ids=False), "large", ValueError).generate(Task("a", (5, 6), 3))
    assert (silent.token_ids, silent.num_tokens) == (None, 3)


def test_a_server_that_fails_is_an_error_in_the_users_words():
    class Refusing(_Stream):
        def create(self, **asked: Any) -> list[SimpleNamespace]:
            raise ValueError("no such model")

        def list(self) -> list[SimpleNamespace]:
            raise ConnectionError("refused")

    with pytest.raises(WorkerFailed, match="no such model"):
        Completions("s", Refusing(), "large", ValueError).generate(Task("a", (5, 6), 3))
    with pytest.raises(WorkerUnreachable, match="cannot be reached"):
        first_model(Refusing(), "http://h")


# --- the command line


def _invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["run", *arguments])


@pytest.mark.slow
def test_a_real_run_is_resumed_where_it_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measuring, "provenance", clean_provenance)
    path = tmp_path / "run.jsonl"
    options = ["--prompts", "2", "--new-tokens", "8", "--rounds", "2", "--threads", "1", "--output", str(path)]
    options = ["--systems", "pingpong,openai:http://127.0.0.1:1/v1", *options]
    first = _invoke(*options)
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout.splitlines()[-1])["systems"]["pingpong"]["limits"]["phi0"]["median"] > 0
    whole = read(path)
    assert whole.is_whole
    assert whole.header["skipped"].keys() == {"openai:http://127.0.0.1:1/v1"}
    assert whole.header["models"].keys() == {"target", "draft"}

    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:6]) + lines[6][:20])  # one round, a sample of the next, and half a line
    cut = read(path)
    assert (cut.num_rounds, cut.is_whole, cut.num_dropped) == (1, False, 3)
    second = _invoke(*options)
    assert second.exit_code == 0, second.output
    again = read(path)
    assert again.is_whole
    assert path.read_bytes().startswith(content[: cut.num_kept_bytes]), "the whole round was not measured again"
    wanted = whole.run().samples["pingpong"][0][0]
    assert [row[0].token_ids for row in again.run().samples["pingpong"]] == [wanted.token_ids] * 2
    assert again.summary is not None
    assert again.summary["id"] == whole.header["id"]

    content = path.read_bytes()
    third = _invoke(*options)
    assert third.exit_code == 0
    assert path.read_bytes() == content, "a whole run is not measured again"
    other = _invoke(*options, "--seed", "7", "--no-lookup")
    assert isinstance(other.exception, InvalidSettings)
    assert "seed was 0, now 7" in str(other.exception)
    assert "lookup was True, now False" in str(other.exception)


def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(tmp_path: Path):
    smoke = tmp_path / "smoke.jsonl"
    smoke.write_text('{"benchmark":"smoke"}\n', encoding="utf-8")
    for arguments, message in (
        (["--systems", ""], "at least one"),
        (["--systems", "plain,plain"], "twice"),
        (["--systems", "beam"], "no system"),
        (["--systems", "plain", "--output", str(smoke)], "no results file"),
        (["--systems", "plain", "--workload", "poems"], "no workload"),
    ):
        found = _invoke(*arguments)
        assert message in str(found.exception)
