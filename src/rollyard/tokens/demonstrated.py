"""A given turn in the ids that a policy would have sampled it in: for demonstrations, whose turns are not sampled.

A renderer renders conversations, not turns. So the conversation is rendered with the turn and something after it,
because templates render their last turn differently from earlier ones. The result must start with the ids of the
prompt; the turn is what follows these, up to and including the first stop token.

Invariants. The prompt's ids are compared, never replaced. The turn parses (`Renderer.parse`) as the requested content,
reasoning and calls, so a policy learns nothing that would not be parsed when it is sampled. If either is impossible
(templates that rewrite history, or open the thinking in the prompt), TaskInvalid is raised.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollyard.core import Message
from rollyard.core.failure import InvalidRequest, TaskInvalid
from rollyard.tokens.base import Parsed, Renderer, ToolCall, ToolSchema
from rollyard.tokens.calls import assistant_message, named_arguments, read_arguments
from rollyard.tokens.turns import message_text

CANNOT = "this renderer cannot write a turn that was not sampled"


@dataclass(frozen=True, slots=True)
class DemonstratedTurn:
    """A turn's ids, including its stop token, and the parsed turn."""

    token_ids: list[int]
    parsed: Parsed


def demonstrated_turn(
    renderer: Renderer,
    prompt_ids: Sequence[int],
    messages: Sequence[Message],
    turn: Message,
    tools: Sequence[ToolSchema] = (),
) -> DemonstratedTurn:
    """The ids of the assistant's `turn` after `prompt_ids`, the ids of `messages`. Raises TaskInvalid if impossible.

    White space around its text, and in the JSON of its calls, is not kept: the history would not contain it either.
    """
    expected = _read(turn, renderer.name)
    prompt = list(prompt_ids)
    reasons: list[str] = []
    for following in _possible_next_messages(expected.tool_calls):
        try:
            whole = renderer.render([*messages, expected.message, *following], tools)
        except (InvalidRequest, TaskInvalid) as error:  # the template refuses this order of turns
            reasons.append(error.detail)
            continue
        if whole[: len(prompt)] != prompt:
            reasons.append("with the turn in it, the conversation does not start with the prompt")
            continue
        at = next((at for at in range(len(prompt), len(whole)) if whole[at] in renderer.stop_token_ids), None)
        if at is None:
            reasons.append("it does not close the turn with a stop token")
            continue
        ids = whole[len(prompt) : at + 1]
        parsed = renderer.parse(ids, prompt, tools)
        if _contents(parsed) == _contents(expected):
            return DemonstratedTurn(ids, parsed)
        reasons.append(f"the rendered turn parses as a different one: {renderer.decode(ids)!r:.200}")
    raise TaskInvalid(f"{CANNOT} ({renderer.name}): {reasons[0]}", renderer=renderer.name)


def _possible_next_messages(calls: Sequence[ToolCall]) -> Iterator[list[Message]]:
    """Messages that may follow the turn, the most likely first. Some templates accept no user message while a call is
    open; some strip the thinking of turns before a user message."""
    if calls:
        yield [{"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "2"} for call in calls]
    yield [{"role": "user", "content": "Go on."}]
    yield []


def _read(turn: Message, renderer: str) -> Parsed:
    """The turn as it would be parsed if it were sampled."""
    if turn.get("role") != "assistant":
        raise TaskInvalid(f"only an assistant's turn can be given, not one of {turn.get('role')!r:.40}")
    raw_calls = turn.get("tool_calls")
    calls: list[ToolCall] = []
    for index, call in enumerate(raw_calls if isinstance(raw_calls, Sequence) else ()):
        name, arguments = named_arguments(call)
        call_id = call.get("id") if isinstance(call, Mapping) else None
        read = read_arguments(name, arguments, "", call_id if isinstance(call_id, str) else f"call_{index}")
        if not name or read.arguments is None:
            raise TaskInvalid(f"a given turn: tool call {index} ({name!r:.40}): {read.error or 'it has no name'}")
        calls.append(read)
    reasoning = turn.get("reasoning_content")
    content = message_text(turn, renderer, lambda text: text).strip()
    thought = reasoning.strip() if isinstance(reasoning, str) else ""
    return Parsed(content, thought, tuple(calls), assistant_message(content, thought, calls))


def _contents(turn: Parsed) -> tuple[str, str, list[tuple[str, str]]]:
    """The contents of a turn, for comparison. Arguments are JSON text, because in Python True == 1."""
    calls = [(call.name, json.dumps(call.arguments, sort_keys=True)) for call in turn.tool_calls]
    return turn.content.strip(), turn.reasoning.strip(), calls
