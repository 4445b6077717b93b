# pyright: reportMissingImports=false
"""The keys and values of one sequence in one tensor, all layers behind one another.

What `llama.py` needs of a cache, it gets for all layers by a handful of calls: Python that runs for each layer and
sequence of a step takes as long as the arithmetic of a small model. `attention.Kv` is the same for a model whose layers
are not known beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollyard.embedded.attention import capacity_for


@dataclass(frozen=True, slots=True)
class Layout:
    """What a cache is made of."""

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
        """What it will have room for when so many tokens have to fit."""
        return capacity_for(tokens, self.capacity, self._layout.max_tokens)

    def reserve(self, tokens: int) -> None:
        capacity = self.capacity_for(tokens)
        if capacity != self.capacity:
            self.capacity = capacity
            self._whole = self._grown(capacity, self.length)

    def places(self, new: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Where so many new tokens go, and all that is there with them: keys and values of each layer in turn, the
        latter with a first dimension of 1."""
        written = self._whole.narrow(2, self.length, new)
        return written.unbind(0), self._whole.narrow(2, 0, self.length + new).split(1)

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def free(self) -> None:
        """Frees its memory. It is not used again."""
        self._whole = self._layout.empty(0)
        self.length = self.capacity = 0

    def cut(self, length: int) -> None:
        """Forgets all but the first tokens."""
        self.length = min(self.length, length)

    def copy(self, length: int, room: int) -> StackedKv:
        """The first tokens, in a cache of their own with room for so many."""
        made = StackedKv(self._layout)
        made.length = min(length, self.length)
        made.capacity = made.capacity_for(max(room, made.length))
        made._whole = self._grown(made.capacity, made.length)
        return made

    def _grown(self, capacity: int, length: int) -> Tensor:
        made = self._layout.empty(capacity)
        made[:, :, :length] = self._whole[:, :, :length]
        return made
