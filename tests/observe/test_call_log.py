"""The log of RUN's calls: its times, its order and its bound."""

from rollyard.observe.call_log import CallLog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_times_count_from_the_start_and_a_running_call_has_no_end_until_run_is_over() -> None:
    clock = Clock()
    log = CallLog(clock)
    clock.now = 101.5
    model = log.begin("model", 0, "e1")
    clock.now = 103.0
    model.tokens = 7
    log.end(model)
    tool = log.begin("tool", 0, "x" * 1000)
    clock.now = 104.0
    running = log.info(is_over=False)
    assert running == {"calls": [["model", 0, 1.5, 3.0, "e1", 7], ["tool", 0, 3.0, None, "x" * 100, 0]]}
    assert log.info()["calls"][1][3] == 4.0  # type: ignore[index]
    log.end(tool, is_error=True)
    assert log.info()["call_errors"] == [1]


def test_the_middle_of_many_calls_is_dropped_and_counted() -> None:
    log = CallLog(most=10)
    for number in range(100):
        log.end(log.begin("tool", number, "sh"), is_error=number in (3, 50, 97))
    info = log.info()
    assert [call[1] for call in info["calls"]] == [*range(5), *range(95, 100)]  # type: ignore[union-attr,index]
    assert (info["calls_dropped"], info["call_errors"]) == (90, [3, 7])
