"""Anthropic Messages, as Anthropic's SDKs and Claude Code use it: writes replies, streams and errors.
`_messages_request.py` reads requests and documents which parameters are refused, overridden and ignored.

A turn is returned as a `thinking` block, a `text` block and `tool_use` blocks. A stream sends them in the order of
sampling, so text between two calls is a separate block. Thinking is returned even if it was not requested: a client
that does not receive it cannot send it back, and the model would then see a history other than its own.

Usage is counted as Anthropic does: `input_tokens` are those that were not cached. A stream begins before the engine has
reported what it had cached, so `message_delta`, at its end, repeats all of the usage.

A call's input is an object in this dialect, so other arguments cannot be returned as a call (`takes_raw_arguments`).
Numbers beyond a float's range, which JSON can represent and clients cannot read, become the largest float.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import orjson

from rollyard.core import Json
from rollyard.gateway.base import ChatRequest, Event, Finish, Problem, ProblemKind, Reasoning, Reply, Text, Usage
from rollyard.gateway.dialects import _messages_request
from rollyard.tokens.base import ToolCall

SIGNATURE: Final = "cm9sbHlhcmQ="
"""The signature of every thinking block. Clients send it back, and some drop a block that has none. It is never
checked."""

_STOP_REASONS: Final[Mapping[Finish, str]] = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}

_ERROR_TYPES: Final[Mapping[ProblemKind, str]] = {
    "invalid": "invalid_request_error",
    "context": "invalid_request_error",
    "limit": "invalid_request_error",
    "too_large": "request_too_large",
    "not_found": "not_found_error",
    "unauthorized": "authentication_error",
    "unavailable": "api_error",  # not overloaded_error: clients would retry in vain
    "internal": "api_error",
}


class Messages:
    """The dialect of Anthropic Messages."""

    name = "messages"
    takes_raw_arguments = False

    def read(self, body: Mapping[str, Json]) -> ChatRequest:
        return _messages_request.read(body)

    def reply(self, request: ChatRequest, reply: Reply) -> bytes:
        content: list[Json] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": SIGNATURE})
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        for call in reply.calls:
            block = {"type": "tool_use", "id": _tool_use_id(reply.id, call), "name": call.name}
            content.append({**block, "input": orjson.Fragment(_arguments(call).encode())})
        message = _message(request, reply.id, content, _stop_reason(reply), _usage(reply.usage))
        message["stop_sequence"] = reply.stop_sequence
        return orjson.dumps(message | ({"warnings": reply.warnings} if reply.warnings else {}))

    def writer(self, request: ChatRequest, reply_id: str, created: int, prompt_tokens: int) -> MessagesWriter:
        return MessagesWriter(request, reply_id, prompt_tokens)

    def error(self, problem: Problem) -> bytes:
        return orjson.dumps(_error_body(problem))


class MessagesWriter:
    """Writes one stream. At most one block is open at a time; it is closed before the next one begins."""

    def __init__(self, request: ChatRequest, reply_id: str, prompt_tokens: int) -> None:
        self._request, self._id, self._prompt_tokens = request, reply_id, prompt_tokens
        self._open: Literal["thinking", "text"] | None = None
        self._index = 0

    def begin(self) -> bytes:
        usage = _usage(Usage(prompt_tokens=self._prompt_tokens))
        return _sse("message_start", message=_message(self._request, self._id, [], None, usage))

    def event(self, event: Event) -> bytes:
        if isinstance(event, ToolCall):
            return self._call(event)
        if not event.text:
            return b""  # a client could not send an empty block back
        match event:
            case Text(text):
                opened = self._opened("text", {"type": "text", "text": ""})
                return opened + self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                opened = self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return opened + self._delta({"type": "thinking_delta", "thinking": text})

    def end(self, reply: Reply) -> bytes:
        delta = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_sequence}
        return self._closed() + _sse("message_delta", delta=delta, usage=_usage(reply.usage)) + _sse("message_stop")

    def error(self, problem: Problem) -> bytes:
        return b"event: error\ndata: " + orjson.dumps(_error_body(problem)) + b"\n\n"

    def keep_alive(self) -> bytes:
        return _sse("ping")

    def _call(self, call: ToolCall) -> bytes:
        block = {"type": "tool_use", "id": _tool_use_id(self._id, call), "name": call.name, "input": {}}
        out = self._closed() + _sse("content_block_start", index=self._index, content_block=block)
        out += self._delta({"type": "input_json_delta", "partial_json": _arguments(call)})
        return out + self._stop()

    def _opened(self, kind: Literal["thinking", "text"], block: Json) -> bytes:
        if self._open == kind:
            return b""
        closed = self._closed()
        self._open = kind
        return closed + _sse("content_block_start", index=self._index, content_block=block)

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        signature: Json = {"type": "signature_delta", "signature": SIGNATURE}
        signed = self._delta(signature) if self._open == "thinking" else b""
        self._open = None
        return signed + self._stop()

    def _delta(self, delta: Json) -> bytes:
        return _sse("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> bytes:
        self._index += 1
        return _sse("content_block_stop", index=self._index - 1)


def _stop_reason(reply: Reply) -> str:
    return _STOP_REASONS[reply.finish] if reply.stop_sequence is None else "stop_sequence"


def _sse(kind: str, **fields: Json) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def _message(
    request: ChatRequest, reply_id: str, content: Sequence[Json], stop_reason: str | None, usage: Json
) -> dict[str, Json]:
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": usage,
    }


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _error_body(problem: Problem) -> Json:
    message, kind = problem.message, _ERROR_TYPES[problem.kind]
    if problem.kind == "context":
        # Claude Code parses the two numbers in exactly this sentence, and then compacts its history.
        if problem.used_tokens is not None and problem.max_tokens is not None:
            message = f"prompt is too long: {problem.used_tokens} tokens > {problem.max_tokens} maximum"
        else:
            message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


def _tool_use_id(reply_id: str, call: ToolCall) -> str:
    """Returns an id that is unique in the rollout, unlike a call's own id; `_messages_request` parses it."""
    return f"toolu_{reply_id}_{call.id}"


def _arguments(call: ToolCall) -> str:
    """Serializes a call's arguments. Not with orjson: a model may write integers of any length."""
    try:
        return json.dumps(call.arguments or {}, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(call.arguments), ensure_ascii=False)


def _finite(value: Json) -> Json:
    if isinstance(value, float) and math.isinf(value):
        return math.copysign(sys.float_info.max, value)
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
