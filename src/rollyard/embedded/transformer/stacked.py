# pyright: reportMissingImports=false
"""Keeps the keys and values of one sequence in one tensor for all layers.

`llama.py` gets the cache of all layers by a handful of calls, because Python code that runs for each layer and sequence
of a step takes as long as the arithmetic of a small model. `attention.Kv` is the equivalent for models whose layers are
not known in advance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollyard.embedded.transformer.attention import capacity_for


@dataclass(frozen=True, slots=True)
class Layout:
    """The dimensions of a cache."""

    layers: int
    heads: int
    head_size: int
    max_tokens: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.heads * self.head_size * 4

    def empty(self, capacity: int) -> Tensor:
        return torch.empty((2 * self.layers, self.heads, capacity, self.head_size), dtype=torch.float32)


class StackedKv:
    """One sequence's cache: a tensor of (2 × layers, heads, capacity, size), keys and values of a layer in turn."""

    def __init__(self, layout: Layout) -> None:
        self.length = 0
        self.capacity = 0
        self._layout = layout
        self._whole = layout.empty(0)

    def capacity_for(self, tokens: int) -> int:
        """Returns the capacity that the cache would have after `reserve(tokens)`."""
        return capacity_for(tokens, self.capacity, self._layout.max_tokens)

    def reserve(self, tokens: int) -> None:
        capacity = self.capacity_for(tokens)
        if capacity != self.capacity:
            self.capacity = capacity
            self._whole = self._grown(capacity, self.length)

    def places(self, new: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns the views into which `new` tokens are written, and the views of all tokens including them: keys and
        values of each layer in turn. The latter have a first dimension of 1."""
        written = self._whole.narrow(2, self.length, new)
        return written.unbind(0), self._whole.narrow(2, 0, self.length + new).split(1)

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def free(self) -> None:
        """Frees the memory. The cache is not used again."""
        self._whole = self._layout.empty(0)
        self.length = self.capacity = 0

    def cut(self, length: int) -> None:
        """Keeps only the first `length` tokens."""
        self.length = min(self.length, length)

    def copy(self, length: int, room: int) -> StackedKv:
        """Returns a new cache with the first `length` tokens and a capacity of at least `room`."""
        copied = StackedKv(self._layout)
        copied.length = min(length, self.length)
        copied.capacity = copied.capacity_for(max(room, copied.length))
        copied._whole = self._grown(copied.capacity, copied.length)
        return copied

    def _grown(self, capacity: int, length: int) -> Tensor:
        grown = self._layout.empty(capacity)
        grown[:, :, :length] = self._whole[:, :, :length]
        return grown
