"""Clients of the gateway in each dialect that keep their history as real ones do: they store what they received, whole
or streamed, and send it back in their own encoding.

An encoding (`Style`) changes what has no meaning: ids of calls, null fields, the formatting of arguments, text in
parts, a turn in several messages. The content stays: `content_key` is equal for two histories exactly if their content
is.

The three are in one long file, since they are one client written three times and are best read side by side.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

SHELL: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "all": {"type": "boolean", "default": False}},
}
ABOUT = "Runs a command."


@dataclass(frozen=True)
class Style:
    has_other_ids: bool = False
    has_nulls: bool = False
    is_reformatted: bool = False  # the JSON formatting of arguments, or the order of their keys
    is_in_parts: bool = False


@dataclass(frozen=True)
class InputMessage:
    """A message of the system or a user."""

    role: str
    text: str


@dataclass(frozen=True)
class Results:
    """The results of the calls of the preceding answer, in order."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """A reply as a client received it. `items` are those of the Responses API, with their ids."""

    id: str
    content: str
    reasoning: str
    calls: tuple[Call, ...]
    items: tuple[dict[str, Any], ...] = ()

    def without_reasoning(self) -> Answer:
        return replace(self, reasoning="", items=tuple(item for item in self.items if item["type"] != "reasoning"))

    @property
    def content_key(self) -> tuple[Any, ...]:
        return (self.content, self.reasoning, [[call.name, normalized(call.arguments)] for call in self.calls])


History = tuple[InputMessage | Results | Answer, ...]


def content_key(history: History, *, has_reasoning: bool = True) -> str:
    """Returns a key of a history's content, independent of its encoding."""
    return json.dumps([_entry_key(entry, has_reasoning) for entry in history])


def _entry_key(entry: InputMessage | Results | Answer, has_reasoning: bool) -> Sequence[Any]:
    if isinstance(entry, InputMessage):
        return (entry.role, entry.text)
    if isinstance(entry, Results):
        return ("results", *entry.texts)
    return entry.content_key if has_reasoning else entry.without_reasoning().content_key


def normalized(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments


class Client(Protocol):
    path: str

    def body(self, history: History, style: Style, *, max_tokens: int, is_stream: bool) -> dict[str, Any]: ...

    def read(self, raw: bytes, *, is_stream: bool) -> Answer: ...


class ChatClient:
    """Keeps its history like litellm and OpenAI's SDK: one message per turn."""

    path = "/v1/chat/completions"

    def body(self, history: History, style: Style, *, max_tokens: int, is_stream: bool) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        ids: list[str] = []
        for at, entry in enumerate(history):
            if isinstance(entry, InputMessage):
                messages.append({"role": entry.role, "content": _parts(entry.text, "text", style)})
            elif isinstance(entry, Results):
                for call_id, text in zip(ids, entry.texts, strict=True):
                    messages.append({"role": "tool", "tool_call_id": call_id, "content": _parts(text, "text", style)})
            else:
                ids = _ids(entry, style, at)
                messages.append(self._assistant(entry, ids, style))
        function = {"name": "shell", "description": ABOUT, "parameters": SHELL}
        tools = [{"type": "function", "function": function}]
        body = {"model": "m", "messages": messages, "tools": tools, "max_tokens": max_tokens}
        return {**body, "stream": True} if is_stream else body

    def _assistant(self, answer: Answer, ids: Sequence[str], style: Style) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": _parts(answer.content, "text", style)}
        if answer.reasoning:
            message["reasoning" if style.is_in_parts else "reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _arguments(call, style)},
                }
                for call_id, call in zip(ids, answer.calls, strict=True)
            ]
        if style.has_nulls:
            message = {"refusal": None, "audio": None, "function_call": None, "annotations": [], **message}
            message["content"] = message["content"] or None
        return message

    def read(self, raw: bytes, *, is_stream: bool) -> Answer:
        if not is_stream:
            reply = json.loads(raw)
            message = reply["choices"][0]["message"]
            calls = [
                Call(call["id"], call["function"]["name"], call["function"]["arguments"])
                for call in message.get("tool_calls") or ()
            ]
            thought = message.get("reasoning_content") or ""
            return Answer(reply["id"], message["content"] or "", thought, tuple(calls))
        assert raw.endswith(b"data: [DONE]\n\n")
        reply_id, content, reasoning = "", "", ""
        parts: dict[int, list[str]] = {}
        for chunk in _events(raw):
            reply_id = chunk["id"]
            for choice in chunk["choices"]:
                delta = choice["delta"]
                content += delta.get("content") or ""
                reasoning += delta.get("reasoning_content") or ""
                for call in delta.get("tool_calls") or ():
                    one = parts.setdefault(call["index"], ["", "", ""])
                    one[0] += call.get("id") or ""
                    one[1] += call["function"].get("name") or ""
                    one[2] += call["function"].get("arguments") or ""
        return Answer(reply_id, content, reasoning, tuple(Call(*parts[at]) for at in sorted(parts)))


