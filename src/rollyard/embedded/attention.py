# pyright: reportMissingImports=false
"""The keys and values of each sequence, and attention over sequences of different lengths in one forward pass.

The tokens of a step lie behind one another in a batch of one ("ragged"), so that every matrix multiplication is over
all of them; only attention looks at one sequence at a time, through a function that transformers calls by name. There
is no padding and no mask between sequences, so nothing of one sequence can reach another. That is what a CPU wants; for
a GPU see `paged.py`.

Invariant: `Kv.length` tokens of a sequence are in its cache, the same number in every layer, between two forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollyard.embedded.paged import LayerShape, Paged, paged_attention

NAME = "rollyard"
BLOCK_TOKENS = 128  # a cache grows by whole blocks, and by a quarter of itself: appending costs little on average


def capacity_for(tokens: int, capacity: int, max_tokens: int) -> int:
    """What a cache of some capacity grows to when so many tokens have to fit."""
    if tokens <= capacity:
        return capacity
    wanted = max(tokens, capacity + capacity // 4)
    return max(tokens, min(max_tokens, -(-wanted // BLOCK_TOKENS) * BLOCK_TOKENS))


class Kv:
    """One sequence's cache. Tensors are (heads, capacity, dim), made when a layer first writes."""

    def __init__(self, max_tokens: int) -> None:
        self.length = 0
        self.capacity = 0
        self._max_tokens = max_tokens
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def capacity_for(self, tokens: int) -> int:
        """What it will have room for when so many tokens have to fit."""
        return capacity_for(tokens, self.capacity, self._max_tokens)

    def reserve(self, tokens: int) -> None:
        capacity = self.capacity_for(tokens)
        if capacity == self.capacity:
            return
        self.capacity = capacity
        for layer, pair in self._layers.items():  # one layer after the other: little is held twice
            self._layers[layer] = (self._grown(pair[0]), self._grown(pair[1]))

    def put(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new tokens of a layer behind what is there; returns all keys and values of it, (heads, n, dim)."""
        new = key.shape[1]
        end = self.length + new
        if layer not in self._layers:
            self._layers[layer] = (self._empty(key), self._empty(value))
        keys, values = self._layers[layer]
        # by narrow, not by index: this runs for each layer and sequence of a step, and costs half so
        keys.narrow(1, self.length, new).copy_(key)
        values.narrow(1, self.length, new).copy_(value)
        return keys.narrow(1, 0, end), values.narrow(1, 0, end)

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def free(self) -> None:
        """Its memory is wanted by somebody else; it is not used again."""
        self._layers.clear()
        self.length = self.capacity = 0

    def cut(self, length: int) -> None:
        """Forgets all but the first tokens."""
        self.length = min(self.length, length)

    def copy(self, length: int, room: int) -> Kv:
        """The first tokens, in a cache of their own with room for so many."""
        made = Kv(self._max_tokens)
        made.length = min(length, self.length)
        made.capacity = made.capacity_for(max(room, made.length))
        for layer, (keys, values) in self._layers.items():
            made._layers[layer] = (made._grown(keys), made._grown(values))
        return made

    @property
    def bytes_per_token(self) -> int:
        size = sum(t.element_size() * t.shape[0] * t.shape[2] for pair in self._layers.values() for t in pair)
        return max(1, size)

    @property
    def shapes(self) -> dict[int, LayerShape]:
        return {n: LayerShape(k.shape[0], k.shape[2], v.shape[2]) for n, (k, v) in self._layers.items()}

    def _empty(self, like: Tensor) -> Tensor:
        return torch.empty((like.shape[0], self.capacity, like.shape[2]), dtype=like.dtype, device=like.device)

    def _grown(self, old: Tensor) -> Tensor:
        made = self._empty(old)
        made[:, : self.length] = old[:, : self.length]
        return made


@dataclass(frozen=True, slots=True)
class Row:
    """Where a sequence's new tokens lie in the step, [start, end), and its cache."""

    kv: Kv
    start: int
    end: int


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    ragged_rows: Sequence[Row] = (),
    rollyard_paged: Paged | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: tensors are (1, heads, tokens of the step, dim), or a padded batch."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise TypeError("its attention takes more than queries, keys and values (softcap, sinks)")
    if rollyard_paged is not None:
        mixed = paged_attention(module.layer_idx, query, key, value, scaling, sliding_window, rollyard_paged)
        return mixed.transpose(1, 2).contiguous(), None
    sizes = [row.end - row.start for row in ragged_rows]
    parts = zip(query.split(sizes, 2), key[0].split(sizes, 1), value[0].split(sizes, 1), strict=True)
    made: list[Tensor] = []
    for row, (queries, new_keys, new_values) in zip(ragged_rows, parts, strict=True):
        keys, values = row.kv.put(module.layer_idx, new_keys, new_values)
        made.append(attend(queries, keys[None], values[None], scaling, sliding_window))
    return torch.cat(made, dim=1), None


def attend(query: Tensor, keys: Tensor, values: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """The new tokens, the last of the sequence, over all of it: causal, and no further back than the window.
    Given (1, heads, new, size); made (1, new, heads, size). Sums are in float32, whatever the dtype."""
    (heads, new, size), (kv_heads, total) = query.shape[1:], keys.shape[1:3]
    if window is not None and total > window + new - 1:  # what no new token can see
        keys, values = keys[:, :, total - (window + new - 1) :], values[:, :, total - (window + new - 1) :]
        total = window + new - 1
    groups = heads // kv_heads
    if new == total and (window is None or total <= window):
        made = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        return made.transpose(1, 2)
    mask = None  # a single token sees all that is left
    if new > 1:
        place = torch.arange(total - new, total, device=query.device)[:, None]
        column = torch.arange(total, device=query.device)[None]
        mask = column <= place
        if window is not None:
            mask &= column > place - window
        mask = mask.repeat(groups, 1)
    # Query heads that share a key head are to that head so many queries more: one call, and no key is repeated. For one
    # token on a CPU that takes half of what it took by hand, and grouped queries with a mask have no fast kernel.
    grouped = query.reshape(1, kv_heads, groups * new, size)
    made = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return made.reshape(1, heads, new, values.shape[3]).transpose(1, 2)
