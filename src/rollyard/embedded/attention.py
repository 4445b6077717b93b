# pyright: reportMissingImports=false
"""The keys and values of each sequence, and attention over sequences of different lengths in one forward pass.

The tokens of a step lie behind one another in a batch of one ("ragged"), so that every matrix multiplication is over
all of them; only attention looks at one sequence at a time, through a function that transformers calls by name. There
is no padding and no mask between sequences, so nothing of one sequence can reach another.

Invariant: `Kv.length` tokens of a sequence are in its cache, the same number in every layer, between two forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "rollyard_ragged"
BLOCK_TOKENS = 128  # a cache grows by whole blocks, and by a quarter of itself: appending costs little on average


class Kv:
    """One sequence's cache. Tensors are (heads, capacity, dim), made when a layer first writes."""

    def __init__(self, max_tokens: int) -> None:
        self.length = 0
        self.capacity = 0
        self._max_tokens = max_tokens
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def capacity_for(self, tokens: int) -> int:
        """What it will have room for when so many tokens have to fit."""
        if tokens <= self.capacity:
            return self.capacity
        wanted = max(tokens, self.capacity + self.capacity // 4)
        return max(tokens, min(self._max_tokens, -(-wanted // BLOCK_TOKENS) * BLOCK_TOKENS))

    def reserve(self, tokens: int) -> None:
        capacity = self.capacity_for(tokens)
        if capacity == self.capacity:
            return
        self.capacity = capacity
        for layer, pair in self._layers.items():  # one layer after the other: little is held twice
            self._layers[layer] = (self._grown(pair[0]), self._grown(pair[1]))

    def put(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new tokens of a layer behind what is there; returns all keys and values of it, (heads, n, dim)."""
        end = self.length + key.shape[1]
        if layer not in self._layers:
            self._layers[layer] = (self._empty(key), self._empty(value))
        keys, values = self._layers[layer]
        keys[:, self.length : end] = key
        values[:, self.length : end] = value
        return keys[:, :end], values[:, :end]

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def cut(self, length: int) -> None:
        """Forgets all but the first tokens."""
        self.length = min(self.length, length)

    def copy(self, length: int) -> Kv:
        """The first tokens, in a cache of their own."""
        made = Kv(self._max_tokens)
        made.length = min(length, self.length)
        made.capacity = made.capacity_for(made.length)
        for layer, (keys, values) in self._layers.items():
            made._layers[layer] = (made._grown(keys), made._grown(values))
        return made

    @property
    def bytes_per_token(self) -> int:
        size = sum(t.element_size() * t.shape[0] * t.shape[2] for pair in self._layers.values() for t in pair)
        return max(1, size)

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


def ragged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    ragged_rows: Sequence[Row] = (),
    **kwargs: object,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: tensors are (1, heads, tokens of the step, dim)."""
    made: list[Tensor] = []
    for row in ragged_rows:
        part = slice(row.start, row.end)
        keys, values = row.kv.put(module.layer_idx, key[0, :, part], value[0, :, part])
        made.append(_attend(query[:, :, part], keys[None], values[None], scaling, sliding_window))
    return torch.cat(made, dim=2).transpose(1, 2).contiguous(), None


def _attend(query: Tensor, keys: Tensor, values: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """The new tokens, the last of the sequence, over all of it: causal, and no further back than the window."""
    new, total = query.shape[2], keys.shape[2]
    if window is not None and total > window + new - 1:  # what no new token can see
        keys, values = keys[:, :, total - (window + new - 1) :], values[:, :, total - (window + new - 1) :]
        total = window + new - 1
    if new == 1:
        return _attend_one(query, keys, values, scaling)
    mask = None
    is_causal = new == total and (window is None or total <= window)
    if not is_causal:
        place = torch.arange(total - new, total, device=query.device)[:, None]
        column = torch.arange(total, device=query.device)[None]
        mask = column <= place
        if window is not None:
            mask &= column > place - window
    groups = query.shape[1] // keys.shape[1]
    if groups > 1 and mask is not None:  # with a mask, grouped queries have no fast kernel
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        groups = 1
    return scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=is_causal, scale=scaling, enable_gqa=groups > 1
    )


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """One new token over the whole sequence, with scores in float32.

    By hand: in half precision on a GPU torch's own was slower where every call has another length, and which kernel it
    takes is a setting of the whole process, which is not ours alone."""
    heads, kv_heads, size = query.shape[1], keys.shape[1], query.shape[3]
    grouped = query.reshape(kv_heads, heads // kv_heads, size).float()
    scores = grouped @ keys[0].float().transpose(1, 2) * (size**-0.5 if scaling is None else scaling)
    made = scores.softmax(dim=-1) @ values[0].float()
    return made.to(query.dtype).reshape(1, heads, 1, values.shape[3])
