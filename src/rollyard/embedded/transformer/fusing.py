# pyright: reportMissingImports=false
"""Replaces sequences of small kernels in transformers by a single one, so a GPU has fewer kernels to launch.

Only the modules of the engine's copy of a model are changed (`model._shared_copy`), not their classes. A replacement is
compared with the original, and the caller compares the whole model afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

log = logging.getLogger("rollyard.embedded")
Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
PLAIN = "apply_rotary_pos_emb"  # its name in the module of each model in transformers
_CLOSE, _HALF_CLOSE = 1e-5, 0.02


def fuse_norms(module: Any) -> None:
    """Computes each Llama RMSNorm by one kernel instead of six."""
    for norm in module.modules():
        if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon"):
            shape, epsilon = tuple(norm.weight.shape), norm.variance_epsilon
            norm.forward = lambda x, w=norm.weight, s=shape, e=epsilon: rms_norm(x, s, w, e)


def find_kernels() -> Any:
    """Returns the module `kernels` if Triton is installed, else None."""
    try:
        from rollyard.embedded.transformer import kernels
    except ImportError:
        return None
    return kernels


def fuse_rotations(module: Any, size: int, rotate: Rotate) -> int:
    """Uses `rotate` for rotary embeddings where heads of that size are rotated as in Llama. Returns how many layers
    were changed."""
    like, tried, count = next(module.parameters()), dict[Any, bool](), 0
    for part in module.modules():
        forward: Any = type(part).forward
        plain = getattr(forward, "__globals__", {}).get(PLAIN)
        if plain is None or not type(part).__name__.endswith("Attention") or "forward" in vars(part):
            continue  # the last condition: the module's forward is already replaced
        if plain not in tried:
            tried[plain] = _is_same(plain, rotate, size, like)
        if tried[plain]:
            around = {**forward.__globals__, PLAIN: _in_place_of(plain, rotate)}
            patched = FunctionType(
                forward.__code__, around, forward.__name__, forward.__defaults__, forward.__closure__
            )
            patched.__kwdefaults__ = forward.__kwdefaults__
            part.forward = MethodType(patched, part)
            count += 1
    return count


def _in_place_of(plain: Callable[..., Any], rotate: Rotate) -> Callable[..., Any]:
    """Returns a function that calls `rotate` for arguments of the tested kind, and `plain` for all others."""

    def turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *other_args: Any, **more: Any) -> Any:
        is_plain = other_args or more or cos.dim() != 3 or cos.shape[-1] != query.shape[-1] or cos.dtype != query.dtype
        if is_plain or query.stride(-1) != 1 or key.stride(-1) != 1:
            return plain(query, key, cos, sin, *other_args, **more)
        return rotate(query, key, cos, sin)

    return turn


def _is_same(plain: Callable[..., Any], rotate: Rotate, size: int, like: Tensor) -> bool:
    dice = torch.Generator().manual_seed(0)
    query, key, cos, sin = (
        torch.randn(shape, generator=dice).to(like)
        for shape in ((2, 3, 2, size), (2, 3, 1, size), (2, 3, size), (2, 3, size))
    )
    inputs = (query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    close = _CLOSE if like.dtype == torch.float32 else _HALF_CLOSE
    try:
        pairs = zip(plain(*inputs), rotate(*inputs), strict=True)
        is_same = all(torch.allclose(expected, actual, rtol=close, atol=close) for expected, actual in pairs)
    except Exception as error:  # the compiler of a kernel and a model's own code may raise anything
        log.warning("the rotary kernel failed: not fused", extra={"error": str(error).splitlines()[:1]})
        return False
    if not is_same:
        log.info("the rotary embedding of this model differs from Llama's: not fused")
    return is_same
