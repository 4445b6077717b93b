# pyright: reportMissingImports=false
"""One kernel of our own: a new token's key and value are stored, and it looks at all of its sequence, block by block.

In plain torch every step has to gather all keys and values of all rows, and tells the GPU many small things to do one
after another, which is what a small model's step is made of. Triton comes with torch on Linux. Where it is not there,
or gives other numbers (`Model.take_pool` tries), the plain way is taken. Sums are in float32, one block after another,
so a row's result depends on nothing but itself.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollyard.embedded.paged import BLOCK_TOKENS


@triton.jit
def _attend(
    query,
    key,
    value,
    keys,
    values,
    table,
    places,
    out,
    scale,
    window,
    kv_heads,
    table_width,
    groups,
    key_size,
    value_size,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    member, token = tl.arange(0, GROUPS), tl.arange(0, BLOCK)
    k_at, v_at = tl.arange(0, KEY), tl.arange(0, VALUE)
    is_key, is_value, is_member = k_at < key_size, v_at < value_size, member < groups
    place = tl.load(places + row)
    # The new token itself: stored for those that come after it, and the first that is looked at.
    own = row * kv_heads + head
    new_key = tl.load(key + own * key_size + k_at, mask=is_key, other=0.0)
    new_value = tl.load(value + own * value_size + v_at, mask=is_value, other=0.0)
    home = (tl.load(table + row * table_width + place // BLOCK) * kv_heads + head) * BLOCK + place % BLOCK
    tl.store(keys + home * key_size + k_at, new_key, mask=is_key)
    tl.store(values + home * value_size + v_at, new_value, mask=is_value)
    wanted = own * groups + member
    asked = tl.load(
        query + wanted[:, None] * key_size + k_at[None, :], mask=is_member[:, None] & is_key[None, :], other=0.0
    ).to(tl.float32)
    most = tl.sum(asked * new_key.to(tl.float32)[None, :], 1) * scale
    total = tl.full((GROUPS,), 1.0, tl.float32)
    mixed = tl.zeros((GROUPS, VALUE), tl.float32) + new_value.to(tl.float32)[None, :]
    first = tl.maximum(place + 1 - window, 0) // BLOCK
    for number in range(first, (place + BLOCK - 1) // BLOCK):
        block = tl.load(table + row * table_width + number)
        line = (block * kv_heads + head) * BLOCK + token
        column = number * BLOCK + token
        is_seen = (column < place) & (column > place - window)
        some = tl.load(
            keys + line[:, None] * key_size + k_at[None, :], mask=is_seen[:, None] & is_key[None, :], other=0.0
        ).to(tl.float32)
        score = tl.sum(asked[:, None, :] * some[None, :, :], 2) * scale
        score = tl.where(is_seen[None, :], score, -1e30)
        higher = tl.maximum(most, tl.max(score, 1))
        share = tl.where(is_seen[None, :], tl.exp(score - higher[:, None]), 0.0)
        fade = tl.exp(most - higher)
        given = tl.load(
            values + line[:, None] * value_size + v_at[None, :], mask=is_seen[:, None] & is_value[None, :], other=0.0
        ).to(tl.float32)
        mixed = mixed * fade[:, None] + tl.sum(share[:, :, None] * given[None, :, :], 1)
        total = total * fade + tl.sum(share, 1)
        most = higher
    tl.store(
        out + wanted[:, None] * value_size + v_at[None, :],
        (mixed / total[:, None]).to(out.dtype.element_ty),
        mask=is_member[:, None] & is_value[None, :],
    )


def attend_one(
    query: Tensor,
    new: tuple[Tensor, Tensor],
    pool: tuple[Tensor, Tensor],
    table: Tensor,
    places: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """`query` is (rows, heads, 1, size), `new` its key and value, `pool` a layer's, where they go to. As the query."""
    rows, heads, _, size = query.shape
    kv_heads, value_size = new[1].shape[1], new[1].shape[-1]
    made = torch.empty((rows, heads, 1, value_size), dtype=query.dtype, device=query.device)
    groups = heads // kv_heads
    launch: Any = _attend  # Triton's own way to be called
    launch[(rows, kv_heads)](
        query.contiguous(),
        new[0].contiguous(),
        new[1].contiguous(),
        *pool,
        table,
        places,
        made,
        scale,
        1 << 30 if window is None else window,
        kv_heads,
        table.shape[1],
        groups,
        size,
        value_size,
        BLOCK=BLOCK_TOKENS,
        GROUPS=triton.next_power_of_2(groups),
        KEY=triton.next_power_of_2(size),
        VALUE=triton.next_power_of_2(value_size),
    )
    return made
