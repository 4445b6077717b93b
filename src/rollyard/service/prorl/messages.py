"""A trajectory's messages with the tokens of its trace.

ProRL Agent's trainer concatenates the `token_ids` of all messages, and trains on those of messages whose role is
assistant, with their `logprobs`.

Invariants, for any messages: the concatenated `token_ids` are exactly the trace's; the tokens of assistant messages are
exactly those with mask 1, in order, with the trace's logprobs. So the tokens sampled in one call are on one assistant
message. The tokens between two calls, including the template's, are on the last non-assistant message before the later
call; the other messages in between have none. An assistant message that this trace does not own (a copy in a fork, an
example in the prompt) has no tokens of its own: they count as prompt. The list ends with the last sampled message.

The trainer takes everything before the first assistant message as the prompt, and a list that starts with an assistant
message as a prompt without a response. So the first assistant message is the first sampled one: earlier assistant
messages are left out as text, and their tokens are part of the prompt.

`input_ids`, the prompt of a call, is every token before it, which the reader already has. Only the first assistant
message has it, because otherwise a result would grow with the square of its turns. `with_all_input_ids` sets it on all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rollyard.core import Message, Span, Trace, Trajectory
from rollyard.core.texts import content_text


@dataclass(frozen=True, slots=True)
class _Place:
    """A span, and the index of the message that it is the text of."""

    span: Span
    message: int


def trained_trace(trajectory: Trajectory) -> int | None:
    """The index of the trace that the messages show: the one with the most sampled tokens. None if there is none."""
    sizes = [trace.sampled_tokens for trace in trajectory.traces]
    return max(range(len(sizes)), key=sizes.__getitem__) if any(sizes) else None


def messages_of(trajectory: Trajectory, *, with_all_input_ids: bool = False) -> list[dict[str, Any]]:
    """The messages with tokens. Without a trace (a text engine), without tokens, up to the last assistant message."""
    chosen = trained_trace(trajectory)
    if chosen is None:
        return _text_only(trajectory.messages)
    trace = trajectory.traces[chosen]
    spans = sorted((span for span in trace.spans if span.is_owned), key=lambda span: span.start)
    places = _places(trajectory, spans)
    if places is None:  # there is not one assistant message per call
        messages: Sequence[Message] = [{"role": "assistant", "content": ""} for _ in spans]
        places = [_Place(span, index) for index, span in enumerate(spans)]
    else:
        messages = trajectory.messages
    return _joined(messages, trace, places, with_all_input_ids)


def _places(trajectory: Trajectory, spans: Sequence[Span]) -> list[_Place] | None:
    """The assistant messages of the calls: the last ones, one per turn. None if they do not match the spans."""
    assistants = [index for index, message in enumerate(trajectory.messages) if message.get("role") == "assistant"]
    first = len(assistants) - trajectory.turns
    if first < 0:
        return None
    places: list[_Place] = []
    for span in spans:
        if not 0 <= span.turn < trajectory.turns:
            return None
        places.append(_Place(span, assistants[first + span.turn]))
    is_ordered = all(a.message < b.message for a, b in pairwise(places))
    return places if is_ordered else None


def _joined(
    messages: Sequence[Message], trace: Trace, places: Sequence[_Place], with_all_input_ids: bool
) -> list[dict[str, Any]]:
    joined: list[dict[str, Any]] = []
    at, next_message = 0, 0
    for number, place in enumerate(places):
        span = place.span
        between = [_plain(message) for message in messages[next_message : place.message]]
        if number == 0:
            between = [message for message in between if message["role"] != "assistant"]
        prompt_ids = trace.token_ids[at : span.start]
        if prompt_ids:
            bearer = next((it for it in reversed(between) if it["role"] != "assistant"), None)
            if bearer is None:
                bearer = _plain({"role": "user", "content": ""})
                between.append(bearer)
            bearer["token_ids"] = prompt_ids.tolist()
            # messages after the bearer have no tokens, so the order of tokens is that of the trace
        sampled = _plain(messages[place.message])
        sampled["token_ids"] = trace.token_ids[span.start : span.end].tolist()
        sampled["logprobs"] = None if trace.logprobs is None else trace.logprobs[span.start : span.end].tolist()
        if number == 0 or with_all_input_ids:
            sampled["input_ids"] = trace.token_ids[: span.start].tolist()
        joined += [*between, sampled]
        at, next_message = span.end, place.message + 1
    return joined


def _text_only(messages: Sequence[Message]) -> list[dict[str, Any]]:
    plain = [_plain(message) for message in messages]
    while plain and plain[-1]["role"] != "assistant":
        plain.pop()
    return plain


def _plain(message: Message) -> dict[str, Any]:
    """The message in ProRL Agent's format: content as text, tool calls as their functions."""
    plain: dict[str, Any] = {
        "role": message.get("role"),
        "content": content_text(message.get("content")),
        "token_ids": [],
        "input_ids": None,
        "logprobs": None,
    }
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and calls:
        functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
        plain["tool_calls"] = [function for function in functions if isinstance(function, Mapping)]
    for name in ("reasoning_content", "tool_call_id", "name"):
        if message.get(name) is not None:
            plain[name] = message[name]
    return plain
