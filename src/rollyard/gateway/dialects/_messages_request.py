"""Reads a request of Anthropic Messages as a `ChatRequest`. `messages.py` writes the replies.

Mapping to chat messages:
- `system`, a string or text blocks, is the first message, each block on its own line (one of Claude Code's blocks is a
  header that `tokens.splice` recognizes as a line). A later message of role `system` stays where it is.
- A user's `tool_result` blocks become tool messages, in their place; text and images around them become user messages.
  Consecutive messages of one role are one turn, as in Anthropic's API: a client may send either form of a history.
- Text blocks of a user or a tool are joined by a newline. Those of the assistant are joined directly: they are pieces
  of one sampled text. `thinking` becomes `reasoning_content`; its signature is not checked.
- A result with `is_error` begins with "Error: ", unless its text already does: a tool message has no such field.
- A call is sent with the id `toolu_{reply}_{its own}`, and read back with its own id: some models see the id that they
  chose.

Refused, since the model would not see the content: documents, search results, references to deferred tools, redacted
thinking, blocks of server-side tools, images in Anthropic's file store, and an assistant's turn at the end (a prefill:
the reply would have to begin in the middle of it).

Granted where possible (`gateway/parameters.py`): stop_sequences, output_config.format, output_format, tool_choice.
Overridden, by name: thinking, mcp_servers, output_config.effort, a tool_choice that forbids parallel calls, a
temperature, top_p or top_k that is not the task's; `tools.type`, a tool without a schema because Anthropic runs or
defines it; `tools.defer_loading`, a tool that is not to be shown yet. Without effect: metadata, service_tier,
cache_control, context_management, betas. All other parameters are unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

from rollyard.core import Json, Message
from rollyard.gateway.base import ChatRequest, Problem, RequestParameter
from rollyard.gateway.dialects import _parameters
from rollyard.tokens.base import ToolSchema

_OVERRULED: Final = ("thinking", "mcp_servers")
_KNOWN: Final = frozenset(
    (
        *("model", "messages", "system", "max_tokens", "tools", "tool_choice", "stream", "temperature", "top_p"),
        *("top_k", "stop_sequences", "output_config", "output_format", "metadata", "service_tier", "cache_control"),
        *("context_management", "container", "betas", "inference_geo", "speed"),
        *_OVERRULED,
    )
)
_TOOL_USE_ID = re.compile(r"toolu_[0-9A-Za-z]+_(.+)", re.DOTALL)

Part = str | Mapping[str, Json]
"""A part of a user's or a tool's message: text, or an image in chat format."""


def read(body: Mapping[str, Json]) -> ChatRequest:
    history = _History()
    system = body.get("system")
    if system is not None:
        history.system(_texts(system, "system"))
    for index, message in enumerate(_list(body.get("messages"), "messages")):
        history.take(_mapping(message, f"messages.{index}"), f"messages.{index}")
    overruled = [name for name in _OVERRULED if body.get(name) not in (None, [], {})]
    wishes = [*_parameters.same(body), *_parameters.stop(body.get("stop_sequences"), "stop_sequences"), *_formats(body)]
    choice, name = _choice(body.get("tool_choice"))
    if choice == "none":
        wishes.append(RequestParameter("no_calls", "tool_choice"))
    elif choice != "auto":
        forced = _parameters.calls(choice, name)
        if forced is None:
            overruled.append("tool_choice")
        wishes += forced or ()
    if isinstance(config := body.get("output_config"), Mapping) and config.get("effort") is not None:
        overruled.append("output_config.effort")
    tools: list[ToolSchema] = []
    for index, item in enumerate(_list(body.get("tools") or (), "tools")):
        tool = _tool(_mapping(item, f"tools.{index}"), f"tools.{index}")
        if not isinstance(tool, str):
            tools.append(tool)
        elif tool not in overruled:
            overruled.append(tool)
    model, max_tokens = body.get("model"), body.get("max_tokens")
    if not isinstance(model, str) or not model:
        raise _wrong("model", "a model's name is required")
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise _wrong("max_tokens", "it must be a whole number of at least 1")
    return ChatRequest(
        messages=history.finish(),
        tools=tuple(tools),
        model=model,
        max_tokens=max_tokens,
        is_stream=body.get("stream") is True,
        wishes=tuple(wishes),
        overruled=tuple(overruled),
        unknown=_parameters.unknown(body, _KNOWN),
    )


def _formats(body: Mapping[str, Json]) -> list[RequestParameter]:
    config = body.get("output_config")
    newer = config.get("format") if isinstance(config, Mapping) else None
    for value, name in ((newer, "output_config.format"), (body.get("output_format"), "output_format")):
        if value is not None:
            return _parameters.json_format(value, name, value.get("schema") if isinstance(value, Mapping) else None)
    return []


class _History:
    """The messages so far, and the turn that is being assembled."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._user_parts: list[Part] = []  # the open turn of a user
        self._text: list[str] = []  # this and the next two: the open turn of the assistant
        self._thought: list[str] = []
        self._calls: list[Json] = []
        self._is_assistant = False  # whether such a turn is open; it may be empty

    def system(self, text: str) -> None:
        self._close_user()
        self._close_assistant()
        self._messages.append({"role": "system", "content": text})

    def take(self, message: Mapping[str, Json], at: str) -> None:
        role, content = message.get("role"), message.get("content")
        if role == "system":
            self.system(_texts(content, f"{at}.content"))
        elif role == "user":
            self._close_assistant()
            blocks = _blocks(content, f"{at}.content")
            if not blocks:
                raise _wrong(f"{at}.content", "a user's message must not be empty")
            for block, where in blocks:
                self._user(block, where)
        elif role == "assistant":
            self._close_user()
            self._is_assistant = True
            for block, where in _blocks(content, f"{at}.content"):
                self._assistant(block, where)
        else:
            raise _wrong(f"{at}.role", "it must be user, assistant or system")

    def finish(self) -> tuple[Message, ...]:
        if self._is_assistant:
            raise _wrong(
                "messages", "a prefill of the assistant's turn is not supported: the last message must be a user's"
            )
        self._close_user()
        if not any(message["role"] != "system" for message in self._messages):
            raise _wrong("messages", "at least one message is required")
        return tuple(self._messages)

    def _user(self, block: Mapping[str, Json], at: str) -> None:
        if block.get("type") != "tool_result":
            self._user_parts.append(_part(block, at))
            return
        self._close_user()
        parts = [_part(inner, where) for inner, where in _blocks(block.get("content") or "", f"{at}.content")]
        if block.get("is_error") is True and not (parts and _is_marked(parts[0])):
            first = parts[0] if parts and isinstance(parts[0], str) else ""
            parts = [f"Error: {first}".rstrip(" "), *(parts[1:] if first else parts)]
        call_id = _own_id(_string(block, "tool_use_id", at))
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(parts)})

    def _assistant(self, block: Mapping[str, Json], at: str) -> None:
        kind = block.get("type")
        if kind == "text":
            self._text.append(_string(block, "text", at))
        elif kind == "thinking":
            self._thought.append(_string(block, "thinking", at))
        elif kind == "tool_use":
            arguments = json.dumps(_mapping(block.get("input"), f"{at}.input"), ensure_ascii=False)
            function: Json = {"name": _string(block, "name", at), "arguments": arguments}
            self._calls.append({"id": _own_id(_string(block, "id", at)), "type": "function", "function": function})
        else:
            raise _not_offered(block, at)

    def _close_user(self) -> None:
        if self._user_parts:
            self._messages.append({"role": "user", "content": _content(self._user_parts)})
            self._user_parts = []

    def _close_assistant(self) -> None:
        if not self._is_assistant:
            return
        message: dict[str, Json] = {"role": "assistant", "content": "".join(self._text)}
        if self._thought:
            message["reasoning_content"] = "".join(self._thought)
        if self._calls:
            message["tool_calls"] = self._calls
        self._messages.append(message)
        self._text, self._thought, self._calls, self._is_assistant = [], [], [], False


