"""OpenAI Chat Completions, as OpenAI's SDK, litellm and most agent programs use it.

A message is read with its role, its text and the fields of its role (`name`, `tool_calls`, `reasoning_content`,
`tool_call_id`); null fields, and fields that do not affect the model, are dropped. `reasoning` (vLLM's name) is read as
`reasoning_content` (litellm's and DeepSeek's), which is also the name in replies.

Parameters are:

- honoured: messages, model (echoed), tools, max_tokens and max_completion_tokens (the lesser), stream,
  stream_options.include_usage;
- granted where possible (`gateway/parameters.py`): stop, seed, logprobs, top_logprobs, tool_choice, response_format;
- overridden by the task's sampling: those in `OVERRULED` of `_chat_request.py`, a tool_choice of allowed
  tools, and a temperature, top_p or top_k that is not the task's;
- refused, since the reply cannot have the requested form: n other than 1, functions and function_call (and the
  messages that go with them), custom tools, modalities other than text, audio and files in messages,
  continue_final_message, echo;
- without effect: metadata, user, store, service_tier, prompt_cache_key, prediction, …; unknown: everything else.

Invariant: a reply or a stream, sent back as a message of the assistant, is read as the same turn. The texts of `error`
match what clients parse: litellm recognizes a context overflow by OpenAI's sentence, and treats any
`invalid_request_error` as a 400, so errors with other statuses have another type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rollyard.core import Json
from rollyard.gateway.base import ChatRequest, Event, Problem, ProblemKind, Reasoning, Reply, Text, TokenLogprob, Usage
from rollyard.gateway.dialects import _chat_request
from rollyard.tokens.base import ToolCall

_TYPES: Mapping[ProblemKind, str] = {
    "not_found": "not_found_error",
    "unauthorized": "authentication_error",
    "unavailable": "server_error",
    "internal": "server_error",
}


class Chat:
    """The dialect of OpenAI Chat Completions."""

    name = "chat"
    takes_raw_arguments = True

    def read(self, body: Mapping[str, Json]) -> ChatRequest:
        return _chat_request.read(body)

    def reply(self, request: ChatRequest, reply: Reply) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["content"] = reply.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
                for call in reply.calls
            ]
        return orjson.dumps(
            {
                "id": f"chatcmpl-{reply.id}",
                "object": "chat.completion",
                "created": reply.created,
                "model": request.model,
                "choices": [
                    {"index": 0, "message": message, "logprobs": _logprobs(reply), "finish_reason": reply.finish}
                ],
                "usage": _usage(reply.usage),
                "system_fingerprint": None,
                **({"warnings": reply.warnings} if reply.warnings else {}),
            }
        )

    def writer(self, request: ChatRequest, reply_id: str, created: int, prompt_tokens: int) -> ChatWriter:
        return ChatWriter(request.model, reply_id, created, has_usage=bool(request.options.get("include_usage")))

    def error(self, problem: Problem) -> bytes:
        return orjson.dumps({"error": _error(problem)})


class ChatWriter:
    """Writes one streamed reply. All chunks have the same beginning and end; only the delta is serialized for each."""

    def __init__(self, model: str, reply_id: str, created: int, *, has_usage: bool) -> None:
        head = {"id": f"chatcmpl-{reply_id}", "object": "chat.completion.chunk", "created": created, "model": model}
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"system_fingerprint":null,"choices":['
        self._tail = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"
        self._before = self._head + b'{"index":0,"delta":'
        self._after = b',"logprobs":null,"finish_reason":null}' + self._tail
        self._has_usage = has_usage
        self._calls = 0

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def event(self, event: Event) -> bytes:
        if isinstance(event, Text):
            return self._chunk({"content": event.text})
        if isinstance(event, Reasoning):
            return self._chunk({"reasoning_content": event.text})
        index, self._calls = self._calls, self._calls + 1
        named = {"index": index, "id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
        arguments = {"index": index, "function": {"arguments": _arguments(event)}}
        return self._chunk({"tool_calls": [named]}) + self._chunk({"tool_calls": [arguments]})

    def end(self, reply: Reply) -> bytes:
        finish = orjson.dumps({"index": 0, "delta": {}, "logprobs": _logprobs(reply), "finish_reason": reply.finish})
        data = self._head + finish + self._tail
        if self._has_usage:
            data += self._head + b'],"usage":' + orjson.dumps(_usage(reply.usage)) + b"}\n\n"
        return data + b"data: [DONE]\n\n"

    def error(self, problem: Problem) -> bytes:
        return b"data: " + orjson.dumps({"error": _error(problem)}) + b"\n\n"

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def _chunk(self, delta: Mapping[str, Any]) -> bytes:
        return self._before + orjson.dumps(delta) + self._after


def models_body(names: Sequence[str]) -> bytes:
    """Returns the response to `GET /v1/models`: one body that both OpenAI's and Anthropic's SDKs can parse."""
    first, last = (names[0], names[-1]) if names else (None, None)
    models = [_model(name) for name in names]
    return orjson.dumps({"object": "list", "data": models, "has_more": False, "first_id": first, "last_id": last})


def model_body(name: str) -> bytes:
    """Returns the response to `GET /v1/models/NAME`, for both SDKs. Any name denotes the rollout's one policy."""
    return orjson.dumps(_model(name))


def _model(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "rollyard",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


# --- writing ---


def _arguments(call: ToolCall) -> str:
    """Serializes a call's arguments as in the recorded message (`tokens.calls.assistant_message`), so the texts are
    equal."""
    if call.arguments is None:
        return call.raw
    return json.dumps(call.arguments, ensure_ascii=False, separators=(", ", ": "))


def _logprobs(reply: Reply) -> dict[str, Any] | None:
    """Returns the logprobs of all sampled tokens, including reasoning and calls. A stream sends them at its end."""
    if reply.logprobs is None:
        return None
    return {"content": [logprob_of(it) for it in reply.logprobs], "refusal": None}


def logprob_of(it: TokenLogprob) -> dict[str, Any]:
    return {**_named(it), "top_logprobs": [_named(top) for top in it.top]}


def _named(it: TokenLogprob) -> dict[str, Any]:
    is_part = "�" in it.token  # of a character: its own bytes are not known
    return {"token": it.token, "logprob": it.logprob, "bytes": None if is_part else list(it.token.encode())}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _error(problem: Problem) -> dict[str, Any]:
    message, code, param = problem.message, problem.code, problem.param
    if problem.kind == "context":
        message, code, param = _overflow(problem), "context_length_exceeded", param or "messages"
    return {"message": message, "type": _TYPES.get(problem.kind, "invalid_request_error"), "param": param, "code": code}


def _overflow(problem: Problem) -> str:
    """Returns OpenAI's sentence: clients search it for "maximum context length is"."""
    if problem.max_tokens is None or problem.used_tokens is None:
        return f"This model's maximum context length is exceeded. {problem.message}"
    return (
        f"This model's maximum context length is {problem.max_tokens} tokens. However, your messages resulted in "
        f"{problem.used_tokens} tokens. Please reduce the length of the messages."
    )
