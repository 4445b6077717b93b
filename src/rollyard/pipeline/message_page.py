"""A page of a conversation, for people who look at a rollout: JSON that is sent as it is.

Invariant. A page has at most `PAGE_BYTES`, or one message. Of a live rollout that message is not larger either: the
policy and its tools decide the size of messages, and a page that a node sends must have a bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rollyard.core import Json, Message
from rollyard.pipeline.attempts.storable import storable_message
from rollyard.pipeline.base import MessagePage, Snapshot

PAGE_BYTES = 1_000_000

LEAST_BYTES = 1000
"""What a message counts at least, so that a page of tiny ones costs little, too: it has fewer than 1,000."""

MOST_START_CHARS = 10_000
"""What is shown of a message that is larger than a page."""

MOST_ROLE_CHARS = 100

VALUE_CHARS = 32
"""What a JSON value counts, besides its text: measuring a message visits at most 31,250 values."""


def page_of(snapshot: Snapshot, after: int, *, is_live: bool) -> MessagePage:
    """Encodes messages from number `after` on, until the page is full."""
    page: list[bytes] = []
    size = 1
    for message in snapshot.messages[after:]:
        data = _bounded(message) if is_live else _encoded(message)
        size += max(LEAST_BYTES, len(data) + 1)  # with the comma
        if page and size > PAGE_BYTES:
            break
        page.append(data)
    end = min(after, len(snapshot.messages)) + len(page)
    known = snapshot.message_turns
    message_turns = () if known is None else [known.get(number) for number in range(end - len(page), end)]
    return MessagePage(
        snapshot.attempt,
        snapshot.turns,
        snapshot.sampled_tokens,
        b"[%b]" % b",".join(page),
        end,
        conversation=snapshot.conversation,
        message_turns=message_turns,
    )


def _encoded(message: Message) -> bytes:
    return msgspec.json.encode(storable_message(message))


def _bounded(message: Message) -> bytes:
    """Encodes a message, or its beginning if it is larger than a page."""
    if not _is_large(message):
        data = _encoded(message)
        if len(data) + 2 <= PAGE_BYTES:  # with the brackets
            return data
    role, content = message.get("role"), message.get("content")
    start = content[:MOST_START_CHARS] if isinstance(content, str) else ""
    return _encoded(
        {
            "role": role if isinstance(role, str) and len(role) <= MOST_ROLE_CHARS else "unknown",
            "content": f"{start}\n(This message is too large to be shown while the rollout runs.)".lstrip(),
        }
    )


def _is_large(message: Message) -> bool:
    """Whether it is larger than a page, or nearly. The cost has a bound, whatever the message contains."""
    left = PAGE_BYTES
    todo: list[Json] = [message]
    while todo and left >= 0:
        value = todo.pop()
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, Mapping):
            left -= 2 * VALUE_CHARS * len(value)
            if left >= 0:
                todo += (*value, *value.values())
        elif isinstance(value, Sequence):
            left -= VALUE_CHARS * len(value)
            if left >= 0:
                todo += value
    return left < 0
