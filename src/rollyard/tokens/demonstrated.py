"""A turn that nobody sampled, in the ids that a policy would have sampled it in: what demonstrations are made of.

A renderer writes conversations and not turns. So the conversation is rendered with the turn in it and something behind
it, because templates write their last turn in another way than earlier ones. It has to begin with the ids of the
prompt; what follows these, up to and including the first stop token, is the turn.

Invariants. The prompt's ids are compared, never replaced. What is given reads back (`Renderer.parse`) as the content,
reasoning and calls that were asked for, so nothing is taught that would not be understood when it is sampled. Where one
of the two cannot be had (templates that rewrite history, or open the thinking in the prompt), it is TaskInvalid.
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
    """A turn's ids, its stop token included, and how they read."""

    token_ids: list[int]
    parsed: Parsed


def given_turn(
    renderer: Renderer,
    prompt_ids: Sequence[int],
    messages: Sequence[Message],
    turn: Message,
    tools: Sequence[ToolSchema] = (),
) -> DemonstratedTurn:
    """The assistant's `turn` behind `prompt_ids`, which are those of `messages`. TaskInvalid where there is none.

    White space around its text, and in the JSON of its calls, is not kept: it would not be found again in the history.
    """
    wanted = _read(turn, renderer.name)
    prompt = list(prompt_ids)
    reasons: list[str] = []
    for following in _followings(wanted.tool_calls):
        try:
            whole = renderer.render([*messages, wanted.message, *following], tools)
        except (InvalidRequest, TaskInvalid) as error:  # an order of turns that its template refuses
            reasons.append(error.detail)
            continue
        if whole[: len(prompt)] != prompt:
            reasons.append("with the turn in it, the conversation does not begin with the prompt")
            continue
        at = next((at for at in range(len(prompt), len(whole)) if whole[at] in renderer.stop_token_ids), None)
        if at is None:
            reasons.append("it does not close the turn with a stop token")
            continue
        ids = whole[len(prompt) : at + 1]
        parsed = renderer.parse(ids, prompt, tools)
        if _said(parsed) == _said(wanted):
            return DemonstratedTurn(ids, parsed)
        reasons.append(f"the turn reads back as something else: {renderer.decode(ids)!r:.200}")
    raise TaskInvalid(f"{CANNOT} ({renderer.name}): {reasons[0]}", renderer=renderer.name)


def _followings(calls: Sequence[ToolCall]) -> Iterator[list[Message]]:
    """What may come behind the turn, the likeliest first. Some templates take no question while a call is open, some
    strip the thinking of whatever a question follows."""
    if calls:
        yield [{"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "2"} for call in calls]
    yield [{"role": "user", "content": "Go on."}]
    yield []


def _read(turn: Message, renderer: str) -> Parsed:
    """The turn as it would be parsed, had it been sampled."""
    if turn.get("role") != "assistant":
        raise TaskInvalid(f"only an assistant's turn can be given, not one of {turn.get('role')!r:.40}")
    found = turn.get("tool_calls")
    calls: list[ToolCall] = []
    for index, call in enumerate(found if isinstance(found, Sequence) else ()):
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


def _said(turn: Parsed) -> tuple[str, str, list[tuple[str, str]]]:
    """All that a turn says. Arguments as JSON: to Python, true and 1 are equal."""
    calls = [(call.name, json.dumps(call.arguments, sort_keys=True)) for call in turn.tool_calls]
    return turn.content.strip(), turn.reasoning.strip(), calls
