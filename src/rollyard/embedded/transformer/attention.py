# pyright: reportMissingImports=false
"""Per-sequence key/value caches, and attention over sequences of different lengths in one forward pass.

The tokens of a step are concatenated in a batch of one ("ragged"), so that every matrix multiplication covers all of
them. Only attention processes one sequence at a time, through a function that transformers calls by name. There is no
padding and no mask between sequences, so sequences cannot affect each other. This layout is fast on a CPU; for GPUs see
`paged.py`.

Invariant: between two forward passes, a cache contains `Kv.length` tokens of its sequence in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollyard.embedded.transformer.paged import LayerShape, Paged, paged_attention

NAME = "rollyard"
BLOCK_TOKENS = 128  # a cache grows by whole blocks and by at least a quarter: appending is cheap on average


def capacity_for(tokens: int, capacity: int, max_tokens: int) -> int:
    """Returns the capacity to which a cache of `capacity` grows to hold `tokens`."""
    if tokens <= capacity:
        return capacity
    target = max(tokens, capacity + capacity // 4)
    return max(tokens, min(max_tokens, -(-target // BLOCK_TOKENS) * BLOCK_TOKENS))


class Kv:
    """One sequence's cache. Tensors are (heads, capacity, dim), created when a layer first writes."""

    def __init__(self, max_tokens: int) -> None:
        self.length = 0
        self.capacity = 0
        self._max_tokens = max_tokens
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def capacity_for(self, tokens: int) -> int:
        """Returns the capacity that the cache would have after `reserve(tokens)`."""
        return capacity_for(tokens, self.capacity, self._max_tokens)

    def reserve(self, tokens: int) -> None:
        capacity = self.capacity_for(tokens)
        if capacity == self.capacity:
            return
        self.capacity = capacity
        for layer, pair in self._layers.items():  # layer by layer: only one layer is in memory twice
            self._layers[layer] = (self._grown(pair[0]), self._grown(pair[1]))

    def put(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the new tokens of a layer; returns all keys and values of the layer, (heads, n, dim)."""
        new = key.shape[1]
        end = self.length + new
        if layer not in self._layers:
            self._layers[layer] = (self._empty(key), self._empty(value))
        keys, values = self._layers[layer]
        # `narrow` takes half the time of indexing, and this runs for each layer and sequence of a step
        keys.narrow(1, self.length, new).copy_(key)
        values.narrow(1, self.length, new).copy_(value)
        return keys.narrow(1, 0, end), values.narrow(1, 0, end)

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def free(self) -> None:
        """Frees the memory. The cache is not used again."""
        self._layers.clear()
        self.length = self.capacity = 0

    def cut(self, length: int) -> None:
        """Keeps only the first `length` tokens."""
        self.length = min(self.length, length)

    def copy(self, length: int, room: int) -> Kv:
        """Returns a new cache with the first `length` tokens and a capacity of at least `room`."""
        copied = Kv(self._max_tokens)
        copied.length = min(length, self.length)
        copied.capacity = copied.capacity_for(max(room, copied.length))
        for layer, (keys, values) in self._layers.items():
            copied._layers[layer] = (copied._grown(keys), copied._grown(values))
        return copied

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
        grown = self._empty(old)
        grown[:, : self.length] = old[:, : self.length]
        return grown


@dataclass(frozen=True, slots=True)
class Row:
    """The range of a sequence's new tokens in the step, [start, end), and its cache."""

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
    """Called by transformers in each layer. Tensors are (1, heads, tokens of the step, dim), or a padded batch."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise TypeError("its attention takes more than queries, keys and values (softcap, sinks)")
    if rollyard_paged is not None:
        mixed = paged_attention(module.layer_idx, query, key, value, scaling, sliding_window, rollyard_paged)
        return mixed.transpose(1, 2).contiguous(), None
    sizes = [row.end - row.start for row in ragged_rows]
    parts = zip(query.split(sizes, 2), key[0].split(sizes, 1), value[0].split(sizes, 1), strict=True)
    outputs: list[Tensor] = []
    for row, (queries, new_keys, new_values) in zip(ragged_rows, parts, strict=True):
        keys, values = row.kv.put(module.layer_idx, new_keys, new_values)
        outputs.append(attend(queries, keys[None], values[None], scaling, sliding_window))
    return torch.cat(outputs, dim=1), None


def attend(query: Tensor, keys: Tensor, values: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Causal attention of the new tokens, the last of the sequence, over the sequence or the last `window` tokens.
    Takes (1, heads, new, size) and returns (1, new, heads, size). Sums are in float32, whatever the dtype."""
    (heads, new, size), (kv_heads, total) = query.shape[1:], keys.shape[1:3]
    if window is not None and total > window + new - 1:  # drop what is outside the window of every new token
        keys, values = keys[:, :, total - (window + new - 1) :], values[:, :, total - (window + new - 1) :]
        total = window + new - 1
    groups = heads // kv_heads
    if new == total and (window is None or total <= window):
        output = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        return output.transpose(1, 2)
    mask = None  # a single token attends to all remaining keys
    if new > 1:
        place = torch.arange(total - new, total, device=query.device)[:, None]
        column = torch.arange(total, device=query.device)[None]
        mask = column <= place
        if window is not None:
            mask &= column > place - window
        mask = mask.repeat(groups, 1)
    # Query heads that share a key head are passed as additional queries of that head: one call, and no key is repeated.
    # For one token on a CPU this takes half the time of explicit products, and grouped queries with a mask have no
    # fast kernel.
    grouped = query.reshape(1, kv_heads, groups * new, size)
    output = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return output.reshape(1, heads, new, values.shape[3]).transpose(1, 2)
