"""The objects that TRL's AsyncGRPOTrainer uses: the buffer of samples, and the weight transfer."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol


class Buffer(queue.Queue[Any]):
    """Filled by a coroutine, emptied by the trainer's thread. Bounded: the coroutine waits without a thread or a timer.

    `given` and `taken` count samples.
    """

    def __init__(self, maxsize: int) -> None:
        super().__init__(maxsize)
        self.added = self.taken = 0
        self._room = asyncio.Event()
        self._on_taken: Callable[[], object] | None = None

    @contextlib.contextmanager
    def filled_here(self) -> Generator[None, None, None]:
        """Lets coroutines of this loop fill the buffer while the context is open."""
        loop, room = asyncio.get_running_loop(), asyncio.Event()
        self._room, self._on_taken = room, lambda: loop.call_soon_threadsafe(room.set)
        try:
            yield
        finally:
            self._on_taken = None

    async def until(self, is_enough: Callable[[], bool]) -> None:
        """Waits until `is_enough` returns true; checks it after each sample that is taken."""
        while True:
            self._room.clear()
            if is_enough():
                return
            await self._room.wait()

    async def offer(self, item: object) -> None:
        """Waits for space, then adds the item. There must be only one such coroutine."""
        await self.until(lambda: not self.full())
        self.put_nowait(item)
        self.added += 1

    def _get(self) -> Any:
        item = super()._get()  # type: ignore[misc]  # the hook of queue.Queue
        self.taken += 1
        if (notify := self._on_taken) is not None:
            with contextlib.suppress(RuntimeError):  # its loop has just ended
                notify()
        return item


class WeightTransfer(Protocol):
    """Sends weights to the engines: TRL's WeightTransferProtocol without pause and resume, which Rollyard does."""

    def init_weight_transfer(self) -> None: ...

    def send_weights(self, iterator: Iterator[Any]) -> None: ...

    def destroy(self) -> None: ...


class RollyardWeights:
    """TRL's weight transfer with Rollyard's pause around it.

    TRL calls pause, send_weights, resume, `worker.update_model_version(n)`, in this order. The last one resumes
    Rollyard, since only it gets the number. Rollyard pauses and resumes the engines itself: if `inner` did, an engine
    would continue with new weights under the old number.
    """

    def __init__(self, pause: Callable[[], object], inner: WeightTransfer | None) -> None:
        self._pause = pause
        self._inner = inner

    def init_weight_transfer(self) -> None:
        if self._inner is not None:
            self._inner.init_weight_transfer()

    def pause(self) -> None:
        self._pause()

    def send_weights(self, iterator: Iterator[Any]) -> None:
        if self._inner is not None:
            self._inner.send_weights(iterator)
        else:
            for _ in iterator:  # each parameter is gathered together with the other ranks
                pass

    def resume(self) -> None:
        """Does nothing: `update_model_version` resumes."""

    def destroy(self) -> None:
        if self._inner is not None:
            self._inner.destroy()
