"""The calibration study: its arithmetic against values by hand, and its listening against the models themselves."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, roc_auc_score
from typer.testing import CliRunner

from benchmarks import workloads
from benchmarks.__main__ import app
from benchmarks.report import page, plots
from benchmarks.research.calibration import measure as measuring
from benchmarks.research.calibration import merits as judging
from benchmarks.research.calibration.measure import Found, WatchedExperience, Word, overheard
from benchmarks.research.calibration.merits import Node, Sample, Source
from benchmarks.research.calibration.study import StudySettings
from specsplit.assembly.models import Models
from specsplit.assembly.opening import open_workers
from specsplit.core.errors import InvalidRequest, SpecSplitError
from specsplit.core.types import Proposal, SamplingParams
from specsplit.draft import engine as draft_engine
from specsplit.model.attention.metadata import SequenceInput
from specsplit.orchestrator.request import Request
from specsplit.speculation.acceptance import lookup_cells
from specsplit.speculation.token_tree import ROOT_INDEX, SpeculationTree, TokenTree
from tests.support.cells import draft_cell


def _silent(name: str) -> None:
    """Count nothing."""


def node(
    probability: float, is_right: bool, prompt: int = 0, *, own: float = 0.5, source: Source = "draft", rank: int = 0
) -> Node:
    is_lookup = source == "lookup"
    log_prob = math.log(probability)
    return Node(
        prompt=prompt,
        position=1,
        token_id=1,
        depth=1,
        rank=rank,
        source=source,
        is_right=is_right,
        calibrated=log_prob,
        sent=None if is_lookup else log_prob,
        own=None if is_lookup else math.log(own),
        frozen=log_prob if prompt else None,
    )


def probabilities(nodes: Sequence[Node]) -> judging.Floats:
    return np.exp(np.array([each.calibrated for each in nodes]))


# --- arithmetic

FIVE = [node(0.9, True), node(0.8, False), node(0.8, True), node(0.3, False), node(0.1, True)]
"""3.5 of the six pairs of a right and a wrong node are in order: .9 above both, .8 above one and level with one."""


def test_metrics_of_five_nodes_are_those_by_hand():
    sample = Sample.of(FIVE)
    assert judging.auc(sample, probabilities(FIVE))[0] == pytest.approx(3.5 / 6)
    assert judging.brier(sample, probabilities(FIVE))[0] == pytest.approx((0.01 + 0.64 + 0.04 + 0.09 + 0.81) / 5)
    # Two bins of {.1, .3} and {.8, .8, .9}: means .2 and 2.5 / 3 beside shares 1 / 2 and 2 / 3.
    expected = 2 / 5 * abs(0.2 - 0.5) + 3 / 5 * abs(2.5 / 3 - 2 / 3)
    assert judging.expected_calibration_error(sample, probabilities(FIVE), 2)[0] == pytest.approx(expected)


def test_a_perfect_estimate_has_no_error_and_the_opposite_all_of_it():
    nodes = [node(p, p == 1.0) for p in (1.0, 1e-300, 1.0, 1e-300)]
    sample, right = Sample.of(nodes), probabilities(nodes)
    for values, best, worst in (
        (judging.auc, 1, 0),
        (judging.brier, 0, 1),
        (judging.expected_calibration_error, 0, 1),
    ):
        assert values(sample, right)[0] == pytest.approx(best)
        assert values(sample, 1 - right)[0] == pytest.approx(worst)


_NODES = st.lists(
    st.builds(node, st.sampled_from([0.05, 0.2, 0.5, 0.9]), st.booleans(), st.integers(0, 3)), min_size=1, max_size=30
)


@given(_NODES, st.integers(0, 2000))
def test_a_resample_counts_a_prompts_nodes_as_often_as_drawn(nodes: list[Node], place: int):
    sample = Sample.of(nodes)
    times = sample.resamples[place]
    drawn = [each for each, prompt in zip(nodes, sample.prompts, strict=True) for _ in range(int(times[prompt]))]
    scores = [math.exp(each.calibrated) for each in drawn]
    outcomes = [each.is_right for each in drawn]
    assert times.sum() == sample.num_prompts
    auc = roc_auc_score(outcomes, scores) if len(set(outcomes)) == 2 else math.nan
    assert judging.auc(sample, probabilities(nodes))[place] == pytest.approx(auc, nan_ok=True)
    brier = brier_score_loss(outcomes, scores, labels=[False, True])
    assert judging.brier(sample, probabilities(nodes))[place] == pytest.approx(brier)
    errors = judging.expected_calibration_error(sample, probabilities(nodes), 1)
    assert errors[place] == pytest.approx(abs(sum(scores) - sum(outcomes)) / len(scores))


@given(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.7, 1.0]), min_size=1, max_size=60), st.integers(1, 12))
def test_bins_are_in_order_and_never_part_equal_values(values: list[float], num_bins: int):
    bins = judging.equal_bins(np.array(values), num_bins)
    by_value = sorted(zip(values, bins.tolist(), strict=True))
    assert [number for _, number in by_value] == sorted(bins.tolist())
    assert len(set(by_value)) == len(set(values))
    assert set(bins.tolist()) == set(range(max(bins) + 1))
    assert max(bins) < num_bins


def test_bins_of_different_values_have_equal_counts():
    bins = judging.equal_bins(np.random.default_rng(1).permutation(95) / 95)
    assert sorted(set(np.bincount(bins).tolist())) == [9, 10]
    assert len(set(bins.tolist())) == 10


@pytest.mark.parametrize(
    ("num_true", "count", "low", "high"), [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0)]
)
def test_wilsons_interval_is_the_published_one(num_true: int, count: int, low: float, high: float):
    assert judging.wilson(num_true, count) == pytest.approx((low, high), abs=5e-5)


def test_the_reliability_table_sets_shares_beside_mean_estimates():
    first, second = judging.reliability(probabilities(FIVE), Sample.of(FIVE).outcomes, 2)
    assert (first["count"], first["predicted"], first["observed"]) == (2, pytest.approx(0.2), 0.5)
    assert (second["count"], second["predicted"]) == (3, pytest.approx(2.5 / 3, abs=1e-6))
    assert second["observed"] == pytest.approx(2 / 3, abs=1e-6)
    assert (second["low"], second["high"]) == pytest.approx(judging.wilson(2, 3), abs=1e-6)


def test_a_difference_is_paired_over_prompts():
    """Prompts differ far more than the two estimates do, so only pairing can tell these apart."""
    nodes = [
        node(0.5, is_right, prompt, own=0.55)
        for prompt in range(12)
        for is_right in [True] * prompt + [False] * (12 - prompt)
    ]
    found = judging.judged(nodes, ("calibrated", "own"))
    spread = found["estimates"]["own"]["ece"]
    assert spread["high"] - spread["low"] > 0.1
    shift = found["differences"]["own"]["brier"]
    exact = 0.25 - np.mean([(0.55 - each.is_right) ** 2 for each in nodes])
    assert shift["value"] == pytest.approx(exact, abs=1e-6)
    assert shift["high"] - shift["low"] < 0.05


def test_a_summary_keeps_lookup_apart_and_judges_by_the_first_half():
    nodes = [
        *(node(0.7, number % 3 > 0, number // 6, own=0.6, rank=number % 5) for number in range(12)),
        node(0.2, False, 1, source="lookup"),
    ]
    found = judging.summary(nodes)
    assert found["drafted"]["num_nodes"] == 12
    assert set(found["drafted"]["estimates"]) == {"calibrated", "sent", "own"}
    assert found["second_half"]["num_nodes"] == 6
    assert set(found["second_half"]["estimates"]) == {"calibrated", "frozen", "sent", "own"}
    sources = {each["value"]: each for each in found["groups"]["source"]}
    assert sources["lookup"]["own"] is None
    assert sources["lookup"]["calibrated"] == pytest.approx(0.2)
    assert sources["draft"]["auc"]["own"] == 0.5
    assert [each["value"] for each in found["groups"]["rank"]] == ["0", "1", "2", "3+"]
    assert sum(each["num_nodes"] for each in found["groups"]["rank"]) == 12
    json.dumps(found, allow_nan=False)


def test_metrics_that_are_not_defined_are_left_open():
    found = judging.summary([node(0.7, True), node(0.6, True)])
    assert found["drafted"]["estimates"]["own"]["auc"] is None
    assert found["second_half"] is None
    json.dumps(found, allow_nan=False)


# --- listening to the orchestrator

#       root (token 9 at position 2)
#      5      6        and lookup: 5 -> 8
#      7
SAID = {(1, 4, 9): {5: Word(-0.5, -0.6, 0), 6: Word(-2.0, -2.1, 1)}, (1, 4, 9, 5): {7: Word(-1.0, -1.1, 0)}}


def _grown(experience: WatchedExperience) -> SpeculationTree:
    tree = SpeculationTree(2, 100, experience.acceptance)
    tree.take(Proposal(1, 2, token_ids=(5, 7, 6), parents=(0, 1, 0), log_probs=(-0.5, -1.0, -2.0)), 8, epoch=1)
    found = TokenTree()
    found.add(found.add(ROOT_INDEX, 5, 0.0), 8, 0.0)
    tree.merge(found, lookup_cells([4, 4], [1, 2], [0, 0]))
    return tree


def _begun(words: measuring.Words) -> WatchedExperience:
    experience = WatchedExperience(words)
    experience.begin([1, 4, 9])
    words.update(SAID)
    return experience


def test_decided_nodes_keep_the_estimates_from_before_their_verdict():
    experience = _begun({})
    tree = _grown(experience)
    held = {token_id: tree.nodes.log_probs[index] for index, token_id in enumerate(tree.nodes.token_ids)}
    experience.observe_tree(tree, [5, 8])
    assert [(each.token_id, each.position, each.depth, each.is_right, each.source) for each in experience.nodes] == [
        (5, 3, 1, True, "both"),
        (6, 3, 1, False, "draft"),
        (7, 4, 2, False, "draft"),
        (8, 4, 2, True, "lookup"),
    ]
    assert {each.token_id: each.calibrated for each in experience.nodes} == held
    assert [(each.sent, each.own) for each in experience.nodes] == [(-0.5, -0.6), (-2, -2.1), (-1, -1.1), (None, None)]
    assert [each.rank for each in experience.nodes] == [0, 1, 0, 0], "lookup's best of a child and the draft's"
    assert experience.acceptance.log_probs[draft_cell(-2.0, 1)] < held[6], "and it learns as ever"


def test_nodes_below_a_wrong_one_are_not_decided_and_the_text_goes_on():
    experience = _begun({})
    experience.observe_tree(_grown(experience), [6])
    experience.extend([6])
    assert [each.token_id for each in experience.nodes] == [5, 6]
    experience.extend([2])  # of a round without a tree
    late = SpeculationTree(2, 100, experience.acceptance)
    late.take(Proposal(1, 2, token_ids=(5,), parents=(0,), log_probs=(-0.5,)), 8, epoch=1)
    experience.observe_tree(late, [6, 2])
    assert (len(experience.nodes), experience.num_late) == (2, 1)


def test_the_first_halfs_table_learns_no_more():
    experience = _begun({})
    experience.observe_tree(_grown(experience), [5, 7])
    assert [each.frozen for each in experience.nodes] == [None] * 4
    experience.freeze()
    learned = experience.acceptance.log_probs[draft_cell(-2.0, 1)]
    for _ in range(3):
        experience.begin([1, 4, 9])
        experience.words.update(SAID)
        experience.observe_tree(_grown(experience), [6])
    wrong, right = experience.nodes[-2:]
    assert (wrong.prompt, right.prompt) == (3, 3)
    assert right.frozen == learned < right.calibrated
    assert wrong.frozen is not None
    assert wrong.frozen > wrong.calibrated


def test_the_draft_is_left_as_it_was_even_after_an_error():
    before = draft_engine.Grower

    def fail() -> None:
        with overheard({}):
            assert draft_engine.Grower is not before
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert draft_engine.Grower is before


# --- on the embedded pair

SETTINGS = StudySettings(modes=("pingpong",), num_prompts=2, num_new_tokens=16)


@pytest.fixture(scope="module")
def models() -> Models:
    return measuring.load(SETTINGS)


def _texts(models: Models, temperature: float) -> list[list[int]]:
    """Return prompts and texts of the study's requests, written without anybody listening."""

    async def write() -> list[list[int]]:
        settings = measuring.worker_settings(SETTINGS, "plain")
        texts: list[list[int]] = []
        async with open_workers(settings, models) as workers:
            orchestrator = workers.orchestrator(settings.orchestrator)
            for number, prompt in enumerate(workloads.read_prompts(workloads.CODE_PROMPTS, 2)):
                request = Request(
                    prompt_ids=tuple(workers.tokenizer.encode(prompt.text)),
                    max_new_tokens=SETTINGS.num_new_tokens,
                    sampling=SamplingParams(temperature=temperature),
                    seed=number,
                )
                texts.append([*request.prompt_ids, *(await orchestrator.generate(request)).token_ids])
        return texts

    return asyncio.run(write())


