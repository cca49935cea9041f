"""The counts of KV rows against a plain dict, and against what a memory of rows really holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specsplit.engine.row_budget import KVStatistics, RowBudget
from specsplit.engine.seniority import Seniority

NUM_SLOTS, CAPACITY, BLOCK = 4, 40, 8


class Rows:
    """Slots whose rows hold memory once they are written, until they are given back."""

    num_slots, capacity, row_bytes, can_return = NUM_SLOTS, CAPACITY, 1 << 20, True

    def __init__(self, row_limit: int) -> None:
        self.row_limit = row_limit
        self.held = [set(range(3)) for _ in range(NUM_SLOTS)]  # what was written at load

    def rows_for(self, num_rows: int) -> int:
        return min(-(-num_rows // BLOCK) * BLOCK, CAPACITY)

    def return_rows(self, slot: int, start: int) -> None:
        self.held[slot] = {row for row in self.held[slot] if row < start}


class BudgetAgainstADict(RuleBasedStateMachine):
    """Reserve, write, trim and release in any order."""

    @initialize(limit=st.integers(CAPACITY, NUM_SLOTS * CAPACITY))
    def begin(self, limit: int) -> None:
        self.memory = Rows(limit)
        self.budget = RowBudget(self.memory)
        self.reserved = dict.fromkeys(range(NUM_SLOTS), 0)

    @rule(slot=st.integers(0, NUM_SLOTS - 1), num_rows=st.integers(1, CAPACITY))
    def reserve(self, slot: int, num_rows: int) -> None:
        wanted = max(self.reserved[slot], self.memory.rows_for(num_rows))
        fits = sum(self.reserved.values()) - self.reserved[slot] + wanted <= self.budget.limit
        assert self.budget.lacking(slot, num_rows) == wanted - self.reserved[slot]
        assert self.budget.try_reserve(slot, num_rows) == fits
        if fits:
            self.reserved[slot] = wanted
            self.memory.held[slot] |= set(range(wanted))

    @rule(slot=st.integers(0, NUM_SLOTS - 1), num_rows=st.integers(0, CAPACITY))
    def trim(self, slot: int, num_rows: int) -> None:
        self.budget.trim(slot, num_rows)
        self.reserved[slot] = min(self.reserved[slot], self.memory.rows_for(num_rows))

    @precondition(lambda self: any(self.reserved.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot, rows in self.reserved.items() if rows]))
        self.budget.release(slot)
        self.reserved[slot] = 0

    @invariant()
    def rows_are_accounted_for(self) -> None:
        self.budget.check_integrity()
        assert self.budget.reserved == list(self.reserved.values())
        assert self.budget.num_free == self.budget.limit - sum(self.reserved.values())
        held = sum(map(len, self.memory.held))
        assert held == self.budget.num_touched <= self.budget.limit
        for slot, rows in self.reserved.items():
            assert set(range(rows)) <= self.memory.held[slot], "rows that a slot may write were given back"
        spare = held - sum(self.reserved.values())
        assert spare <= self.budget.limit // 8, "free rows go back beyond a small reserve"


TestBudgetAgainstADict = BudgetAgainstADict.TestCase


def test_statistics_are_in_rows_and_bytes():
    held = KVStatistics(num_rows=100, num_reserved=60, num_warm=20, num_touched=70, row_bytes=3)
    assert (held.budget_bytes, held.used_bytes, held.touched_bytes, held.num_free) == (300, 120, 210, 60)


@given(st.lists(st.tuples(st.sampled_from(["open", "preempt", "end"]), st.integers(0, 4), st.integers(0, 9))))
def test_ranks_are_those_of_the_first_opening(moves: list[tuple[str, int, int]]):
    now_s, first_opened = 0.0, dict[str, tuple[float, int]]()
    seniority = Seniority(lambda: now_s)
    is_open = dict[str, bool]()
    for number, (move, which, priority) in enumerate(moves):
        key, now_s = f"s{which}", now_s + 3.0
        if move == "open" and not is_open.get(key):
            seniority.open(key, priority)
            first_opened.setdefault(key, (now_s - 10.0 * priority, number))
            is_open[key] = True
        elif move == "preempt" and is_open.get(key):
            seniority.preempt(key)
            is_open[key] = False
        elif move == "end":
            seniority.end(key)
            seniority.forget(key)
            is_open.pop(key, None)
            first_opened.pop(key, None)
    keys = sorted([key for key, value in is_open.items() if value], key=lambda key: first_opened[key])
    assert sorted(keys, key=seniority.of) == keys
    assert all((seniority.preempted_since(key) is not None) == (not value) for key, value in is_open.items())


def test_a_preempted_session_comes_back_when_another_one_has_ended():
    seniority = Seniority(lambda: 0.0)
    for key in ("a", "b", "c"):
        seniority.open(key, 5)
    seniority.preempt("c")
    assert not seniority.may_return("c")
    assert seniority.may_return("new")
    seniority.end("b")
    assert seniority.may_return("c")
    seniority.open("c", 5)
    seniority.preempt("c")
    seniority.preempt("a")
    assert seniority.may_return("c"), "it is alone"
    seniority.sweep(0.0)
    assert seniority.preempted_since("c") is None, "a client that never comes back is forgotten"


def test_a_preempted_session_whose_client_waits_is_not_forgotten():
    now_s = 0.0
    seniority = Seniority(lambda: now_s)
    for key in ("old", "waits", "gone"):
        seniority.open(key, 5)
    for key in ("gone", "waits"):
        seniority.preempt(key, "a caller")
    now_s = 61.0
    seniority.sweep(now_s - 60, {"waits"})
    assert seniority.preempted_of("a caller") == {"waits"}
    assert not seniority.may_return("waits"), "no session has ended"
    now_s = 120.0  # it left the queue at some time since the last sweep
    seniority.sweep(now_s - 60)
    seniority.open("new", 5)
    seniority.open("waits", 5)
    assert seniority.of("waits") < seniority.of("new")
    seniority.preempt("waits")
    now_s = 180.0
    seniority.sweep(now_s - 60)
    assert seniority.preempted_since("waits") is None
