"""What JSON can hold, as a type, and its one canonical form (for hashes of bodies)."""

from __future__ import annotations

import json as _json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
else:
    Json = Any  # msgspec cannot read a recursive alias; it takes JSON as it comes


def canonical(value: Json) -> bytes:
    """Equal values give equal bytes, whatever the order of their keys."""
    text = _json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "surrogatepass")


def digest(value: Json) -> str:
    """A short fingerprint of a JSON value; the same for the same body."""
    return blake2b(canonical(value), digest_size=16).hexdigest()
