"""Types that the models, caches and batcher share. Imports neither torch nor another module of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BLOCK_TOKENS = 32
"""Tokens in one block of a paged cache."""

MOST_BURST = 16
"""The most tokens that one burst samples for a sequence: the tensors of a burst have room for that many."""


@dataclass(
    slots=True
)  # not frozen: one is created for each token, and a frozen one costs as much as the rest of a step
class Piece:
    """The next tokens of a sequence, after those in its cache."""

    tokens: Sequence[int]
    kv: Any  # the cache that the model's `new_kv` returned
    wants_logits: bool
