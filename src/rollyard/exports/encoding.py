"""JSON for files: valid whatever its texts and numbers are.

Texts of agents and tools may contain lone surrogates, which UTF-8 cannot express: they are written as escapes. Numbers
that JSON cannot express (NaN, infinities) are written as null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def json_text(value: object) -> str:
    """Returns compact JSON. It may contain lone surrogates."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_line(value: object) -> bytes:
    """Returns one line of a JSON Lines file."""
    return json_text(value).encode("utf-8", "backslashreplace") + b"\n"  # gives \udxxx, which is a JSON escape


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