def _measured(models: Models, mode: str, temperature: float) -> Found:
    prompts = workloads.read_prompts(workloads.CODE_PROMPTS, SETTINGS.num_prompts)
    return measuring.measure(SETTINGS, models, prompts, mode, temperature, _silent)


@pytest.mark.parametrize(("mode", "temperature"), [("pingpong", 0.0), ("pingpong", 0.7), ("overlap", 0.7)])
def test_nodes_are_right_if_the_text_has_their_token(models: Models, mode: str, temperature: float):
    found, texts = _measured(models, mode, temperature), _texts(models, temperature)
    assert len({(each.prompt, each.position, each.token_id) for each in found.nodes}) == len(found.nodes) > 20
    assert models.draft is not None
    for each in found.nodes:
        text = texts[each.prompt]
        assert each.is_right == (text[each.position] == each.token_id)
        assert (each.own is None) == (each.sent is None) == (each.source == "lookup")
        assert (each.frozen is None) == (each.prompt == 0)
    drafted = [each for each in found.nodes if each.own is not None][::7]
    for each in drafted:
        logits = models.draft.runner.forward([SequenceInput(0, 0, texts[each.prompt][: each.position])])[0][-1]
        expected = torch.log_softmax(logits.double() / (temperature or 1), -1)[each.token_id].item()
        assert each.own == pytest.approx(expected, abs=1e-3)
    if not temperature:  # of the best few, so that nothing is lost to the rest of the vocabulary
        assert all(each.sent >= each.own - 1 / 32 - 1e-4 for each in drafted if each.own > -15)


