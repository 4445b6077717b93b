"""The circuit breaker opens, probes and closes. The tests control its clock."""

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
    """Makes one start fail. Raises AssertionError if the breaker refused the start instead."""
    raised = error() if error else SandboxStartFailed("the disk is on fire")
    with pytest.raises(type(raised)) as caught, breakers.guard("bubblewrap", image):
        raise raised
    assert caught.value is raised, "the breaker refused the start"


def refused(breakers: Breakers, image: str | None = None) -> RollyardError:
    with pytest.raises(SandboxStartFailed) as caught, breakers.guard("bubblewrap", image):
        pytest.fail("an open breaker let a start through")
    return caught.value


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
    assert error.retryable, "an infrastructure failure: the rollout is retried"
    assert breakers.open_by_runtime() == {"bubblewrap": 1}


def test_a_success_resets_the_count(breakers: Breakers):
    for _ in range(FAILURES - 1):
        fail(breakers)
    start(breakers)
    for _ in range(FAILURES - 1):
        fail(breakers)
    start(breakers)
    assert breakers.status("bubblewrap") == []


def test_after_the_open_time_one_start_is_tried_and_closes_it(breakers: Breakers, clock: Clock):
    opened(breakers)
    clock.now_s += FIRST_S
    with breakers.guard("bubblewrap", None):
        refused(breakers)  # only the probe is admitted
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


def test_after_a_cancelled_probe_the_next_start_is_the_probe(breakers: Breakers, clock: Clock):
    opened(breakers)
    clock.now_s += FIRST_S
    fail(breakers, error=asyncio.CancelledError)
    start(breakers)


def test_task_failures_and_cancellations_do_not_count(breakers: Breakers):
    for _ in range(2 * FAILURES):
        fail(breakers, error=lambda: TaskInvalid("no such image"))
        fail(breakers, error=asyncio.CancelledError)
    start(breakers)


def test_unexpected_exceptions_and_abandoned_starts_count(breakers: Breakers):
    for _ in range(FAILURES - 1):
        fail(breakers, error=lambda: RuntimeError("oops"))
    breakers.failed("bubblewrap", None, "INIT was not done in 1 s")
    assert "INIT was not done" in refused(breakers).detail


def test_a_failing_image_does_not_block_others(breakers: Breakers):
    opened(breakers, "broken.sif")
    refused(breakers, "broken.sif")
    start(breakers, "good.sif")
    start(breakers)
    (entry,) = breakers.status("bubblewrap")
    assert (entry["image"], entry["state"], entry["failures"]) == ("broken.sif", "open", FAILURES)
    assert breakers.status("apptainer") == []


def test_the_failures_of_one_owner_do_not_stop_anothers_starts(breakers: Breakers):
    for owner in ("a", "b"):
        for _ in range(FAILURES):
            breakers.failed("bubblewrap", None, f"too few processes for {owner}", owner)
    with pytest.raises(SandboxStartFailed), breakers.guard("bubblewrap", None, "a"):
        pytest.fail("an open breaker let a start through")
    with breakers.guard("bubblewrap", None, "c"):
        pass
    assert breakers.open_by_runtime() == {"bubblewrap": 1}
    assert [entry["image"] for entry in breakers.status("bubblewrap")] == [None]
    (shown,) = breakers.status("bubblewrap", "b")
    assert shown["last_error"] == "too few processes for b" and breakers.status("bubblewrap", "c") == []


def test_the_number_of_failing_pairs_is_bounded(breakers: Breakers):
    for number in range(MOST + 10):
        fail(breakers, f"{number}.sif")
    assert len(breakers.status("bubblewrap")) == MOST
