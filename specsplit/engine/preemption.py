"""Memory for the rows of a step: slots grow by blocks, and when the budget is spent the youngest session makes room.

    sessions   [ oldest | ... | one whose next rows do not fit | ... | youngest ] those idle for long, scores: go first

A preempted session hears SlotBehind and is sent again what it had, so that its text is the same. The oldest one with
work always goes on. Knows tasks and the session table; the scheduler asks before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specsplit.core.errors import SlotBehind
from specsplit.engine.background import GaveWay
from specsplit.engine.batch import Task
from specsplit.engine.seniority import Rank
from specsplit.engine.session import SessionTable, WorkerSession
from specsplit.engine.slots import Reclaim


class Preemption:
    """Finds rows for the next forwards of tasks; `finish` lets go of a task whose session has lost its own.

    Only the executor calls it.
    """

    def __init__(
        self, sessions: SessionTable, running: Mapping[Task, None], finish: Callable[[Task, None, Exception], None]
    ) -> None:
        """Take rows of `running` tasks, those of no session first."""
        self.reserved: Sequence[int] = sessions.slots.rows.reserved
        """The rows that each slot may write to."""
        self._sessions, self._slots, self._running, self._finish = sessions, sessions.slots, running, finish
        sessions.slots.borrowed_slots = Reclaim(lambda: [task.slot for task in self._yielding()], self.give_way)

    def make_room(self, ready: list[Task]) -> list[Task]:
        """Return the tasks whose rows fit; the others have ended, or wait for rows that somebody is about to free."""
        lacking = [task for task in ready if task.end_row > self.reserved[task.slot]]
        if not lacking:
            return ready
        tasks = {task.session: task for task in ready if task.session is not None}
        for task in sorted(lacking, key=self._rank):  # the oldest first, since it may need what a later one has
            task.lacks_rows = task.error is None and not self._try_grow(task, tasks)
        return [task for task in ready if task.error is None and not (task.lacks_rows and task in lacking)]

    def give_way(self) -> bool:
        """End the work of no session that began last, for a session that needs its slot; return False for none."""
        for task in self._yielding()[-1:]:
            task.work.close()
            self._finish(task, None, GaveWay("Sessions need the slot of this work; try again in a moment."))
            return True
        return False

    def _yielding(self) -> list[Task]:
        """Return the work of no session whose slots sessions may take, in the order in which it began."""
        # What is pending elsewhere writes to its slot still, so it keeps it, and so does the loan that is due.
        due = self._slots.due
        kept = due.slot if due is not None else None
        outside = [task for task in self._running if task.session is None and task.sequence is not None]
        return [task for task in outside if not task.is_pending and task.slot != kept]

    def _rank(self, task: Task) -> Rank:
        assert task.session is not None, "work of no session reserves all its rows when it begins"
        return self._sessions.seniority.of(task.session)

    def _try_grow(self, task: Task, tasks: dict[str, Task]) -> bool:
        """Reserve the rows of the task's next forward, for which younger sessions go; return whether that succeeded.

        Tasks that end are taken out of `tasks`, and it may be among them.
        """
        # Each turn frees a session's rows or ends the loop; the oldest session alone always fits the memory.
        while not self._slots.grow(task.slot, task.end_row):
            if self.give_way() or self._sessions.evict_idle("one at work"):
                continue
            victim = self._youngest(tasks)
            if victim.key == task.session and self._is_room_coming(victim, tasks):
                return False
            running = tasks.pop(victim.key, None)
            if running is not None:
                running.work.close()
                self._finish(running, None, SlotBehind(0, is_preempted=True))
            victim.log("preempted", "its rows go to older ones")
            self._sessions.preempt(victim)
            if victim.key == task.session:
                return False
        return True

    def _youngest(self, tasks: Mapping[str, Task]) -> WorkerSession:
        """Return the youngest session that is not at work elsewhere; the one that asks is among them."""
        free = [one for one in self._sessions.open_sessions if not one.is_in_use or one.key in tasks]
        return max(free, key=lambda one: self._sessions.seniority.of(one.key))

    def _is_room_coming(self, session: WorkerSession, tasks: Mapping[str, Task]) -> bool:
        """Whether rows become free without a preemption: those of work of no session, or of a younger one elsewhere."""
        ranks = self._sessions.seniority
        if self._slots.num_used > len(self._sessions):
            return True
        elsewhere = [one for one in self._sessions.open_sessions if one.is_in_use and one.key not in tasks]
        return any(ranks.of(session.key) < ranks.of(one.key) for one in elsewhere)