class ResponsesClient:
    """Keeps its history like codex: items, stored as they were completed; without their ids in another style."""

    path = "/v1/responses"

    def body(self, history: History, style: Style, *, max_tokens: int, is_stream: bool) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        other_fields: dict[str, Any] = {}
        ids: list[str] = []
        for at, entry in enumerate(history):
            if isinstance(entry, InputMessage) and entry.role == "system":
                other_fields["instructions"] = entry.text
            elif isinstance(entry, InputMessage):
                content = _parts(entry.text, "input_text", style)
                items.append({"type": "message", "role": entry.role, "content": content})
            elif isinstance(entry, Results):
                outputs = [
                    {"type": "function_call_output", "call_id": call_id, "output": text}
                    for call_id, text in zip(ids, entry.texts, strict=True)
                ]
                _behind_calls(items, outputs, is_mixed=style.has_nulls and not style.has_other_ids)
            else:
                ids = _ids(entry, style, at)
                items += self._turn(entry, iter(ids), style)
        tool = {"type": "function", "name": "shell", "description": ABOUT, "parameters": SHELL, "strict": False}
        body = {
            "model": "m",
            "input": items,
            "tools": [tool],
            "max_output_tokens": max_tokens,
            "store": False,
            **other_fields,
        }
        if style.is_in_parts:
            body["include"] = ["reasoning.encrypted_content"]
        return {**body, "stream": True} if is_stream else body

    def _turn(self, answer: Answer, ids: Iterable[str], style: Style) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        names = iter(ids)
        # without ids, reasoning after text is read as the next turn's: the two cannot be distinguished
        has_ids = not style.has_other_ids or any(item["type"] == "reasoning" for item in answer.items[1:])
        for stored in answer.items:
            item = dict(stored)
            if not has_ids:
                del item["id"]
            if style.has_nulls:
                item |= {"status": None, "phase": None}
            if item["type"] == "function_call":
                item["call_id"] = next(names)
                item["arguments"] = _arguments(Call("", "", item["arguments"]), style)
            elif item["type"] == "message" and not style.is_in_parts:
                item["content"] = "".join(part["text"] for part in item["content"])
            elif item["type"] == "reasoning" and "encrypted_content" in item:
                item["content"] = None  # a client that keeps the sealed text keeps nothing else
            items.append(item)
        return items

    def read(self, raw: bytes, *, is_stream: bool) -> Answer:
        if is_stream:
            events = list(_events(raw))
            assert events[-1]["type"] in ("response.completed", "response.incomplete")
            reply_id = events[-1]["response"]["id"]
            items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        else:
            reply = json.loads(raw)
            reply_id, items = reply["id"], reply["output"]
        content = "".join(p["text"] for item in items if item["type"] == "message" for p in item["content"])
        reasoning = "".join(p["text"] for item in items if item["type"] == "reasoning" for p in item["content"])
        calls = [
            Call(item["call_id"], item["name"], item["arguments"]) for item in items if item["type"] == "function_call"
        ]
        return Answer(reply_id, content, reasoning, tuple(calls), tuple(items))


