"""A task that starts immediately behaves like any other task."""

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest
import uvloop

from rollyard.core.eager import start_now

WHO = contextvars.ContextVar("who", default="no one")


async def test_a_task_runs_up_to_its_first_wait_before_the_caller_continues():
    log: list[str] = []

    async def work() -> str:
        log.append("started")
        await asyncio.sleep(0)
        log.append("continued")
        return "done"

    task = start_now(work())
    assert log == ["started"]
    assert await task == "done"
    assert log == ["started", "continued"]


async def test_a_task_that_never_waits_returns_its_result():
    async def work() -> int:
        return 7

    assert await start_now(work()) == 7


async def test_an_immediate_exception_is_raised_where_the_task_is_awaited():
    async def work() -> None:
        raise ValueError("no")

    task = start_now(work())
    with pytest.raises(ValueError, match="no"):
        await task


async def test_a_later_exception_is_raised_where_the_task_is_awaited():
    async def work() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await start_now(work())


async def test_a_task_waits_for_a_future():
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> int:
        return await future + await asyncio.sleep(0, 1)

    task = start_now(work())
    future.set_result(3)
    assert await task == 4


async def test_a_future_that_ends_before_the_loop_runs_the_task_is_not_missed():
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> int:
        return await future

    task = start_now(work())
    future.set_result(3)
    await asyncio.sleep(0)
    assert await task == 3


async def test_the_current_task_is_the_new_task_inside_and_the_caller_afterwards():
    inside: list[asyncio.Task[None] | None] = []

    async def work() -> None:
        inside.append(asyncio.current_task())
        await asyncio.sleep(0)
        inside.append(asyncio.current_task())

    caller = asyncio.current_task()
    task = start_now(work(), name="mine")
    assert asyncio.current_task() is caller
    assert task.get_name() == "mine"
    await task
    assert inside == [task, task]


async def test_a_task_can_be_started_from_a_callback():
    started: asyncio.Future[asyncio.Task[str]] = asyncio.get_running_loop().create_future()

    async def work() -> str:
        async with asyncio.timeout(90):
            await asyncio.sleep(0)
        return "done"

    asyncio.get_running_loop().call_soon(lambda: started.set_result(start_now(work())))
    assert await (await started) == "done"
    assert asyncio.current_task() is not None


async def test_a_task_has_its_own_context():
    async def work() -> str:
        WHO.set("inside")
        await asyncio.sleep(0)
        return WHO.get()

    WHO.set("outside")
    task = start_now(work())
    assert WHO.get() == "outside"
    assert await task == "inside"


async def test_a_task_cancelled_before_the_loop_runs_it_cleans_up():
    cleaned: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("yes")

    task = start_now(work())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == ["yes"]


async def test_a_task_cancelled_later_cleans_up():
    cleaned: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(0)
            await asyncio.Event().wait()
        finally:
            cleaned.append("yes")

    task = start_now(work())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == ["yes"]


async def test_a_timeout_around_the_first_wait_works():
    async def work() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await start_now(work())


@asynccontextmanager
async def _logged_context(log: list[str]) -> AsyncGenerator[None, None]:
    log.append("in")
    try:
        yield
    finally:
        await asyncio.sleep(0)
        log.append("out")


async def test_a_context_manager_entered_in_the_first_step_is_exited():
    log: list[str] = []

    async def work() -> None:
        async with _logged_context(log):
            await asyncio.sleep(0)

    await start_now(work())
    assert log == ["in", "out"]


_ALL = [value for name, value in list(globals().items()) if name.startswith("test_")]


@pytest.mark.parametrize("test", _ALL, ids=lambda test: test.__name__)
def test_eager_tasks_work_the_same_with_uvloop(test: Callable[[], Coroutine[None, None, None]]):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
