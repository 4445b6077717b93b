"""The one thread that runs the model. Other code submits functions that it runs between two steps.

Invariants. Only this thread, or the holder of `weights`, touches the batcher and the model. Submitted functions run in
the order of submission. While it is paused no step starts; when the future of `pause` is done, no step is running. A
step that fails (for example, out of memory) fails the running sequences, and the thread continues.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from rollyard.embedded.batching import BatchedSequence, Batcher, SampledToken

log = logging.getLogger("rollyard.embedded")
T = TypeVar("T")

SWITCH_S = 0.0005  # Python's default, 5 ms, lets the event loop delay a step for as long as a step takes on a GPU

OnTokens = Callable[[Sequence[SampledToken]], None]
OnFailed = Callable[[Sequence[BatchedSequence], str], None]


class Worker:
    """Runs the batcher's steps in a thread. Calls `on_tokens` and `on_failed` in that thread."""

    def __init__(self, batcher: Batcher, on_tokens: OnTokens, on_failed: OnFailed) -> None:
        self.is_paused = False
        self._batcher = batcher
        self._on_tokens = on_tokens
        self._on_failed = on_failed
        self._turn = threading.Condition()
        self._orders: deque[Callable[[], None]] = deque()
        self._is_busy = False  # the thread is using the batcher
        self._is_ending = False
        self._writers = 0
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="rollyard-engine", daemon=True)

    def start(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread.start()

    def stop(self) -> None:
        """Waits for the current step. Functions submitted before still run."""
        with self._turn:
            self._is_ending = True
            self._turn.notify_all()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def do(self, order: Callable[[Batcher], T]) -> Future[T]:
        """Runs `order` in the thread between two steps, also while paused."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(order(self._batcher))
            except BaseException as error:
                future.set_exception(error)

        with self._turn:
            if self._is_ending:
                raise RuntimeError("the engine has ended")
            self._orders.append(run)
            self._turn.notify_all()
        return future

    def pause(self) -> Future[None]:
        return self.do(lambda _: self._set_paused(True))

    def resume(self) -> Future[None]:
        return self.do(lambda _: self._set_paused(False))

    @contextmanager
    def weights(self, version: str | None = None) -> Generator[None, None, None]:
        """While it is held, nothing is sampled and the holding thread may write weights. Afterwards all caches of the
        old weights are cleared, and new tokens have the version, unless the block raised. Blocks until the current
        step is done."""
        with self._writing:
            with self._turn:
                self._writers += 1
            try:
                with self._turn:
                    self._turn.wait_for(lambda: not self._is_busy)
                try:
                    yield
                finally:  # also after a failure: part of the weights may have been written
                    self._batcher.clear(with_running=True)
                if version is not None:
                    self._batcher.version = version
            finally:
                with self._turn:
                    self._writers -= 1
                    self._turn.notify_all()

    # --- the thread

    def _run(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: not self._writers and (self._is_ending or self._has_something()))
                if self._is_ending and not self._orders:
                    return
                orders = [*self._orders]
                self._orders.clear()
                self._is_busy = True
            try:
                for order in orders:
                    order()
                if not self.is_paused and self._batcher.has_work and not self._is_ending:
                    self._step()
            finally:
                with self._turn:
                    self._is_busy = False
                    self._turn.notify_all()

    def _has_something(self) -> bool:
        return bool(self._orders) or (not self.is_paused and self._batcher.has_work)

    def _step(self) -> None:
        try:
            steps = self._batcher.step()
        except Exception as error:
            failed = self._batcher.give_up()
            log.exception("a step of the model failed", extra={"sequences": len(failed)})
            self._on_failed(failed, f"{type(error).__name__}: {error}")
            try:
                self._batcher.model.forget_numbers()
            except Exception:  # a GPU that has failed may fail at everything; the next step reports it
                log.exception("cannot clear the cache after a failed step")
            return
        if steps:
            self._on_tokens(steps)

    def _set_paused(self, is_paused: bool) -> None:
        self.is_paused = is_paused
