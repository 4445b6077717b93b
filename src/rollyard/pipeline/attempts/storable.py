"""Replaces what cannot be stored: a model may write half a surrogate pair, or JSON a thousand levels deep, into a tool
call. The tokens keep what was sampled; only the messages change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from rollyard.core import Json, Message, Trajectory

MOST_DEPTH = 64
"""Levels of JSON that are kept of a message that cannot be stored unchanged."""


def storable(trajectory: Trajectory) -> Trajectory:
    """Returns the trajectory with messages and info that the store can encode."""
    messages = tuple(storable_message(message) for message in trajectory.messages)
    return replace(trajectory, messages=messages, info=storable_message(trajectory.info))


def storable_message(message: Message) -> Message:
    try:
        msgspec.json.encode(message)
    except (UnicodeEncodeError, RecursionError):
        return {str(_encodable(name)): _encodable(value) for name, value in message.items()}
    return message


def _encodable(value: Json, depth: int = 0) -> Json:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, (Mapping, Sequence)) and depth >= MOST_DEPTH:
        return "(nested too deeply)"
    if isinstance(value, Mapping):
        return {str(_encodable(name)): _encodable(item, depth + 1) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_encodable(item, depth + 1) for item in value]
    return value
