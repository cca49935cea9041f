"""The study of exactness draws fair circumstances and counts differences by what a text promised."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import typer

from benchmarks.research.exactness import circumstances, study
from benchmarks.research.exactness.circumstances import Circumstances
from benchmarks.research.exactness.places import Job
from benchmarks.settings import Shape
from benchmarks.systems import Sample, Task
from tests.unit.test_bench_smoke import _result

TASK = Task("one", (1, 2), 4)
SOMEWHERE = Circumstances("loopback", 1, "stream", "embedded", "draft link cut", Shape())


def test_faults_happen_only_to_those_that_take_part():
    rng = random.Random(0)
    drawn = [circumstances.draw(rng) for _ in range(2000)] + list(circumstances.all_of_them(rng))
    for each in drawn:
        assert (each.mode, each.draft) in circumstances.WAYS
        assert each.place != "in process" or each.fault == "none"
        assert each.draft != "none" or not each.fault.startswith("draft")
        assert each.place == "two stages" or not each.fault.startswith("stage")
    assert {each.fault.partition(" ")[2] for each in drawn if each.fault != "none"} == {"link cut", "killed"}


def test_the_product_holds_every_mode_tree_draft_and_place_once():
    found = [each for each in circumstances.all_of_them(random.Random(0)) if each.fault == "none"]
    ways, shapes = len(circumstances.WAYS), len(circumstances.SHAPES)
    assert len(found) == len(set(found)) == 3 * 2 * ((ways - 1) * shapes + 1)


def test_slices_are_all_texts_each_once():
    tasks = [[replace(TASK, id=str(number), seed=step) for step in range(3)] for number in range(3)]
    jobs = study.all_jobs(tasks, 1, 0)
    assert jobs == study.all_jobs(tasks, 1, 0)
    drawn = 3 * 3 * study.NUM_DRAWN
    assert len(jobs) == drawn + len(list(circumstances.all_of_them(random.Random(0))))


@pytest.mark.parametrize("exactness", ["bits", "near ties"])
def test_a_difference_counts_under_what_the_text_promised(exactness: str):
    tally = study.Tally({TASK: (5, 6, 7, 8)}, lambda task, position: 0.25)
    result = replace(_result(), exactness=exactness)
    job = Job(TASK, SOMEWHERE, 2)
    assert tally.add(job, Sample(1.0, (5, 6, 7, 8), result=result)) is None
    found = tally.add(job, Sample(1.0, (5, 9, 7, 9), result=result))
    assert found is not None
    assert (found["position"], found["expected"], found["got"], found["margin"]) == (1, 6, 9, 0.25)
    total = tally.to_dict()["totals"][exactness]
    assert (total["texts"], total["tokens"], total["differing_texts"], total["differing_tokens"]) == (2, 8, 1, 2)
    assert tally.total("bits")["differing_texts"] == (exactness == "bits")


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "a/b", "-1/2"])
def test_a_slice_that_is_none_is_refused(text: str):
    with pytest.raises(typer.BadParameter):
        study.parse_slice(text)
