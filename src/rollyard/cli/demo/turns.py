"""Reads the turns of running rollouts: what the model did, in a few words each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollyard.cli._console import visible
from rollyard.client import AsyncClient

SHOWN_CHARS = 60


class TurnReader:
    """Returns the turns of each rollout that were not returned before."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._read: dict[str, tuple[int, int]] = {}  # by rollout: its attempt, and the messages read

    async def read(self, id: str) -> list[str]:
        attempt, after = self._read.get(id, (0, 0))
        page = await self._client.messages(id, after=after)
        if page["attempt"] != attempt and after:  # a new conversation
            page = await self._client.messages(id)
        self._read[id] = (page["attempt"], page["next"])
        return [action(message) for message in page["messages"] if message.get("role") == "assistant"]


def action(message: Mapping[str, Any]) -> str:
    """Returns the first tool call of a message, or the start of its text, in one line."""
    text = " ".join(str(message.get("content") or "").split())
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            values = json.loads(arguments)
        except ValueError:
            values = None
        shown = next(iter(values.values()), "") if isinstance(values, dict) else arguments
        text = f"{name} {' '.join(str(shown).split())}".strip()
        break
    text = visible(text) or "(nothing)"
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"
