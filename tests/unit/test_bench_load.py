"""`load`: the loops on fakes, the numbers on made-up outcomes, and real engines, workers and clients in small."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.load import figures
from benchmarks.load.clients import MAX_TRIES, ClosedLoop, OpenLoop, Outcome
from benchmarks.load.run import Point, points_of
from benchmarks.load.settings import Endpoint, Limits, LoadSettings
from benchmarks.peers import ours_remote
from benchmarks.peers.openai_completions import LoadedEndpoint
from benchmarks.peers.ours import LoadedEngines
from benchmarks.peers.ours_remote import LoadedServices, Loopback
from benchmarks.peers.transformers_ways import BatchedGenerate, load
from benchmarks.report import page
from benchmarks.report.tables import Text, threads_of
from benchmarks.settings import Pair, ServedMode
from benchmarks.systems import Sample, Task
from specsplit.core.errors import InvalidRequest, Overloaded, WorkerFailed
from specsplit.core.types import SamplingParams
from tests.support.openai_server import Habits, serving
from tests.support.stage_processes import EMBEDDED_TARGET
from tests.support.virtual_time import run_virtual

TASKS = [Task(f"task-{number}", (1, 2), 2) for number in range(7)]
LIMITS = Limits(ttft_s=1.0, itl_s=0.1)


class Counter:
    """A system that counts who is in it; it refuses whom `room` has no place for, and fails on `broken`."""

    def __init__(self, room: int = 100, broken: str = "") -> None:
        self.now, self.most, self.asked = 0, 0, list[str]()
        self._room, self._broken = room, broken

    async def send(self, task: Task) -> Sample:
        self.asked.append(task.id)
        if self.now == self._room:
            raise Overloaded("Full.", 0.05)
        if task.id == self._broken:
            raise WorkerFailed("It broke.")
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(50):  # longer than all others need to ask
            await asyncio.sleep(0)
        self.now -= 1
        return Sample(0.0, (5, 6), arrivals=((0.0, 1), (0.0, 1)))


async def test_a_closed_loop_has_as_many_requests_under_way_as_clients():
    system = Counter()
    outcomes = await ClosedLoop(3).run(system.send, TASKS)
    assert system.most == 3
    assert system.asked == [task.id for task in TASKS]
    assert sorted(each.number for each in outcomes) == list(range(7))
    assert all(each.is_done and each.num_tokens == 2 for each in outcomes)


async def test_a_client_that_is_refused_comes_back_until_it_is_served():
    system = Counter(room=1)
    outcomes = await ClosedLoop(2).run(system.send, TASKS)
    refused = [each for each in outcomes if not each.is_done]
    assert refused
    assert {each.retry_after_s for each in refused} == {0.05}
    assert sorted(each.number for each in outcomes if each.is_done) == list(range(7))


async def test_an_open_loop_sends_whatever_became_of_the_others():
    system = Counter(room=2, broken="task-0")
    outcomes = await OpenLoop(1e9).run(system.send, TASKS)
    assert sorted(system.asked) == [task.id for task in TASKS], "each once: who is refused is lost"
    assert outcomes[0].error == "It broke."
    assert [each.is_done for each in outcomes].count(True) == 2
    assert [each.retry_after_s for each in outcomes].count(0.05) == 4


async def test_a_request_that_fails_in_any_way_ends_no_other():
    async def send(task: Task) -> Sample:
        if task.id == "task-1":
            raise KeyError("choices")
        return Sample(0.0, (5, 6))

    for loop in (ClosedLoop(2), OpenLoop(1e9)):
        outcomes = await loop.run(send, TASKS)
        assert {each.number: each.error for each in outcomes if not each.is_done} == {1: "KeyError('choices')"}
        assert sum(each.is_done for each in outcomes) == 6


def test_a_request_that_is_refused_to_the_last_has_failed():
    async def send(task: Task) -> Sample:
        raise Overloaded("Full.", 0.0)

    outcomes = run_virtual(lambda: ClosedLoop(2).run(send, TASKS[:3]))
    found = figures.summarise([outcomes], LIMITS)
    assert (found["num_refused"], found["num_failed"], found["refused_share"]["median"]) == (3 * MAX_TRIES, 3, 1.0)
    assert found["errors"] == ["It was refused 100 times."]
    assert [figures.raw(each)[-1] for each in outcomes].count("failed") == 3


async def test_arrivals_are_those_of_the_seed_and_the_rate():
    once, again, other = [await OpenLoop(1000.0, seed).run(Counter().send, TASKS * 20) for seed in (1, 1, 2)]
    assert [each.due_s for each in once] == [each.due_s for each in again] != [each.due_s for each in other]
    assert once[0].due_s == 0
    assert once[-1].due_s == pytest.approx(0.139, rel=0.3), "139 gaps of a thousandth"
    assert all(each.e2e_s >= 0 for each in once)


def _done(number: int, due_s: float, ttft_s: float, itl_s: float) -> Outcome:
    arrivals = ((ttft_s, 1), (ttft_s + 2 * itl_s, 2))
    return Outcome(number, due_s, ttft_s + 2 * itl_s, arrivals, (1, 2, number), 3)


REFUSED = Outcome(3, 1.0, 0.02, retry_after_s=1.0)
OUTCOMES = [_done(0, 0.0, 0.5, 0.05), _done(1, 1.0, 2.0, 0.05), _done(2, 3.6, 0.2, 0.1), REFUSED]


def test_goodput_counts_requests_within_both_limits():
    found = figures.rates(OUTCOMES, LIMITS)
    assert found == pytest.approx(
        {
            "tokens_per_s": 9 / 4,
            "requests_per_s": 3 / 4,
            "goodput_tokens_per_s": 6 / 4,
            "goodput_requests_per_s": 2 / 4,
            "good_share": 2 / 4,
            "refused_share": 1 / 4,
        }
    )
    assert figures.rates(OUTCOMES, Limits(1.0, 0.06))["good_share"] == 1 / 4
    late = [REFUSED, replace(_done(3, 1.0, 0.5, 0.05), number=3)]
    assert figures.rates(late, LIMITS)["good_share"] == 1, "refused at first, served in time: one good request"


def test_a_rate_over_one_of_zero_is_none_and_not_zero():
    idle, busy = (figures.summarise(rounds, LIMITS) for rounds in ([[REFUSED], []], [OUTCOMES, OUTCOMES]))
    assert idle["tokens_per_s"]["samples"] == [0.0, 0.0]
    assert figures.ratio(busy, idle) is None
    assert figures.ratio(idle, busy)["samples"] == [0.0, 0.0]


def test_waits_are_of_tokens_and_of_all_rounds():
    found = figures.summarise([OUTCOMES, [_done(0, 0.0, 0.4, 0.3)]], LIMITS)
    assert found["ttft_s"]["p50"] == pytest.approx(0.45)
    assert found["itl_s"]["p99"] > 0.28, "two tokens that came together waited alike"
    assert (found["num_done"], found["num_refused"], found["num_failed"]) == (4, 1, 0)
    assert found["refused_s"]["p99"] == 0.02
    assert found["tokens_per_s"]["samples"] == pytest.approx([9 / 4, 3.0])


def _settings(**changes: object) -> LoadSettings:
    given = {
        "systems": ("plain", "generate"),
        "clients": (1, 2),
        "temperatures": (0.0,),
        "lengths": (3,),
        "num_requests": 4,
        "limits": LIMITS,
        "sessions": 2,
    }
    return LoadSettings(**{**given, **changes})  # type: ignore[arg-type]


def test_a_point_says_what_it_is_beside_its_limit_and_its_peak():
    fast = [_done(0, 0.0, 0.25, 0.0), _done(1, 0.25, 0.25, 0.0)]
    slow = [_done(0, 0.0, 0.5, 0.0), _done(1, 0.5, 0.5, 0.0)]
    wrong = [replace(each, token_ids=(9,)) for each in fast]
    one, two, flood = (Point(0.0, clients) for clients in (1, 2, None))
    measured = {
        (one, "plain"): [slow],
        (one, "generate"): [slow],
        (two, "plain"): [fast],
        (two, "generate"): [slow],
        (flood, "plain"): [wrong],
    }
    _, double, over = points_of(measured, _settings())
    assert double["systems"]["plain"]["over_generate"]["median"] == pytest.approx(2)
    assert double["systems"]["plain"]["over_fewest_clients"]["median"] == pytest.approx(2)
    assert double["texts"]["plain"] == {"num_compared": 2, "num_different": 0}
    assert over["systems"]["plain"]["over_peak"]["median"] == pytest.approx(1)
    assert over["texts"]["plain"]["num_different"] == 2
    assert (double["clients"], over["clients"]) == (2, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"systems": ("beam",)}, "no system 'beam'"),
        ({"systems": ("assisted",)}, "takes no load"),
        ({"num_requests": 3}, "--requests"),
        ({"lengths": (1,)}, "--new-tokens 2"),
        ({"rate": 1.0, "overload": 2.0}, "--rate and --overload"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_the_users_words(changes: dict[str, object], message: str):
    with pytest.raises(InvalidRequest, match=message):
        _settings(**changes).check()


@pytest.mark.parametrize(
    ("system", "threads", "wanted"),
    [
        ("plain@loopback", 3, {"target": (3, False)}),
        ("auto@loopback", 1, {"target": (1, True)}),
        ("auto@loopback", 3, {"target": (3, True)}),
        ("overlap@loopback", 3, {"target": (2, False), "draft": (1, False)}),
        ("auto@apart", 1, {"target": (1, False), "draft": (1, False)}),
        ("auto@apart", 3, {"target": (2, False), "draft": (1, False)}),
    ],
)
def test_the_workers_of_a_mode_on_this_machine_share_its_threads(
    monkeypatch: pytest.MonkeyPatch, system: str, threads: int, wanted: dict[str, tuple[int, bool]]
):
    """A process of its own for each worker, or one that serves both."""
    begun: dict[str, tuple[int, bool]] = {}

    def worker(role: str, threads: int, pair: Pair, *options: str) -> SimpleNamespace:
        begun[role] = threads, "--draft-model" in options
        return SimpleNamespace(end=lambda: None)

    monkeypatch.setattr(ours_remote, "worker", worker)
    served = ServedMode(system, system.partition("@")[0])
    for kind, arguments in ((Loopback, (threads, Pair())), (LoadedServices, (_settings(threads=threads),))):
        begun.clear()
        kind(served, *arguments).__exit__()
        assert begun == wanted


def test_the_report_says_whose_threads_those_on_loopback_are():
    names, settings = (
        ("plain@loopback", "auto@loopback"),
        {"threads": 1, "systems": ["plain@loopback", "auto@loopback"]},
    )
    assert threads_of({"settings": settings}, "as it was") == "1 thread (as it was)"
    shared = {"settings": settings, "systems": {name: {"threads": count} for count, name in enumerate(names, 1)}}
    told = "1 thread (workers together: plain@loopback 1, auto@loopback 2)"
    assert threads_of(shared, "as it was") == told
    assert threads_of({"settings": {**settings, "systems": ["plain"]}}, "as it was") == "1 thread"


# --- real engines, workers and clients


def _real_tasks(temperature: float) -> list[Task]:
    sampling = SamplingParams(temperature=temperature)
    return [
        Task(str(number), tuple(range(5, 30 + 7 * number)), length, sampling, seed=number)
        for number, length in enumerate((5, 9, 7, 6))
    ]


def test_texts_under_load_are_those_of_requests_that_are_alone():
    with LoadedEngines(ServedMode("auto", "auto"), _settings()) as engines:
        for temperature in (0.0, 1.0):
            tasks = _real_tasks(temperature)
            alone = {number: engines.systems[0].generate(task).token_ids for number, task in enumerate(tasks)}
            for loop in (ClosedLoop(2), OpenLoop(1000.0)):  # four at once for two slots
                outcomes = engines.drive(loop, tasks)
                assert {each.number: each.token_ids for each in outcomes} == alone
                assert [each.num_tokens for each in sorted(outcomes, key=lambda each: each.number)] == [5, 9, 7, 6]


def test_batched_generate_gives_each_request_its_own_text():
    tasks, alone = _real_tasks(0.0), load("generate", 1, Pair())
    outcomes = BatchedGenerate("generate", 1, Pair()).drive(ClosedLoop(3), tasks)
    assert [each.token_ids for each in outcomes] == [alone.generate(task).token_ids for task in tasks]
    assert [each.num_tokens for each in outcomes] == [5, 9, 7, 6]
    assert [len({each.due_s for each in batch}) for batch in (outcomes[:3], outcomes)] == [1, 2]


def test_a_client_of_generate_waits_from_its_last_text_for_its_batch():
    outcomes = BatchedGenerate("generate", 1, Pair()).drive(ClosedLoop(2), _real_tasks(0.0))
    ends_s = sorted(each.due_s + each.e2e_s for each in outcomes[:2])
    assert [each.due_s for each in outcomes] == [0.0, 0.0, *ends_s], "the shorter text's client goes on at once"
    assert ends_s[0] < ends_s[1] < min(each.due_s + each.arrivals[0][0] for each in outcomes[2:])


@pytest.mark.parametrize("way", ["generate", "assisted", "assisted-constant", "lookup-4"])
def test_a_checkpoints_generation_defaults_change_no_text(tmp_path: Path, way: str):
    folders: dict[str, str] = {}
    for role in ("target", "draft"):
        copied = shutil.copytree(EMBEDDED_TARGET.parent / role, tmp_path / role)
        (copied / "generation_config.json").write_text('{"repetition_penalty": 1.5, "min_new_tokens": 3}')
        folders[role] = str(copied)
    task = Task("a", tuple(range(5, 30)), 12)
    assert (
        load(way, 1, Pair(**folders)).generate(task).token_ids == load("generate", 1, Pair()).generate(task).token_ids
    )


@pytest.mark.slow
def test_workers_that_are_full_refuse_the_excess_with_a_time():
    with LoadedServices(ServedMode("plain", "plain"), _settings(sessions=1, queue=1)) as workers:
        tasks = [Task(str(number), (1, 2, 3, number + 4), 40) for number in range(8)]
        outcomes = workers.drive(OpenLoop(1e6), tasks)
        served = workers.drive(ClosedLoop(3), tasks[:4])
    refused = [each for each in outcomes if each.retry_after_s is not None]
    assert len(refused) >= 4
    assert all(each.retry_after_s > 0 and each.error is None for each in refused)
    assert [each.num_tokens for each in outcomes if each.is_done] == [40] * (8 - len(refused))
    assert sum(each.is_done for each in served) == 4, "clients that come back are served"


def test_an_endpoint_is_driven_with_texts_and_its_refusals_are_read():
    tasks = [Task(str(number), (), 3, text="def f(") for number in range(4)]
    with serving(Habits()) as habits:
        system = LoadedEndpoint(Endpoint(habits.url))
        outcomes = system.drive(ClosedLoop(2), tasks)
        assert [(each.num_tokens, len(each.arrivals)) for each in outcomes] == [(3, 3)] * 4
        assert (habits.asked[-1]["prompt"], habits.asked[-1]["ignore_eos"]) == ("def f(", True)
        assert "return_token_ids" not in habits.asked[-1], "our own gateway refuses it"
        habits.status = 503
        assert [each.retry_after_s for each in system.drive(OpenLoop(1e6), tasks)] == [1.0] * 4
        habits.status = 500
        assert all("out of memory" in str(each.error) for each in system.drive(OpenLoop(1e6), tasks))
        habits.status, habits.breaks_off_after = 200, 1
        assert all("failed on" in str(each.error) for each in system.drive(ClosedLoop(1), tasks))
        habits.breaks_off_after, habits.fails_after = None, 2
        assert all("out of memory" in str(each.error) for each in system.drive(ClosedLoop(1), tasks))


def test_a_chunk_without_choices_is_no_token_of_an_endpoint():
    tasks = [Task(str(number), (), 3, text="def f(") for number in range(2)]
    with serving(Habits(pings=True)) as habits:
        outcomes = LoadedEndpoint(Endpoint(habits.url)).drive(ClosedLoop(1), tasks)
    assert [(each.error, each.num_tokens, len(each.arrivals)) for each in outcomes] == [(None, 3, 3)] * 2


def test_tokens_that_no_chunk_tells_are_spread_over_the_chunks():
    tasks = [Task("a", (), 10, text="def f(")]
    with serving(Habits(tokens_a_chunk=3)) as habits:
        (outcome,) = LoadedEndpoint(Endpoint(habits.url)).drive(ClosedLoop(1), tasks)
        (alone,) = LoadedEndpoint(Endpoint(habits.url)).drive(ClosedLoop(1), [replace(tasks[0], num_tokens=3)])
    assert ([count for _, count in outcome.arrivals], outcome.num_tokens) == ([1, 3, 3, 3], 10)
    assert [count for _, count in alone.arrivals] == [3]


def test_a_load_on_a_server_is_one_line_without_the_key(tmp_path: Path):
    path = tmp_path / "load.jsonl"
    sizes = ["--clients", "1,2", "--requests", "4", "--prompts", "2", "--new-tokens", "2,3", "--rounds", "2"]
    sizes += ["--rate", "1000", "--arrivals", "5"]
    with serving(Habits()) as habits:
        place = ["--url", habits.url, "--key", "very-secret", "--output", str(path)]
        found = CliRunner().invoke(app, ["load", *place, *sizes])
    assert found.exit_code == 0, found.output
    assert path.read_text(encoding="utf-8") == found.stdout
    assert "very-secret" not in found.stdout
    record = json.loads(found.stdout)
    assert [point["clients"] for point in record["points"]] == [1, 2, None]
    assert [point["systems"]["endpoint"]["num_done"] for point in record["points"]] == [8, 8, 10]
    assert (record["is_complete"], record["num_rounds"], record["settings"]["endpoint"]["model"]) == (True, 2, None)
    (section,) = page.build([path], lambda name: None, needs_commit=False)
    assert section.title.startswith("load.jsonl: endpoint under 1, 2 clients and an open loop, T 0, ")
    assert habits.url in page.render([section], lambda name: None)


def test_a_server_that_stops_early_is_told_in_the_line_and_the_report(tmp_path: Path):
    path = tmp_path / "load.jsonl"
    sizes = ["--clients", "1", "--requests", "2", "--prompts", "1", "--new-tokens", "4,6", "--rounds", "1"]
    with serving(Habits(takes_extra_fields=False, stops_after=3)) as habits:
        found = CliRunner().invoke(app, ["load", "--url", habits.url, *sizes, "--output", str(path)])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["systems"] == {"endpoint": {"takes_token_ids": True, "goes_past_eos": False}}
    (section,) = page.build([path], lambda name: None, needs_commit=False)
    warnings = " ".join(part.content for part in section.parts if isinstance(part, Text) and part.is_warning)
    assert "endpoint takes no fields beyond the protocol: it may stop" in warnings
    assert "endpoint, T 0, 1 client: 6 tokens were made of 10 that were asked for." in warnings


def test_every_section_of_the_recorded_loads_has_a_title_of_its_own():
    results, names = Path(__file__).parents[2] / "benchmarks" / "results", ("load.jsonl", "stage-sessions.jsonl")
    sections = page.build([results / name for name in names], lambda name: None, needs_commit=False)
    titles = [section.title for section in sections]
    assert len(set(titles)) == len(titles) >= 18, titles
