# pyright: reportMissingImports=false
"""What a GPU is told, recorded once for each size as a CUDA graph and played again.

A step of a small model is many hundred small orders; giving them takes longer than doing them. On the CPU there is
nothing to record, and everything is done as it is.
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
    """Whoever launches something of their own says where: else it is the first GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Graphs:
    """See the module. A size that cannot be recorded is done as it is, from then on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[Hashable, tuple[Any, Callable[[], Any]]] = {}
        self._memory: Any = None
        self._stream: Any = None  # one for all: memory is shared only within a stream
        self._unrecorded: set[Hashable] = set()

    def of(self, size: Hashable, make: Callable[[], S], act: Callable[[S], R]) -> tuple[S, Callable[[], R]]:
        """What is worked on, to be filled before it is played, and what plays it once. `make` gives it as it harms
        nobody: recording plays it. What playing returns is overwritten by whatever is played next."""
        is_new = size not in self._made and size not in self._unrecorded
        if is_new and self._device.type == "cuda":
            try:
                with torch.cuda.stream(torch.cuda.current_stream(self._device)):  # which a failure might leave changed
                    self._made[size] = self._record(make, act)
            except RuntimeError as error:  # the model waits for the GPU in its own code, or memory is short
                log.warning("a step cannot be recorded as a CUDA graph", extra={"error": str(error).splitlines()[0]})
                self._unrecorded.add(size)
                if isinstance(error, torch.OutOfMemoryError):
                    self._made.clear()
                    self._memory = None
                torch.cuda.synchronize(self._device)
        if size in self._made:
            return self._made[size]
        made = make()
        return made, lambda: act(made)

    def _record(self, make: Callable[[], S], act: Callable[[S], R]) -> tuple[S, Callable[[], R]]:
        given = make()
        self._stream = stream = self._stream or torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            act(given)  # libraries make their plans in a first run
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            made = act(given)
        self._memory = self._memory or graph.pool()

        def play() -> R:
            graph.replay()
            return made

        return given, play