# --- blocks ---


def _blocks(content: Json, at: str) -> list[tuple[Mapping[str, Json], str]]:
    if isinstance(content, str):
        return [({"type": "text", "text": content}, at)] if content else []
    return [(_mapping(block, f"{at}.{i}"), f"{at}.{i}") for i, block in enumerate(_list(content, at))]


def _texts(content: Json, at: str) -> str:
    parts: list[str] = []
    for block, where in _blocks(content, at):
        if block.get("type") != "text":
            raise _not_offered(block, where)
        parts.append(_string(block, "text", where))
    return "\n".join(parts)


def _part(block: Mapping[str, Json], at: str) -> Part:
    kind = block.get("type")
    if kind == "text":
        return _string(block, "text", at)
    if kind != "image":
        raise _not_offered(block, at)
    source = _mapping(block.get("source"), f"{at}.source")
    if source.get("type") == "base64":
        media, data = _string(source, "media_type", f"{at}.source"), _string(source, "data", f"{at}.source")
        return {"type": "image_url", "image_url": {"url": f"data:{media};base64,{data}"}}
    if source.get("type") == "url":
        return {"type": "image_url", "image_url": {"url": _string(source, "url", f"{at}.source")}}
    raise _not_offered(source, f"{at}.source")


def _content(parts: Sequence[Part]) -> Json:
    if any(not isinstance(part, str) for part in parts):
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return "\n".join(part for part in parts if isinstance(part, str))


