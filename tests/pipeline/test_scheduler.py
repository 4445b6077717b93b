"""Which queued rollout is next."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollyard.core import Run
from rollyard.pipeline.scheduler import Scheduler
from rollyard.store.base import QueuedRow


def row(name: str, run: str, seq: int, priority: int = 0) -> QueuedRow:
    return QueuedRow(name, run, priority, seq, 1)


def drain(scheduler: Scheduler, now: float = 0.0) -> list[str]:
    order: list[str] = []
    while (popped := scheduler.pop(now)) is not None:
        order.append(popped.id)
    return order


def test_a_small_late_run_does_not_wait_for_a_large_early_one():
    scheduler = Scheduler()
    for number in range(100):
        scheduler.push(row(f"a{number}", "a", number))
    first = [scheduler.pop(0.0) for _ in range(50)]
    for number in range(3):
        scheduler.push(row(f"b{number}", "b", 100 + number))
    order = drain(scheduler)
    assert all(first)
    assert {"b0", "b1", "b2"} <= set(order[:6])


def test_an_idle_run_does_not_save_up_turns():
    scheduler = Scheduler()
    scheduler.push(row("b0", "b", 0))
    scheduler.pop(0.0)
    for number in range(20):
        scheduler.push(row(f"a{number}", "a", 1 + number))
    for _ in range(10):
        scheduler.pop(0.0)
    for number in range(10):
        scheduler.push(row(f"b{1 + number}", "b", 50 + number))
    order = drain(scheduler)[:6]
    assert Counter(name[0] for name in order) == {"a": 3, "b": 3}


def owners(*names: str) -> Scheduler:
    """A scheduler with a run of each owner, named like it."""
    scheduler = Scheduler()
    for name in names:
        scheduler.set_quota(Run(name, owner=name))
    return scheduler


def pushed(scheduler: Scheduler, run: str, count: int, start: int = 0, priority: int = 0) -> None:
    for number in range(start, start + count):
        scheduler.push(row(f"{run}{number}", run, number, priority))


def test_an_owner_whose_run_is_at_its_quota_does_not_save_up_turns():
    scheduler = owners("a", "b")
    scheduler.set_quota(Run("held", owner="a", max_live=1))
    pushed(scheduler, "held", 2)
    assert scheduler.pop(0.0) is not None
    pushed(scheduler, "b", 50)
    for _ in range(50):
        assert scheduler.pop(0.0) is not None
    pushed(scheduler, "a", 100)
    pushed(scheduler, "b", 100, start=50)
    turns = [row.run for _ in range(10) if (row := scheduler.pop(0.0)) is not None]
    assert turns.count("b") in (4, 5), turns


def test_a_newcomer_does_not_wait_for_the_backlog_that_a_higher_priority_held_back():
    scheduler = owners("low", "high", "new")
    pushed(scheduler, "low", 100)
    assert scheduler.pop(0.0) is not None
    pushed(scheduler, "high", 50, priority=10)
    for _ in range(50):
        assert scheduler.pop(0.0) is not None
    pushed(scheduler, "new", 5)
    turns = [row.run for _ in range(12) if (row := scheduler.pop(0.0)) is not None]
    assert turns.count("new") == 5, turns


def test_priority_goes_before_fairness_and_order_of_submission_within_a_run():
    scheduler = Scheduler()
    for number in range(3):
        scheduler.push(row(f"low{number}", "a", number, priority=0))
    scheduler.push(row("high", "b", 9, priority=5))
    scheduler.push(row("mine", "a", 10, priority=1))
    assert drain(scheduler) == ["high", "mine", "low0", "low1", "low2"]


def test_a_run_at_its_quota_is_skipped_until_one_of_its_rollouts_is_done():
    scheduler = Scheduler()
    scheduler.set_quota(Run("a", max_live=1))
    for number in range(2):
        scheduler.push(row(f"a{number}", "a", number))
    scheduler.push(row("b0", "b", 5))
    assert drain(scheduler) == ["a0", "b0"]
    scheduler.release("a")
    assert drain(scheduler) == ["a1"]


def test_a_delayed_row_waits_for_its_time_and_can_be_removed():
    scheduler = Scheduler()
    scheduler.push(row("later", "a", 0), not_before=10.0)
    scheduler.push(row("gone", "a", 1), not_before=5.0)
    assert scheduler.remove("gone")
    assert not scheduler.remove("gone")
    assert scheduler.pop(9.9) is None
    assert len(scheduler) == 1
    assert drain(scheduler, now=10.0) == ["later"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.booleans()), max_size=60))
def test_every_row_is_popped_once_or_was_removed(rows: list[tuple[str, int, bool]]):
    scheduler = Scheduler()
    expected: set[str] = set()
    for number, (run, priority, is_removed) in enumerate(rows):
        name = f"r{number}"
        scheduler.push(row(name, run, number, priority))
        if is_removed:
            scheduler.remove(name)
        else:
            expected.add(name)
    order = drain(scheduler)
    assert sorted(order) == sorted(expected)
    assert len(scheduler) == 0


def test_forgetting_a_run_removes_its_cancelled_rows():
    scheduler = Scheduler()
    for number in range(3):
        scheduler.push(row(f"a{number}", "a", number))
        scheduler.remove(f"a{number}")
    scheduler.forget_run("a")
    assert not scheduler._runs
