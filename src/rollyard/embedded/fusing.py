# pyright: reportMissingImports=false
"""Fewer things for a GPU to be told: where transformers computes by many small kernels what one can do.

Only a model's own modules are changed (`model._twin`), not their classes. What is put in the place of something is
tried against it, and whoever fuses compares the whole model afterwards.
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
PLAIN = "apply_rotary_pos_emb"  # as transformers calls it in the module of each model
_CLOSE = 1e-5


def fuse_norms(module: Any) -> None:
    """One kernel for each norm of Llama's kind, where transformers has six."""
    for norm in module.modules():
        if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon"):
            shape, epsilon = tuple(norm.weight.shape), norm.variance_epsilon
            norm.forward = lambda x, w=norm.weight, s=shape, e=epsilon: rms_norm(x, s, w, e)


def find_rotation() -> Rotate | None:
    """Ours, if there is Triton."""
    try:
        from rollyard.embedded.kernels import rotate
    except ImportError:
        return None
    return rotate


def fuse_rotations(module: Any, size: int, rotate: Rotate) -> int:
    """Rotary embeddings by `rotate`, where heads of that size are turned as Llama's are. In how many layers."""
    count = 0
    for part in module.modules():
        forward: Any = type(part).forward
        plain = getattr(forward, "__globals__", {}).get(PLAIN)
        if plain is None or not type(part).__name__.endswith("Attention") or not _is_same(plain, rotate, size, module):
            continue
        around = {**forward.__globals__, PLAIN: _in_place_of(plain, rotate)}
        made = FunctionType(forward.__code__, around, forward.__name__, forward.__defaults__, forward.__closure__)
        made.__kwdefaults__ = forward.__kwdefaults__
        part.forward = MethodType(made, part)
        count += 1
    return count


def _in_place_of(plain: Callable[..., Any], rotate: Rotate) -> Callable[..., Any]:
    def turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        if rest or more or cos.dim() != 3 or cos.shape[-1] != query.shape[-1] or cos.dtype != query.dtype:
            return plain(query, key, cos, sin, *rest, **more)  # not what was tried
        return rotate(query, key, cos, sin)

    return turn


def _is_same(plain: Callable[..., Any], rotate: Rotate, size: int, module: Any) -> bool:
    like = next(module.parameters())
    dice = torch.Generator().manual_seed(0)
    query, key, cos, sin = (
        torch.randn(shape, generator=dice).to(like)
        for shape in ((2, 3, 2, size), (2, 3, 1, size), (2, 3, size), (2, 3, size))
    )
    given = (query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    try:
        gaps = [(a - b).abs().max() for a, b in zip(plain(*given), rotate(*given), strict=True)]
    except Exception as error:  # a kernel's compiler may raise anything, and a model's own code, too
        log.warning("our kernel for rotations cannot be used here", extra={"error": str(error).splitlines()[:1]})
        return False
    return float(max(gaps)) <= (_CLOSE if like.dtype == torch.float32 else 0.05)
