"""What keeps failing to start is left alone, tried once, and taken back. The clock is the test's own."""

import asyncio
from collections.abc import Callable

import pytest

from rollyard.core import RollyardError
from rollyard.core.failure import SandboxStartFailed, TaskInvalid
from rollyard.sandbox.breaker import FAILURES, FIRST_S, LONGEST_S, MOST, Breakers


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breakers(clock: Clock) -> Breakers:
    return Breakers(now=clock)


def fail(breakers: Breakers, image: str | None = None, error: Callable[[], BaseException] | None = None) -> None:
    """One start that fails for real; AssertionError if the breaker did not let it try."""
    raised = error() if error else SandboxStartFailed("the disk is on fire")
    with pytest.raises(type(raised)) as found, breakers.guard("bubblewrap", image):
        raise raised
    assert found.value is raised, "the breaker answered instead"


def refused(breakers: Breakers, image: str | None = None) -> RollyardError:
    with pytest.raises(SandboxStartFailed) as found, breakers.guard("bubblewrap", image):
        pytest.fail("an open breaker let a start through")
    return found.value


def start(breakers: Breakers, image: str | None = None) -> None:
    with breakers.guard("bubblewrap", image):
        pass


def opened(breakers: Breakers, image: str | None = None) -> Breakers:
    for _ in range(FAILURES):
        fail(breakers, image)
    return breakers


def test_five_failures_in_a_row_open_it_and_the_refusal_names_the_last_error(breakers: Breakers):
    error = refused(opened(breakers))
    assert "the disk is on fire" in error.detail and "5 times" in error.detail
    assert error.data["retry_after_s"] == FIRST_S
    assert error.retryable, "it is ours: the rollout is tried again"
    assert breakers.open_by_runtime() == {"bubblewrap": 1}


def test_a_success_in_between_begins_the_count_anew(breakers: Breakers):
    for _ in range(FAILURES - 1):
        fail(breakers)
    start(breakers)
    for _ in range(FAILURES - 1):
        fail(breakers)
    start(breakers)
    assert breakers.status("bubblewrap") == []


def test_when_the_time_is_over_one_start_may_try_and_closes_it(breakers: Breakers, clock: Clock):
    opened(breakers)
    clock.now_s += FIRST_S
    with breakers.guard("bubblewrap", None):
        refused(breakers)  # beside the probe nobody else
    start(breakers)
    assert breakers.open_by_runtime() == {}


def test_a_failed_probe_opens_it_for_twice_as_long_up_to_a_minute(breakers: Breakers, clock: Clock):
    opened(breakers)
    open_s = FIRST_S
    while open_s < LONGEST_S:
        clock.now_s += open_s
        fail(breakers)
        open_s = min(LONGEST_S, 2 * open_s)
        clock.now_s += open_s - 0.01
        refused(breakers)
        clock.now_s += 0.01
        clock.now_s -= open_s
    clock.now_s += LONGEST_S
    fail(breakers)
    assert refused(breakers).data["retry_after_s"] == LONGEST_S


def test_a_cancelled_probe_leaves_the_place_to_the_next(breakers: Breakers, clock: Clock):
    opened(breakers)
    clock.now_s += FIRST_S
    fail(breakers, error=asyncio.CancelledError)
    start(breakers)


def test_a_tasks_own_failures_and_cancels_do_not_count(breakers: Breakers):
    for _ in range(2 * FAILURES):
        fail(breakers, error=lambda: TaskInvalid("no such image"))
        fail(breakers, error=asyncio.CancelledError)
    start(breakers)


def test_what_escapes_from_a_runtime_counts_and_so_does_a_start_that_was_given_up(breakers: Breakers):
    for _ in range(FAILURES - 1):
        fail(breakers, error=lambda: RuntimeError("oops"))
    breakers.failed("bubblewrap", None, "INIT was not done in 1 s")
    assert "INIT was not done" in refused(breakers).detail


def test_one_image_does_not_close_another_out(breakers: Breakers):
    opened(breakers, "broken.sif")
    refused(breakers, "broken.sif")
    start(breakers, "good.sif")
    start(breakers)
    (entry,) = breakers.status("bubblewrap")
    assert (entry["image"], entry["state"], entry["failures"]) == ("broken.sif", "open", FAILURES)
    assert breakers.status("apptainer") == []


def test_how_many_it_remembers_is_bounded(breakers: Breakers):
    for number in range(MOST + 10):
        fail(breakers, f"{number}.sif")
    assert len(breakers.status("bubblewrap")) == MOST