# --- the command, its file and its section


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibration")
    options = ["--prompts", "2", "--new-tokens", "12", "--modes", "pingpong", "--temperature", "0,1"]
    output = ["--output", str(folder / "c.jsonl"), "--nodes-to", str(folder / "nodes.jsonl")]
    found = CliRunner().invoke(app, ["calibration", *options, *output])
    assert found.exit_code == 0, found.output
    assert found.stdout == (folder / "c.jsonl").read_text()
    return folder / "c.jsonl"


def test_the_command_writes_a_line_per_temperature_and_one_of_all(results: Path):
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(record["kind"], record["mode"], record["temperature"]) for record in records] == [
        ("calibration", "pingpong", 0.0),
        ("calibration", "pingpong", 1.0),
        ("calibration", "pingpong", None),
    ]
    counts = [record["drafted"]["num_nodes"] for record in records]
    assert counts[0] + counts[1] == counts[2] > 0
    assert all(record["provenance"]["commit"] and record["models"]["draft"]["weights_hash"] for record in records)
    for record in records:
        for estimate in record["drafted"]["estimates"].values():
            assert sum(each["count"] for each in estimate["bins"]) == record["drafted"]["num_nodes"]
    nodes = [json.loads(line) for line in results.with_name("nodes.jsonl").read_text().splitlines()]
    assert len(nodes) == records[2]["num_nodes"]


