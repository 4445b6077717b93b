"""The event loop of a synchronous client: a thread of its own, so that it also works inside a running loop.

`Client` and its handles (`_sync.py`) run the coroutines of the asynchronous client on it. Callbacks (`on_end`,
`on_event`) are called in that thread, one at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import TypeVar

T = TypeVar("T")


class ClientLoop:
    """An event loop in a thread of its own, from `start` to `stop`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing: asyncio.Task[None] | None = None  # of an iterator that was garbage-collected

    @property
    def is_running(self) -> bool:
        return self._loop is not None

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollyard-client", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Iterators that are still open are closed first."""
        assert self._loop is not None and self._thread is not None
        try:
            self.run(self._loop.shutdown_asyncgens())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Runs a coroutine on the loop and returns its result."""
        if self._loop is None:
            work.close()
            raise RuntimeError("the client is not open: use it in `with`")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C here must not leave the call running in the thread
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The items of an asynchronous generator, each awaited on the loop."""

        async def following() -> tuple[T] | None:
            try:
                return (await anext(items),)
            except StopAsyncIteration:
                return None

        async def close() -> None:
            await items.aclose()  # type: ignore[attr-defined]  # all iterators of the client are generators

        try:
            while (item := self.run(following())) is not None:
                yield item[0]
        finally:
            if threading.current_thread() is self._thread:  # called by the garbage collector: waiting would deadlock
                self._closing = asyncio.get_running_loop().create_task(close())
            elif self._loop is not None:
                self.run(close())
