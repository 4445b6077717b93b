"""The type of JSON values, and their canonical form (for digests of bodies)."""

from __future__ import annotations

import json as _json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
else:
    Json = Any  # msgspec does not support recursive aliases; with Any it accepts any JSON


def canonical(value: Json) -> bytes:
    """Encodes a value; equal values give equal bytes, whatever the order of their keys."""
    text = _json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "surrogatepass")


def digest(value: Json) -> str:
    """Returns a short digest of a JSON value; equal values have equal digests."""
    return blake2b(canonical(value), digest_size=16).hexdigest()
