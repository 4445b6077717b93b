"""A task that begins at once is a task like any other."""

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest
import uvloop

from rollyard.core.eager import start_now

WHO = contextvars.ContextVar("who", default="nobody")


async def test_it_has_run_to_where_it_waits_before_the_caller_goes_on():
    seen: list[str] = []

    async def work() -> str:
        seen.append("begun")
        await asyncio.sleep(0)
        seen.append("went on")
        return "done"

    task = start_now(work())
    assert seen == ["begun"]
    assert await task == "done"
    assert seen == ["begun", "went on"]


async def test_one_that_never_waits_gives_its_result():
    async def work() -> int:
        return 7

    assert await start_now(work()) == 7


async def test_what_it_raises_at_once_is_for_whoever_awaits_it():
    async def work() -> None:
        raise ValueError("no")

    task = start_now(work())
    with pytest.raises(ValueError, match="no"):
        await task


async def test_what_it_raises_later_too():
    async def work() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await start_now(work())


async def test_it_waits_for_a_future():
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> int:
        return await future + await asyncio.sleep(0, 1)

    task = start_now(work())
    future.set_result(3)
    assert await task == 4


async def test_a_future_that_ended_in_between_is_seen():
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> int:
        return await future

    task = start_now(work())
    future.set_result(3)
    await asyncio.sleep(0)
    assert await task == 3


async def test_inside_it_is_the_current_task_and_afterwards_the_caller_is_again():
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


async def test_from_a_callback_there_is_no_caller():
    made: asyncio.Future[asyncio.Task[str]] = asyncio.get_running_loop().create_future()

    async def work() -> str:
        async with asyncio.timeout(90):
            await asyncio.sleep(0)
        return "done"

    asyncio.get_running_loop().call_soon(lambda: made.set_result(start_now(work())))
    assert await (await made) == "done"
    assert asyncio.current_task() is not None


async def test_its_context_is_its_own():
    async def work() -> str:
        WHO.set("inside")
        await asyncio.sleep(0)
        return WHO.get()

    WHO.set("outside")
    task = start_now(work())
    assert WHO.get() == "outside"
    assert await task == "inside"


async def test_cancelled_before_the_loop_came_to_it_it_cleans_up():
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


async def test_cancelled_later_it_cleans_up():
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


async def test_a_timeout_around_its_first_wait_holds():
    async def work() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await start_now(work())


@asynccontextmanager
async def _held(log: list[str]) -> AsyncGenerator[None, None]:
    log.append("in")
    try:
        yield
    finally:
        await asyncio.sleep(0)
        log.append("out")


async def test_a_context_that_was_entered_at_once_is_left():
    log: list[str] = []

    async def work() -> None:
        async with _held(log):
            await asyncio.sleep(0)

    await start_now(work())
    assert log == ["in", "out"]


_ALL = [value for name, value in list(globals().items()) if name.startswith("test_")]


@pytest.mark.parametrize("test", _ALL, ids=lambda test: test.__name__)
def test_so_it_is_with_uvloop(test: Callable[[], Coroutine[None, None, None]]):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
