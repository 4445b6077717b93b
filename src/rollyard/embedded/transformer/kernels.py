# pyright: reportMissingImports=false
"""Triton kernels that replace the many small kernels of a small model's step.

`attend_one` stores a new token's key and value and computes its attention over its sequence, block by block. In plain
torch every step has to gather all keys and values of all rows. `rotate` computes the rotary embeddings of queries and
keys in one launch, where transformers needs ten. Triton comes with CUDA builds of torch. Where it is missing, or its
results differ (`Model.take_pool` and `fusing.py` compare them), plain torch is used. Both kernels compute in float32,
and the result of a row depends on that row only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollyard.embedded.base import BLOCK_TOKENS

MOST_SUMS = 256  # queries × value size in one program: 64 registers per thread


@triton.jit
def _add_block(asked, some, block_values, is_visible, scale, most, total, mixed):
    """Adds one block to the attention of one query. Each position within a block has its own sum, so nothing is
    summed across threads before the end."""
    score = tl.where(is_visible, tl.sum(some * asked[None, :], 1) * scale, -1e30)
    higher = tl.maximum(most, score)
    share, fade = tl.where(is_visible, tl.exp(score - higher), 0.0), tl.exp(most - higher)
    return higher, total * fade + share, mixed * fade[:, None] + block_values * share[:, None]


@triton.jit
def _finish(asked, new_key, new_value, scale, most, total, mixed):
    """Combines the sums of all positions and the new token itself."""
    own = tl.sum(asked * new_key, 0) * scale
    top = tl.maximum(tl.max(most, 0), own)
    weight, more = tl.exp(most - top), tl.exp(own - top)
    return (tl.sum(mixed * weight[:, None], 0) + new_value * more) / (tl.sum(total * weight, 0) + more)


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
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    row, head, first_member = tl.program_id(0), tl.program_id(1), tl.program_id(2) * COUNT
    token, k_at, v_at = tl.arange(0, BLOCK), tl.arange(0, KEY), tl.arange(0, VALUE)
    is_key, is_value = k_at < KEY_SIZE, v_at < VALUE_SIZE
    place = tl.load(places + row)
    # Store the new token for later ones. Programs of the same head store the same values.
    own = row * kv_heads + head
    new_key = tl.load(key + own * KEY_SIZE + k_at, mask=is_key, other=0.0)
    new_value = tl.load(value + own * VALUE_SIZE + v_at, mask=is_value, other=0.0)
    home = (tl.load(table + row * table_width + place // BLOCK) * kv_heads + head) * BLOCK + place % BLOCK
    tl.store(keys + home * KEY_SIZE + k_at, new_key, mask=is_key)
    tl.store(values + home * VALUE_SIZE + v_at, new_value, mask=is_value)
    new_key, new_value = new_key.to(tl.float32), new_value.to(tl.float32)
    # If the queries do not fill the last program, it repeats the last query and stores the same result again.
    m0, last = own * groups + first_member, own * groups + groups - 1
    m1, m2, m3 = tl.minimum(m0 + 1, last), tl.minimum(m0 + 2, last), tl.minimum(m0 + 3, last)
    q0 = tl.load(query + m0 * KEY_SIZE + k_at, mask=is_key, other=0.0).to(tl.float32)
    q1 = tl.load(query + m1 * KEY_SIZE + k_at, mask=is_key, other=0.0).to(tl.float32)
    q2 = tl.load(query + m2 * KEY_SIZE + k_at, mask=is_key, other=0.0).to(tl.float32)
    q3 = tl.load(query + m3 * KEY_SIZE + k_at, mask=is_key, other=0.0).to(tl.float32)
    most0 = tl.full((BLOCK,), -1e30, tl.float32)
    most1, most2, most3 = most0, most0, most0
    total0 = tl.zeros((BLOCK,), tl.float32)
    total1, total2, total3 = total0, total0, total0
    mixed0 = tl.zeros((BLOCK, VALUE), tl.float32)
    mixed1, mixed2, mixed3 = mixed0, mixed0, mixed0
    begin = tl.maximum(place + 1 - window, 0) // BLOCK
    for number in range(begin, (place + BLOCK - 1) // BLOCK):
        line = (tl.load(table + row * table_width + number) * kv_heads + head) * BLOCK + token
        column = number * BLOCK + token
        is_visible = (column < place) & (column > place - window)
        some = tl.load(
            keys + line[:, None] * KEY_SIZE + k_at[None, :], mask=is_visible[:, None] & is_key[None, :], other=0.0
        ).to(tl.float32)
        block_values = tl.load(
            values + line[:, None] * VALUE_SIZE + v_at[None, :], mask=is_visible[:, None] & is_value[None, :], other=0.0
        ).to(tl.float32)
        most0, total0, mixed0 = _add_block(q0, some, block_values, is_visible, scale, most0, total0, mixed0)
        if COUNT > 1:
            most1, total1, mixed1 = _add_block(q1, some, block_values, is_visible, scale, most1, total1, mixed1)
        if COUNT > 2:
            most2, total2, mixed2 = _add_block(q2, some, block_values, is_visible, scale, most2, total2, mixed2)
        if COUNT > 3:
            most3, total3, mixed3 = _add_block(q3, some, block_values, is_visible, scale, most3, total3, mixed3)
    kind = out.dtype.element_ty
    result = _finish(q0, new_key, new_value, scale, most0, total0, mixed0)
    tl.store(out + m0 * VALUE_SIZE + v_at, result.to(kind), mask=is_value)
    if COUNT > 1:
        result = _finish(q1, new_key, new_value, scale, most1, total1, mixed1)
        tl.store(out + m1 * VALUE_SIZE + v_at, result.to(kind), mask=is_value)
    if COUNT > 2:
        result = _finish(q2, new_key, new_value, scale, most2, total2, mixed2)
        tl.store(out + m2 * VALUE_SIZE + v_at, result.to(kind), mask=is_value)
    if COUNT > 3:
        result = _finish(q3, new_key, new_value, scale, most3, total3, mixed3)
        tl.store(out + m3 * VALUE_SIZE + v_at, result.to(kind), mask=is_value)


def attend_one(
    query: Tensor,
    new: tuple[Tensor, Tensor],
    pool: tuple[Tensor, Tensor],
    table: Tensor,
    places: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """`query` is (rows, heads, 1, size), `new` the key and value, `pool` those of the layer, where they are stored.
    Returns a tensor shaped as the query."""
    rows, heads, _, size = query.shape
    kv_heads, value_size = new[1].shape[1], new[1].shape[-1]
    output = torch.empty((rows, heads, 1, value_size), dtype=query.dtype, device=query.device)
    groups = heads // kv_heads
    count = max(1, min(groups, 4, MOST_SUMS // triton.next_power_of_2(value_size)))
    launch: Any = _attend  # Triton's launch syntax has no types
    launch[(rows, kv_heads, -(-groups // count))](
        query.contiguous(),
        new[0].contiguous(),
        new[1].contiguous(),
        *pool,
        table,
        places,
        output,
        scale,
        1 << 30 if window is None else window,
        kv_heads,
        table.shape[1],
        groups,
        KEY_SIZE=size,
        VALUE_SIZE=value_size,
        KEY=triton.next_power_of_2(size),
        VALUE=triton.next_power_of_2(value_size),
        BLOCK=BLOCK_TOKENS,
        COUNT=count,
    )
    return output


@triton.jit
def _load(at, is_one):
    return tl.load(at, mask=is_one, other=0.0).to(tl.float32)


@triton.jit
def _rotate(
    query, key, cos, sin, new_query, new_key, tokens, heads, more_heads,
    query_row, query_head, query_token, key_row, key_head, key_token, angle_row, angle_token,
    SIZE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, token, head = tl.program_id(0) // tokens, tl.program_id(0) % tokens, tl.program_id(1)
    at = tl.arange(0, HALF)
    is_one, half = at < SIZE // 2, SIZE // 2
    angle = row * angle_row + token * angle_token + at
    cos_a, cos_b = _load(cos + angle, is_one), _load(cos + angle + half, is_one)
    sin_a, sin_b = _load(sin + angle, is_one), _load(sin + angle + half, is_one)
    if head < heads:
        source = query + row * query_row + head * query_head + token * query_token + at
        target = new_query + ((row * heads + head) * tokens + token) * SIZE + at
    else:
        source = key + row * key_row + (head - heads) * key_head + token * key_token + at
        target = new_key + ((row * more_heads + head - heads) * tokens + token) * SIZE + at
    a, b = _load(source, is_one), _load(source + half, is_one)
    kind = new_query.dtype.element_ty
    tl.store(target, (a * cos_a - b * sin_a).to(kind), mask=is_one)
    tl.store(target + half, (b * cos_b + a * sin_b).to(kind), mask=is_one)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`query` and `key` are (rows, heads, tokens, size), contiguous in the last dimension; `cos` and `sin` are (rows
    or 1, tokens, size)."""
    rows, heads, tokens, size = query.shape
    rotated_query, rotated_key = (torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (query, key))
    cos, sin = cos.contiguous(), sin.contiguous()
    launch: Any = _rotate
    launch[(rows * tokens, heads + key.shape[1])](
        query, key, cos, sin, rotated_query, rotated_key, tokens, heads, key.shape[1],
        *query.stride()[:3], *key.stride()[:3], cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
        SIZE=size, HALF=triton.next_power_of_2(size // 2), num_warps=1,
    )  # fmt: skip
    return rotated_query, rotated_key
