"""Connects the event loop and the worker thread: registers the open calls, and pauses, resumes and aborts them.

Everything here runs in the event loop, except the functions passed to the worker, which run in its thread. The loop
decides when a call is over; tokens that the worker samples for it afterwards are ignored. So an abort never waits for
a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

from rollyard.embedded.batching import BatchedSequence, Batcher, SampledToken
from rollyard.embedded.calls import Call
from rollyard.embedded.requests import Refused
from rollyard.embedded.worker import Worker

T = TypeVar("T")

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES: Mapping[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}


class CallRegistry:
    """The calls of one engine, and the worker that runs them."""

    def __init__(self, batcher: Batcher) -> None:
        self.worker = Worker(batcher, self._on_tokens, self._on_failed)
        self.is_paused = False
        self.ended = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._max_calls = batcher.settings.max_calls
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, Call] = {}  # open calls, by identity
        self._by_job: dict[BatchedSequence, Call] = {}
        self._deferred: list[Call] = []  # arrived during a pause
        self._change = asyncio.Event()  # set when a call ends, and on resume

    @property
    def deferred(self) -> int:
        return len(self._deferred)

    async def run_in_worker(self, order: Callable[[Batcher], T]) -> T:
        """Runs `order` in the worker thread, between two steps."""
        return await asyncio.wrap_future(self.worker.do(order))

    # --- one call

    def start(self, call: Call) -> None:
        most = self._max_calls
        if len(self._calls) >= most and sum(not one.is_over for one in self._calls.values()) >= most:
            raise Refused(f"{most} calls are already running or waiting", 503)
        self._calls[id(call)] = call
        if self.is_paused:
            self._deferred.append(call)
        else:
            self._submit(call)

    def end(self, call: Call) -> None:
        """Called exactly once for each call, however it ends."""
        call.abort()
        del self._calls[id(call)]
        self.ended[call.finish or "error"] += 1
        if call in self._deferred:
            self._deferred.remove(call)
        else:
            self.worker.do(lambda batcher: self._drop(batcher, call))
        self._change.set()

    def abort(self, names: frozenset[str] | None = None) -> None:
        """Aborts the calls with these names, or all if None. They are answered immediately."""
        for call in list(self._calls.values()):
            if names is None or call.known_as in names:
                call.abort()

    # --- all calls

    async def pause(self, mode: PauseMode) -> None:
        """Returns when no step is running and none will start, or when it is resumed meanwhile."""
        self.is_paused = True
        if mode == "abort":
            self.abort()
        while mode == "wait" and self.is_paused and len(self._calls) > len(self._deferred):
            self._change.clear()
            await self._change.wait()
        if self.is_paused:
            await asyncio.wrap_future(self.worker.pause())

    async def resume(self) -> None:
        self.is_paused = False
        deferred, self._deferred = self._deferred, []
        for call in deferred:
            self._submit(call)
        self._change.set()
        await asyncio.wrap_future(self.worker.resume())

    # --- to and from the worker's thread

    def _submit(self, call: Call) -> None:
        def add(batcher: Batcher) -> None:
            call.job = job = batcher.add(call.request)
            self._loop.call_soon_threadsafe(self._by_job.__setitem__, job, call)

        self.worker.do(add)

    def _drop(self, batcher: Batcher, call: Call) -> None:
        if call.job is not None:
            batcher.drop(call.job)
            self._loop.call_soon_threadsafe(self._by_job.pop, call.job, None)

    def _on_tokens(self, steps: Sequence[SampledToken]) -> None:
        self._loop.call_soon_threadsafe(self._take, steps)

    def _take(self, steps: Iterable[SampledToken]) -> None:
        for step in steps:
            if step.job in self._by_job:
                self._by_job[step.job].take(step)

    def _on_failed(self, jobs: Sequence[BatchedSequence], error: str) -> None:
        self._loop.call_soon_threadsafe(self._fail, jobs, error)

    def _fail(self, jobs: Iterable[BatchedSequence], error: str) -> None:
        for job in jobs:
            if job in self._by_job:
                self._by_job[job].fail(error)
