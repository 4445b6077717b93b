"""A page of a conversation has a bound, whatever the messages contain."""

from typing import Any

import msgspec
import pytest

from rollyard.pipeline import Snapshot, page_of
from rollyard.pipeline.message_page import LEAST_BYTES, PAGE_BYTES

DEEP: Any = "x"
for _ in range(500):
    DEEP = [DEEP]

HOSTILE: dict[str, dict[str, Any]] = {
    "a long text": {"role": "tool", "content": "x" * 50_000_000},
    "a text that JSON escapes": {"role": "tool", "content": "\x01" * (PAGE_BYTES - 100)},
    "a text that cannot be encoded": {"role": "assistant", "content": "\ud800" * PAGE_BYTES},
    "many values": {"role": "user", "content": [0] * 5_000_000},
    "many lists": {"role": "user", "content": [[] for _ in range(200_000)]},
    "many names": {"role": "user", "content": {str(number): None for number in range(200_000)}},
    "long names": {"role": "user", "content": {"x" * 1_000_000 + str(number): 0 for number in range(9)}},
    "a deep text": {"role": "user", "content": [DEEP, "x" * 9_000_000]},
    "a long role": {"role": "x" * 9_000_000, "content": "y"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_message_of_a_live_rollout_that_is_too_large_is_cut(name: str) -> None:
    messages = [{"role": "user", "content": "before"}, HOSTILE[name], {"role": "user", "content": "after"}]
    page = page_of(Snapshot(3, messages, 1, 9), 0, is_live=True)
    shown = msgspec.json.decode(page.messages)
    assert len(page.messages) <= PAGE_BYTES and page.end == len(shown) == 3
    assert (page.attempt, page.turns, page.sampled_tokens) == (3, 1, 9)
    assert (shown[0], shown[2]) == (messages[0], messages[2])
    assert "too large" in shown[1]["content"] and set(shown[1]) == {"role", "content"}
    assert shown[1]["role"] in (messages[1]["role"], "unknown")
    if name == "a long text":
        assert shown[1]["content"].startswith("xxx")


def test_a_message_of_an_ended_rollout_is_whole() -> None:
    messages = [HOSTILE["a long text"], {"role": "user", "content": "after"}]
    page = page_of(Snapshot(1, messages), 0, is_live=False)
    assert msgspec.json.decode(page.messages) == messages[:1] and page.end == 1


@pytest.mark.parametrize("is_live", [True, False])
def test_pages_follow_each_other(is_live: bool) -> None:
    sizes = (0, 10, 500_000, 900_000, PAGE_BYTES - 500, 3, 700_000, 700_000, 700_000)
    messages = [{"role": "user", "content": f"{number}" * size} for number, size in enumerate(sizes)]
    found: list[Any] = []
    while (page := page_of(Snapshot(1, messages), len(found), is_live=is_live)).messages != b"[]":
        assert len(page.messages) <= PAGE_BYTES
        found += msgspec.json.decode(page.messages)
        assert page.end == len(found)
    assert found == messages


def test_a_page_of_tiny_messages_has_few() -> None:
    messages = [{"role": "user"}] * 10_000
    page = page_of(Snapshot(1, messages), 5, is_live=True)
    assert page.end - 5 == PAGE_BYTES // LEAST_BYTES - 1
    assert page_of(Snapshot(1, messages), 20_000, is_live=True).end == 10_000
