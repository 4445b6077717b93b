"""Writes replies of the Responses API: output items, the response that contains them, and the events of a stream.

Invariants. A stream adds up to the unstreamed reply of the same turn: the deltas of an item form its text, and the last
event contains all items. An empty turn has an empty message, so that the client's history contains it. The response
contains the values that were applied: the task's sampling overrides the request's, so no temperature is echoed.
"""

from __future__ import annotations

from typing import Any

import orjson

from rollyard.gateway.base import ChatRequest, Event, Problem, Reasoning, Reply, Text
from rollyard.gateway.dialects._responses_calls import call_item
from rollyard.gateway.dialects._responses_input import item_id, seal
from rollyard.gateway.dialects.chat import logprob_of
from rollyard.tokens.base import ToolCall


def error_of(problem: Problem) -> dict[str, Any]:
    """Returns the `error` of OpenAI's responses. Programs look for `context_length_exceeded`."""
    code = "context_length_exceeded" if problem.kind == "context" else problem.code
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    return {"message": problem.message, "type": kind, "param": problem.param, "code": code}


def response_of(request: ChatRequest, reply: Reply) -> dict[str, Any]:
    """Returns a completed turn as one response."""
    output: list[dict[str, Any]] = []
    if reply.reasoning:
        output.append(_reasoning(request, reply.id, 0, reply.reasoning, "completed"))
    if reply.content or not reply.calls:
        status = "completed" if reply.calls else _status(reply)
        output.append(_message(reply.id, len(output), reply.content, status, _logprobs(reply)))
    for call in reply.calls:
        output.append(_call(request, reply.id, len(output), call, "completed"))
    return _ended(request, reply, output)


def _logprobs(reply: Reply) -> list[dict[str, Any]]:
    """Returns the logprobs of all sampled tokens, including reasoning and calls."""
    return [logprob_of(it) for it in reply.logprobs or ()]


def _status(reply: Reply) -> str:
    return "incomplete" if reply.finish == "length" else "completed"


def _ended(request: ChatRequest, reply: Reply, output: list[dict[str, Any]]) -> dict[str, Any]:
    response = _response(request, reply.id, reply.created)
    usage = reply.usage
    response |= {"output": output, "status": _status(reply)}
    if reply.finish == "length":
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    response["usage"] = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if reply.warnings:
        response["warnings"] = reply.warnings
    return response


def _response(request: ChatRequest, reply_id: str, created: int) -> dict[str, Any]:
    echo = request.options
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": echo.get("instructions"),
        "max_output_tokens": request.max_tokens,
        "metadata": echo.get("metadata") or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": echo.get("tools") or [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def _reasoning(request: ChatRequest, reply_id: str, index: int, text: str, status: str) -> dict[str, Any]:
    item: dict[str, Any] = {"id": f"rs_{item_id(reply_id, index)}", "type": "reasoning", "status": status}
    item["summary"] = []
    item["content"] = [{"type": "reasoning_text", "text": text}] if text else []
    if request.options.get("seals"):
        item["encrypted_content"] = seal(text)
    return item


def _message(
    reply_id: str, index: int, text: str | None, status: str, logprobs: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    content = [] if text is None else [_text_part(text, logprobs)]
    name = f"msg_{item_id(reply_id, index)}"
    return {"id": name, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def _call(request: ChatRequest, reply_id: str, index: int, call: ToolCall, status: str) -> dict[str, Any]:
    return {**call_item(call, request.options.get("offered") or {}, item_id(reply_id, index)), "status": status}


class ResponseStream:
    """Writes one streamed response. At most one item is open at a time."""

    def __init__(self, request: ChatRequest, reply_id: str, created: int) -> None:
        self._request, self._id, self._created = request, reply_id, created
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._open: type[Text] | type[Reasoning] | None = None
        self._pieces: list[str] = []

    def begin(self) -> bytes:
        response = _response(self._request, self._id, self._created)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def event(self, event: Event) -> bytes:
        if isinstance(event, ToolCall):
            return self._close() + self._tool_call(event)
        out = b""
        if self._open is not type(event):
            out = self._close() + self._begin(type(event))
        self._pieces.append(event.text)
        if self._open is Text:
            return out + self._part("response.output_text.delta", delta=event.text, logprobs=[])
        return out + self._part("response.reasoning_text.delta", delta=event.text)

    def end(self, reply: Reply) -> bytes:
        status = _status(reply)
        out = self._close(status) if self._open is Text else self._close()
        if all(item["type"] == "reasoning" for item in self._output):
            out += self._begin(Text) + self._close(status)
        message = next((item for item in self._output if item["type"] == "message"), None)
        if message is not None and message["content"]:
            message["content"][0]["logprobs"] = _logprobs(reply)
        response = _ended(self._request, reply, self._output)
        return out + self._event(f"response.{response['status']}", response=response)

    def error(self, problem: Problem) -> bytes:
        response = _response(self._request, self._id, self._created)
        error = error_of(problem)
        response |= {"status": "failed", "output": self._output}
        response["error"] = {"code": error["code"], "message": error["message"]}
        return self._event("response.failed", response=response)

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    # --- items ---

    def _begin(self, kind: type[Text] | type[Reasoning]) -> bytes:
        self._open, self._pieces = kind, []
        index = len(self._output)
        if kind is Text:
            item, part = _message(self._id, index, None, "in_progress"), _text_part("")
        else:
            item = _reasoning(self._request, self._id, index, "", "in_progress")
            part = {"type": "reasoning_text", "text": ""}
        self._output.append(item)
        return self._added(item) + self._part("response.content_part.added", part=part)

    def _close(self, status: str = "completed") -> bytes:
        """Ends the open item, if there is one."""
        if self._open is None:
            return b""
        text, index = "".join(self._pieces), len(self._output) - 1
        if self._open is Text:
            item = _message(self._id, index, text, status)
            out = self._part("response.output_text.done", text=text, logprobs=[])
        else:
            item = _reasoning(self._request, self._id, index, text, status)
            out = self._part("response.reasoning_text.done", text=text)
        part = item["content"][0] if item["content"] else {"type": "reasoning_text", "text": ""}
        out += self._part("response.content_part.done", part=part)
        self._open, self._output[-1] = None, item
        return out + self._item_done(item)

    def _tool_call(self, call: ToolCall) -> bytes:
        item = _call(self._request, self._id, len(self._output), call, "completed")
        field, name = _CALL_FIELDS.get(item["type"], ("", ""))
        self._output.append(item)
        started = {**item, "status": "in_progress"}
        if not field:
            return self._added(started) + self._item_done(item)
        where = {"item_id": item["id"], "output_index": len(self._output) - 1}
        out = self._added({**started, field: ""})
        out += self._event(f"response.{name}.delta", **where, delta=item[field])
        out += self._event(f"response.{name}.done", **where, **{field: item[field]})
        return out + self._item_done(item)

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _item_done(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _part(self, event: str, **data: Any) -> bytes:
        place = len(self._output) - 1
        return self._event(event, item_id=self._output[place]["id"], output_index=place, content_index=0, **data)

    def _event(self, event: str, **data: Any) -> bytes:
        body = orjson.dumps({"type": event, "sequence_number": self._sequence, **data})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (event.encode(), body)


_CALL_FIELDS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
