"""The adapter of OpenAI completions servers: the real client, and servers of several habits over real sockets."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from benchmarks import registry, summary
from benchmarks.peers.openai_completions import Completions, Dialect, connect
from benchmarks.settings import Setup
from benchmarks.systems import Task
from specsplit.core.errors import InvalidRequest, WorkerFailed, WorkerUnreachable
from specsplit.core.types import SamplingParams
from tests.support.openai_server import Habits, serving

pytest.importorskip("openai")
TASK = Task("a", (5, 6), 4, SamplingParams(temperature=0.5, top_p=0.9), seed=9, text="def f(")


def _connected(habits: Habits, model: str | None = None) -> Completions:
    return connect("openai:here", habits.url, model)


def test_a_server_that_takes_everything_is_asked_with_ids_and_tells_ids():
    with serving(Habits(stops_after=2)) as habits:
        system = _connected(habits)
        sample = system.generate(TASK)
    assert system.dialect == Dialect()
    assert len(habits.asked) == 2, "one first try"
    asked = habits.asked[-1]
    assert (asked["prompt"], asked["max_tokens"], asked["temperature"], asked["top_p"]) == ([5, 6], 4, 0.5, 0.9)
    assert (asked["seed"], asked["model"], asked["stream"], asked["ignore_eos"]) == (9, "large", True, True)
    assert (sample.token_ids, sample.num_tokens) == ((0, 1, 2, 3), 4)
    assert [count for _, count in sample.arrivals] == [1] * 4
    times = [time_s for time_s, _ in sample.arrivals]
    assert times == sorted(times)
    assert sample.decode_s is not None
    assert sample.ttft_s == times[0] <= times[-1] <= sample.wall_s


@pytest.mark.parametrize(
    ("takes_token_ids", "takes_extra_fields", "num_tries"), [(True, False, 2), (False, True, 3), (False, False, 4)]
)
def test_a_server_that_takes_less_is_asked_in_the_way_that_it_takes(
    takes_token_ids: bool, takes_extra_fields: bool, num_tries: int
):
    with serving(
        Habits(stops_after=3, takes_token_ids=takes_token_ids, takes_extra_fields=takes_extra_fields)
    ) as habits:
        system = _connected(habits)
        assert len(habits.asked) == num_tries
        sample = system.generate(TASK)
        if not takes_token_ids:
            with pytest.raises(InvalidRequest, match="--chat"):
                system.generate(replace(TASK, text=None))
    assert system.dialect == Dialect(takes_token_ids, takes_extra_fields)
    assert habits.asked[-1]["prompt"] == ([5, 6] if takes_token_ids else "def f(")
    if takes_extra_fields:
        assert sample.token_ids == (0, 1, 2, 3)
    else:
        assert (sample.token_ids, sample.num_tokens) == (None, 3), "it stopped early, and what it made counts"
    told = summary.reservations("s", asdict(system.dialect))
    assert ("no token ids" in " ".join(told), "it may stop" in " ".join(told)) == (
        not takes_token_ids,
        not takes_extra_fields,
    )


def test_a_model_is_named_where_the_server_names_none():
    with serving(Habits(models=())) as habits:
        with pytest.raises(WorkerFailed, match="#MODEL"):
            _connected(habits)
        name = f"openai:{habits.url}#/models/small"
        made = registry.find(name, Setup()).make(Setup())
        assert made.args[-1] == "/models/small"
        with made() as served:
            served.systems[0].generate(TASK)
            assert served.systems[0].name == name
            assert served.dialect() == {"takes_token_ids": True, "goes_past_eos": True}
    assert habits.asked[-1]["model"] == "/models/small"


def test_servers_that_fail_are_errors_in_the_users_words():
    with serving(Habits(breaks_off_after=2)) as habits:
        system = _connected(habits)
        with pytest.raises(WorkerFailed, match="failed on a"):
            system.generate(TASK)
    with serving(Habits(status=500)) as habits, pytest.raises(WorkerFailed, match="out of memory"):
        _connected(habits)
    assert len(habits.asked) == 1, "what is no refusal is not tried in another way"
    with serving(Habits(status=422)) as habits, pytest.raises(WorkerFailed, match="refuses every request"):
        _connected(habits)
    with pytest.raises(WorkerUnreachable, match="cannot be reached"):
        _connected(habits)
