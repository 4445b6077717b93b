"""The type of JSON values, their canonical form (for digests of bodies), and their conversion to dicts and lists."""

from __future__ import annotations

import json as _json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias, cast

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


def to_builtins(value: Any) -> Any:
    """Converts mappings and sequences of any type, which task data may contain, to dicts and lists at every depth."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    container = encode_container(value)
    if isinstance(container, dict):
        return {key: to_builtins(item) for key, item in container.items()}
    return [to_builtins(item) for item in container]


def encode_container(value: object) -> dict[str, Any] | list[Any]:
    """Converts one mapping or sequence to a dict or list: the `default` of JSON encoders."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in cast("Mapping[object, Any]", value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(cast("Sequence[Any]", value))
    raise TypeError(f"{type(value).__name__} has no JSON form")
