"""Retries depend on the failure code, are bounded, and have jitter."""

from rollyard.core.failure import CODES
from rollyard.pipeline import retry


def delays(code: str, attempts: int, excused: int = 0, max_attempts: int = 3) -> list[float | None]:
    failure = CODES[code]("why").failure("run")
    return [retry.delay_s(failure, attempt, excused, max_attempts) for attempt in range(1, attempts + 1)]


def test_infrastructure_failures_are_retried_up_to_the_limit():
    first, second, third = delays("sandbox_lost", 3)
    assert first is not None
    assert second is not None
    assert third is None


def test_permanent_failures_are_not_retried():
    for code in ("setup_failed", "turn_limit", "trace_invalid", "tokenizer_mismatch", "lost_to_restarts"):
        assert delays(code, 1) == [None]


def test_an_excused_attempt_does_not_count():
    assert delays("sandbox_lost", 4, excused=1)[2] is not None
    assert delays("sandbox_lost", 4, excused=1)[3] is None


def test_the_wait_grows_and_is_bounded():
    backoff = retry.Backoff(first_s=1, factor=2, most_s=8)
    for tries, plain in enumerate([1, 2, 4, 8, 8, 8], start=1):
        assert 0.75 * plain <= backoff.delay_s(tries) <= 1.25 * plain


def test_every_code_of_the_table_exists_and_is_retryable():
    assert all(CODES[code].retryable for code in retry.BACKOFFS)
