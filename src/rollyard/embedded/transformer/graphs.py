# pyright: reportMissingImports=false
"""Records the work of a step as a CUDA graph, once for each size, and replays it.

A step of a small model consists of many hundred small kernels, and launching them takes longer than running them. On a
CPU nothing is recorded, and the work runs directly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

log = logging.getLogger("rollyard.embedded")
S = TypeVar("S")
R = TypeVar("R")


def at_device(device: torch.device) -> AbstractContextManager[object]:
    """Selects the device for custom kernel launches, which use the first GPU otherwise."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Graphs:
    """The recorded graphs of one device. A size that cannot be recorded runs directly from then on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded: dict[Hashable, tuple[Any, Callable[[], Any]]] = {}
        self._memory: Any = None
        self._stream: Any = None  # one for all graphs: memory is shared only within a stream
        self._unrecorded: set[Hashable] = set()

    def of(self, size: Hashable, make: Callable[[], S], act: Callable[[S], R]) -> tuple[S, Callable[[], R]]:
        """Returns the input of `act`, to be filled before each replay, and a function that replays `act` once. `make`
        returns an input that is safe to run: recording runs it. The next replay of any graph overwrites the result."""
        is_new = size not in self._recorded and size not in self._unrecorded
        if is_new and self._device.type == "cuda":
            try:
                # restores the current stream after a failure
                with torch.cuda.stream(torch.cuda.current_stream(self._device)):
                    self._recorded[size] = self._record(make, act)
            except RuntimeError as error:  # the model's code synchronizes with the GPU, or memory is short
                log.warning("a step cannot be recorded as a CUDA graph", extra={"error": str(error).splitlines()[0]})
                self._unrecorded.add(size)
                if isinstance(error, torch.OutOfMemoryError):
                    self._recorded.clear()
                    self._memory = None
                torch.cuda.synchronize(self._device)
        if size in self._recorded:
            return self._recorded[size]
        inputs = make()
        return inputs, lambda: act(inputs)

    def _record(self, make: Callable[[], S], act: Callable[[S], R]) -> tuple[S, Callable[[], R]]:
        inputs = make()
        self._stream = stream = self._stream or torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            act(inputs)  # libraries initialize in a first run
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            result = act(inputs)
        self._memory = self._memory or graph.pool()

        def play() -> R:
            graph.replay()
            return result

        return inputs, play