def _is_marked(part: Part) -> bool:
    """Whether the text of a failed result already marks the error. Claude Code's does: `Error: …`,
    `<tool_use_error>…`."""
    return isinstance(part, str) and part.lstrip("< ").lower().startswith(("error", "tool_use_error"))


def _own_id(tool_use_id: str) -> str:
    match = _TOOL_USE_ID.fullmatch(tool_use_id)
    return match[1] if match else tool_use_id


# --- tools ---


def _tool(tool: Mapping[str, Json], at: str) -> ToolSchema | str:
    """Returns the tool's schema in chat format, or the name under which it is overridden."""
    if tool.get("type") not in (None, "custom"):
        return "tools.type"
    if tool.get("defer_loading") is True:
        return "tools.defer_loading"
    function: dict[str, Json] = {"name": _string(tool, "name", at)}
    if tool.get("description") is not None:
        function["description"] = _string(tool, "description", at)
    function["parameters"] = _mapping(tool.get("input_schema"), f"{at}.input_schema")
    return {"type": "function", "function": function}


def _choice(choice: Json) -> tuple[str, Json]:
    """Returns auto, none, any, or tool with its name; "other" for a choice that is not supported."""
    if choice is None:
        return "auto", None
    choice = _mapping(choice, "tool_choice")
    kind = choice.get("type")
    is_one = choice.get("disable_parallel_tool_use") is True and kind != "tool"  # "tool" is one call in any case
    return (kind if kind in ("auto", "none", "any", "tool") and not is_one else "other"), choice.get("name")


# --- shapes ---


def _mapping(value: Json, at: str) -> Mapping[str, Json]:
    if not isinstance(value, Mapping):
        raise _wrong(at, "it must be an object")
    return value


def _list(value: Json, at: str) -> Sequence[Json]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong(at, "it must be a list")
    return value


def _string(block: Mapping[str, Json], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{at}.{name}", "it must be a string")
    return value


def _wrong(at: str, why: str) -> Problem:
    return Problem("invalid", f"{at}: {why}", param=at)


def _not_offered(block: Mapping[str, Json], at: str) -> Problem:
    kind = block.get("type")
    named = f"{kind[:64]!r}" if isinstance(kind, str) else "(missing)"
    return Problem("invalid", f"{at}: a block of type {named} is not supported", code="not_offered", param=at)
