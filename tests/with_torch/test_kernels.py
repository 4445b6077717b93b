# pyright: reportMissingImports=false
"""Our kernels give the results of plain torch (in Triton's interpreter, which needs no GPU), and compile for a GPU.
`rollyard bench engine` measures their speed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rollyard.embedded.base import BLOCK_TOKENS
from rollyard.embedded.transformer import kernels
from rollyard.embedded.transformer.paged import BlockPool, LayerShape, Paged, paged_attention

LENGTHS = (0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS - 1, 100)

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollyard" / "triton"

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from rollyard.embedded.transformer import kernels

def of(kernel, pointers, sizes):
    pointers = {name: kind.format(dtype) for name, kind in pointers.items()}
    kinds = {n: pointers.get(n, "constexpr" if n in sizes else "i32") for n in kernel.arg_names}
    places = {(kernel.arg_names.index(n),): value for n, value in sizes.items()}
    made = compile(ASTSource(kernel, kinds, places), target=GPUTarget("cuda", 90, 32))
    return len(made.asm["cubin"])

for dtype in ("fp32", "fp16", "bf16"):
    floats = dict.fromkeys(["query", "key", "value", "keys", "values", "out"], "*{}")
    many = floats | {"table": "*i64", "places": "*i64", "scale": "fp32"}
    for count in (1, 3, 4) if dtype == "bf16" else (3,):
        sizes = {"KEY_SIZE": 64, "VALUE_SIZE": 64, "KEY": 64, "VALUE": 64, "BLOCK": 32, "COUNT": count}
        assert of(kernels._attend, many, sizes)
    floats = dict.fromkeys(["query", "key", "cos", "sin", "new_query", "new_key"], "*{}")
    assert of(kernels._rotate, floats, {"SIZE": 64, "HALF": 32})
"""


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "value_size", "window"),
    [(9, 3, 64, 64, None), (4, 4, 16, 16, None), (8, 2, 24, 40, 40), (9, 3, 64, 64, 7), (14, 2, 16, 16, None)],
)
def test_attend_one_equals_plain_attention(heads: int, kv_heads: int, size: int, value_size: int, window: int | None):
    torch.manual_seed(0)
    shape, device = LayerShape(kv_heads, size, value_size), torch.device("cpu")
    blocks = [length // BLOCK_TOKENS + 1 for length in LENGTHS]
    pools = [BlockPool({0: shape}, sum(blocks) + 1, torch.float32, device) for _ in range(2)]
    for first, second in zip(*(pool.layers[0] for pool in pools), strict=True):
        second.copy_(first.normal_())
    table = torch.zeros(len(LENGTHS), max(blocks), dtype=torch.long)
    for row, count in enumerate(blocks):
        table[row, :count] = torch.arange(count) + 1 + sum(blocks[:row])
    places, is_token = torch.tensor(LENGTHS)[:, None], torch.ones(len(LENGTHS), 1, dtype=torch.bool)
    query, key = (torch.randn(len(LENGTHS), count, 1, size) for count in (heads, kv_heads))
    value = torch.randn(len(LENGTHS), kv_heads, 1, value_size)
    plain, fast = (
        paged_attention(0, query, key, value, None, window, Paged(pool, table, places, is_token, kernel))
        for pool, kernel in zip(pools, (None, kernels.attend_one), strict=True)
    )
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5)
    for actual, expected in zip(*(pool.layers[0] for pool in pools), strict=True):
        assert torch.equal(actual, expected), "the new keys and values were not stored"


@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 64), (3, 24), (1, 6)])
def test_rotate_equals_the_rotation_of_transformers(rows: int, size: int):
    torch.manual_seed(0)
    query, key = (torch.randn(3, 5, heads, size).transpose(1, 2) for heads in (9, 3))
    cos, sin = torch.randn(2, rows, 5, size)
    for actual, expected in zip(
        kernels.rotate(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_the_kernels_compile_for_a_gpu():
    """Triton caches compiled kernels by source and by its own version: only changed kernels take time."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(CACHE), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=environment)