class MessagesClient:
    """Keeps its history like Claude Code: content blocks, in one message or in one message each."""

    path = "/v1/messages"

    def body(self, history: History, style: Style, *, max_tokens: int, is_stream: bool) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        other_fields: dict[str, Any] = {}
        ids: list[str] = []
        for at, entry in enumerate(history):
            if isinstance(entry, InputMessage) and entry.role == "system":
                other_fields["system"] = [{"type": "text", "text": entry.text}] if style.is_in_parts else entry.text
            elif isinstance(entry, InputMessage):
                content = [{"type": "text", "text": entry.text}] if style.is_in_parts else entry.text
                messages.append({"role": "user", "content": content})
            elif isinstance(entry, Results):
                blocks = [
                    {
                        "type": "tool_result",
                        "tool_use_id": call_id,
                        "content": [{"type": "text", "text": text}] if style.is_in_parts else text,
                    }
                    for call_id, text in zip(ids, entry.texts, strict=True)
                ]
                messages.append({"role": "user", "content": blocks})
            else:
                ids = _ids(entry, style, at)
                blocks = self._blocks(entry, ids, style)
                if style.has_nulls and blocks:  # one block per message
                    messages += [{"role": "assistant", "content": [block]} for block in blocks]
                else:
                    messages.append({"role": "assistant", "content": blocks})
        tools = [{"name": "shell", "description": ABOUT, "input_schema": SHELL}]
        body = {"model": "m", "messages": messages, "tools": tools, "max_tokens": max_tokens, **other_fields}
        return {**body, "stream": True} if is_stream else body

    def _blocks(self, answer: Answer, ids: Sequence[str], style: Style) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if answer.reasoning:
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": "c2ln"})
        if answer.content:
            blocks.append({"type": "text", "text": answer.content})
        for call_id, call in zip(ids, answer.calls, strict=True):
            arguments = json.loads(_arguments(call, style))
            blocks.append({"type": "tool_use", "id": call_id, "name": call.name, "input": arguments})
        if style.has_nulls:
            blocks = [{**block, "cache_control": None} for block in blocks]
        return blocks

    def read(self, raw: bytes, *, is_stream: bool) -> Answer:
        if is_stream:
            reply_id, blocks = self._streamed(raw)
        else:
            reply = json.loads(raw)
            reply_id, blocks = reply["id"], reply["content"]
        content = "".join(block["text"] for block in blocks if block["type"] == "text")
        reasoning = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        calls = [
            Call(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))
            for block in blocks
            if block["type"] == "tool_use"
        ]
        return Answer(reply_id, content, reasoning, tuple(calls))

    def _streamed(self, raw: bytes) -> tuple[str, list[dict[str, Any]]]:
        events = list(_events(raw))
        assert events[-1]["type"] == "message_stop"
        blocks: list[dict[str, Any]] = []
        partial_json = ""
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(dict(event["content_block"]))
                partial_json = ""
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                partial_json += delta.get("partial_json", "")
                for name in ("text", "thinking", "signature"):
                    if name in delta:
                        blocks[-1][name] += delta[name]
            elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(partial_json or "{}")
        return events[0]["message"]["id"], blocks


CLIENTS: dict[str, Client] = {"chat": ChatClient(), "responses": ResponsesClient(), "messages": MessagesClient()}


def _events(raw: bytes) -> Iterable[dict[str, Any]]:
    """Splits at newlines only: U+2028 and the like are not escaped in JSON."""
    for line in raw.split(b"\n"):
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _ids(answer: Answer, style: Style, at: int) -> list[str]:
    if style.has_other_ids:
        return [f"other_{at}_{index}" for index in range(len(answer.calls))]
    return [call.id for call in answer.calls]


def _parts(text: str, kind: str, style: Style) -> Any:
    if not style.is_in_parts:
        return text
    middle = len(text) // 2
    return [{"type": kind, "text": text[:middle]}, {"type": kind, "text": text[middle:]}]


def _arguments(call: Call, style: Style) -> str:
    if not style.is_reformatted:
        return call.arguments
    try:
        return json.dumps(json.loads(call.arguments), indent=1, sort_keys=True)
    except ValueError:
        return call.arguments


def _behind_calls(items: list[dict[str, Any]], outputs: list[dict[str, Any]], *, is_mixed: bool) -> None:
    """Places outputs after the turn, or each directly after its call."""
    if not is_mixed:
        items += outputs
        return
    for output in outputs:
        called = [item.get("call_id") if item["type"] == "function_call" else None for item in items]
        at = len(called) - 1 - called[::-1].index(output["call_id"])
        items.insert(at + 1, output)
