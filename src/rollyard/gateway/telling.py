"""What a client is told of a turn that the model wrote.

Nearly always just that. But a call without a name, or one whose arguments a dialect cannot carry, is told as the text
that the model wrote, as inference servers do: the program answers it as it answers any text, and the model hears of it.
What was told is what comes back in the next request, so it is also what the book remembers.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.core import Message
from rollyard.engines.base import Generation
from rollyard.gateway.base import Event, Finish, Reasoning, Text, Told, Usage, tellable
from rollyard.tokens.base import Parsed, Renderer, ToolCall
from rollyard.tokens.calls import assistant_message
from rollyard.tokens.reader import Delta, Reader
from rollyard.tokens.splice import Turn


class Telling:
    """One turn, read while it is sampled."""

    def __init__(self, renderer: Renderer, turn: Turn, *, takes_raw_arguments: bool) -> None:
        self._reader = Reader(renderer, turn.prompt, turn.tools)
        self._takes_raw_arguments = takes_raw_arguments
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, ids: Sequence[int]) -> list[Event]:
        return self._events(self._reader.feed(ids))

    def finish(self) -> tuple[list[Event], Parsed]:
        """What was not told yet, and the turn as it was told."""
        rest, parsed = self._reader.finish()
        events = self._events(rest)
        content, calls = "".join(self._content), tuple(self._calls)
        is_as_written = content == parsed.content and calls == parsed.tool_calls
        return events, parsed if is_as_written else _parsed(content, parsed.reasoning, calls)

    def _events(self, read: Sequence[Delta | ToolCall]) -> list[Event]:
        events: list[Event] = []
        for item in read:
            if isinstance(item, Delta):
                if item.kind == "reasoning":
                    events.append(Reasoning(item.text))
                    continue
                text = item.text
            else:
                calls, text = tellable((item,), takes_raw_arguments=self._takes_raw_arguments)
                if calls:
                    self._calls.append(item)
                    events.append(item)
                    continue
                text = f"\n{text}" if self._content else text
            if text:
                self._content.append(text)
                events.append(Text(text))
        return events


def tell_whole(parsed: Parsed, *, takes_raw_arguments: bool) -> Parsed:
    """A turn that is told in one piece."""
    calls, rest = tellable(parsed.tool_calls, takes_raw_arguments=takes_raw_arguments)
    if not rest:
        return parsed
    content = f"{parsed.content}\n{rest}" if parsed.content else rest
    return _parsed(content, parsed.reasoning, calls)


def told_of(
    parsed: Parsed, generation: Generation, renderer: Renderer, *, reply_id: str, created: int, prompt_tokens: int
) -> Told:
    """The whole turn, with its figures."""
    finish: Finish = "tool_calls" if parsed.tool_calls else "stop"
    if generation.finish_reason == "length":
        finish = "length"
    usage = Usage(
        prompt_tokens, generation.cached_tokens or 0, len(generation.token_ids), _thought(generation, renderer)
    )
    return Told(reply_id, created, parsed.content, parsed.reasoning, parsed.tool_calls, finish, usage)


def _thought(generation: Generation, renderer: Renderer) -> int:
    """How many of the sampled tokens are reasoning."""
    markers = renderer.markers
    if markers is None or markers.think_close is None:
        return 0
    try:
        return generation.token_ids.index(markers.think_close) + 1
    except ValueError:
        is_open = markers.think_open is not None and markers.think_open in generation.token_ids
        return len(generation.token_ids) if is_open else 0


def _parsed(content: str, reasoning: str, calls: tuple[ToolCall, ...]) -> Parsed:
    message: Message = assistant_message(content, reasoning, calls)
    return Parsed(content, reasoning, calls, message)
