"""Starts a task immediately instead of in the next iteration of the event loop.

An iteration takes as long as everything else that is ready: under load, 0.2 ms for each task that a request passes
through. From Python 3.12 on, asyncio can do this itself.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def start_now(coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
    """Runs the coroutine as a new task until it first waits; the event loop runs the rest."""
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12):
        return asyncio.Task(coroutine, loop=loop, name=name, eager_start=True)
    context = contextvars.copy_context()
    started = _StartedCoroutine(coroutine)
    task = loop.create_task(started, name=name, context=context)
    caller = asyncio.current_task()
    if caller is not None:
        asyncio._leave_task(loop, caller)  # type: ignore[attr-defined]  # documented for extensions of asyncio
    asyncio._enter_task(loop, task)  # type: ignore[attr-defined]
    try:
        context.run(started.begin)
    finally:
        asyncio._leave_task(loop, task)  # type: ignore[attr-defined]
        if caller is not None:
            asyncio._enter_task(loop, caller)  # type: ignore[attr-defined]
    return task


class _StartedCoroutine(Coroutine[Any, Any, T]):
    """A coroutine whose first step has already run. The task's own first step returns the result of that step."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._waits_for: Any = None
        self._ended: BaseException | None = None
        self._is_delivered = False  # the task has received the result of the first step

    def begin(self) -> None:
        try:
            self._waits_for = self._coroutine.send(None)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # including StopIteration, which carries the result
            self._ended = error

    def send(self, value: Any) -> Any:
        if self._is_delivered:
            return self._coroutine.send(value)
        self._is_delivered = True
        if self._ended is not None:
            raise self._ended
        waits_for, self._waits_for = self._waits_for, None
        if waits_for is not None:
            waits_for._asyncio_future_blocking = True  # as if it had just been yielded
        return waits_for

    def throw(self, *error: Any) -> Any:
        self._is_delivered = True
        if self._ended is not None:  # it ended before it could be cancelled
            raise self._ended
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise RuntimeError("only a task may run this coroutine")
