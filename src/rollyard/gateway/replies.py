"""Converts a turn that the model wrote to the reply that the client receives.

The two are nearly always the same. But a call without a name, or with arguments that the dialect cannot represent, is
returned as the text that the model wrote, as inference servers do: the program handles it like any text, and the model
sees the result. The next request contains the reply that was sent, so that is what the book records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollyard.core import Message
from rollyard.engines.base import Generation
from rollyard.gateway.base import Event, Finish, Reasoning, Reply, Text, TokenLogprob, Usage, split_calls
from rollyard.tokens.base import Parsed, Renderer, ToolCall
from rollyard.tokens.calls import assistant_message
from rollyard.tokens.reader import Delta, Reader
from rollyard.tokens.splice import PreparedTurn


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How a turn is returned: with calls or as text only, and up to which stop texts."""

    takes_raw_arguments: bool
    returns_calls: bool = True
    stop: tuple[str, ...] = ()

    def split_calls(self, calls: Sequence[ToolCall]) -> tuple[tuple[ToolCall, ...], str]:
        if not self.returns_calls:
            return (), "\n".join(call.raw for call in calls)
        return split_calls(calls, takes_raw_arguments=self.takes_raw_arguments)


class ReplyBuilder:
    """Parses one turn while it is sampled."""

    def __init__(self, renderer: Renderer, turn: PreparedTurn, manner: ReplyOptions) -> None:
        self._reader = Reader(renderer, turn.prompt, turn.tools)
        self._manner = manner
        self._held_text = ""  # the end of the text, if it may be the beginning of a stop text
        self._is_stopped = False
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, ids: Sequence[int]) -> list[Event]:
        return self._events(self._reader.feed(ids))

    def finish(self) -> tuple[list[Event], Parsed]:
        """Returns the events that were not sent yet, and the turn as it was sent."""
        remaining, parsed = self._reader.finish()
        events = [*self._events(remaining), *self._text_events("", is_end=True)]
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
                calls, text = self._manner.split_calls((item,))
                if calls:
                    events += self._text_events("", is_end=True)
                    if not self._is_stopped:
                        self._calls.append(item)
                        events.append(item)
                    continue
                text = f"\n{text}" if self._content else text
            events += self._text_events(text)
        return events

    def _text_events(self, text: str, *, is_end: bool = False) -> list[Event]:
        """Returns the events for the text that can be sent now."""
        stops = self._manner.stop
        if stops:
            text, self._held_text = self._held_text + text, ""
            cut, stop = cut_at(text, stops)
            if self._is_stopped or stop is not None:
                text, self._is_stopped = ("" if self._is_stopped else cut), True
            elif not is_end:
                keep = _possible_stop_chars(text, stops)
                text, self._held_text = text[: len(text) - keep], text[len(text) - keep :]
        if not text:
            return []
        self._content.append(text)
        return [Text(text)]


def convert_turn(parsed: Parsed, manner: ReplyOptions) -> Parsed:
    """Converts a turn that is returned without streaming."""
    calls, other_text = manner.split_calls(parsed.tool_calls)
    content = parsed.content
    if other_text:
        content = f"{content}\n{other_text}" if content else other_text
    content, stop = cut_at(content, manner.stop)
    if stop is not None:
        calls = ()  # they come after it
    return parsed if not other_text and stop is None else _parsed(content, parsed.reasoning, calls)


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Returns the text before the first stop text, and that stop text."""
    matches = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not matches:
        return text, None
    at, stop = min(matches)
    return text[:at], stop


def _possible_stop_chars(text: str, stops: Sequence[str]) -> int:
    """Returns how many characters at the end of the text may be the beginning of a stop text."""
    most = max(map(len, stops)) - 1
    ends = (size for size in range(min(most, len(text)), 0, -1) if any(it.startswith(text[-size:]) for it in stops))
    return next(ends, 0)


def _ended_by(generation: Generation, renderer: Renderer, stops: Sequence[str]) -> str | None:
    """Returns the stop text that ended the completion: the engine stops at the token that completes it."""
    ids = generation.token_ids
    if not stops or not ids:
        return None
    ids = [token for token in ids if token not in renderer.stop_token_ids]
    return cut_at(renderer.decode(ids), stops)[1]


def reply_of(
    parsed: Parsed,
    generation: Generation,
    renderer: Renderer,
    *,
    reply_id: str,
    created: int,
    prompt_tokens: int,
    stop: Sequence[str] = (),
    logprobs: tuple[TokenLogprob, ...] | None = None,
    warnings: tuple[str, ...] = (),
) -> Reply:
    """Makes the reply of a turn, with its finish reason and usage."""
    finish: Finish = "tool_calls" if parsed.tool_calls else "stop"
    ended_by = _ended_by(generation, renderer, stop)
    if generation.finish_reason == "length" and ended_by is None:
        finish = "length"
    usage = Usage(
        prompt_tokens, generation.cached_tokens or 0, len(generation.token_ids), _thought(generation, renderer)
    )
    return Reply(
        reply_id,
        created,
        parsed.content,
        parsed.reasoning,
        parsed.tool_calls,
        finish,
        usage,
        stop_sequence=ended_by,
        logprobs=logprobs,
        warnings=warnings,
    )


def _thought(generation: Generation, renderer: Renderer) -> int:
    """Returns how many of the sampled tokens are reasoning."""
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