def test_the_report_has_a_diagram_and_the_metrics_of_every_run(results: Path):
    (section,) = page.build([results], _silent, needs_commit=False)
    assert [plot.name for plot in section.plots] == [f"c-reliability-{number}" for number in (1, 2, 3)]
    html = page.render([section], _silent)
    assert html.count("<svg ") == 3
    for words in ("AUC of calibrated minus this", "draft&#39;s own probability", "pingpong, all temperatures"):
        assert words in html
    assert "estimate = share" in plots.inline_svg(section.plots[0])


def _other_schema(line: str) -> str:
    return json.dumps({**json.loads(line), "schema": 99})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_other_schema, "none of `calibration` with schema"),
        (lambda line: line + '\n{"kind":', "is damaged"),
        (lambda line: line.replace('"drafted"', '"dropped"'), "is damaged"),
    ],
)
def test_a_damaged_file_is_refused_by_name(results: Path, tmp_path: Path, spoil: Callable[[str], str], message: str):
    path = tmp_path / "spoiled.jsonl"
    path.write_text(spoil(results.read_text().splitlines()[0]) + "\n")
    with pytest.raises(InvalidRequest, match=f"spoiled.*{message}"):
        page.build([path], _silent, needs_commit=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--modes", "lookup"], "There is no mode 'lookup' with a draft"),
        (["--modes", "overlap,overlap"], "each once"),
        (["--prompts", "51", "--modes", "pingpong"], "--prompts must be between"),
    ],
)
def test_what_cannot_be_studied_is_told(options: list[str], message: str):
    found = CliRunner().invoke(app, ["calibration", *options])
    assert isinstance(found.exception, SpecSplitError)
    assert message in str(found.exception)
    assert CliRunner().invoke(app, ["calibration", "--temperature", "warm"]).exit_code == 2
