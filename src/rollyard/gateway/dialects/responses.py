"""OpenAI's Responses API: reads requests as `ChatRequest`s, and returns turns as `response` objects or events.

`_responses_input.py` reads the items of a conversation, `_responses_calls.py` tools and calls, and
`_responses_output.py` writes replies. This module reads the other parameters:

- honoured: `input`, `instructions` (a leading system message), `tools`, `max_output_tokens` (an upper bound), `model`
  (echoed), `stream`, `metadata` (echoed), `include` (of it `reasoning.encrypted_content`).
- granted where possible (`gateway/parameters.py`): `stop`, `seed`, `text.format`, `tool_choice`, `top_logprobs`,
  and of `include` `message.output_text.logprobs`.
- overridden by the task's, and listed in `ChatRequest.overruled`: `logit_bias`, the penalties, a `tool_choice` other
  than auto, none, required and one function, a `temperature`, `top_p` or `top_k` that is not the task's,
  `parallel_tool_calls: false`, `reasoning.effort`, `text.verbosity`, `truncation: auto` (a history is never truncated),
  `context_management`; of the tools, server-side ones, `strict` and grammars.
- refused: `previous_response_id`, `conversation`, `prompt` and references to items (nothing is stored by id; send the
  whole input, as with store=false), `background: true`, `n` above 1.
- accepted and without effect: `store`, `user`, `service_tier`, `prompt_cache_key`, `reasoning.summary`,
  `client_metadata`, `stream_options`…; all other parameters are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from rollyard.core import Json
from rollyard.gateway.base import ChatRequest, Problem, Reply, RequestParameter, Writer
from rollyard.gateway.counts import weigh
from rollyard.gateway.dialects import _parameters
from rollyard.gateway.dialects._responses_calls import Toolbox
from rollyard.gateway.dialects._responses_input import Transcript
from rollyard.gateway.dialects._responses_output import ResponseStream, error_of, response_of

_OVERRULED: Mapping[str, tuple[Json, ...]] = {  # with the values that have no effect
    "logit_bias": (None,),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "parallel_tool_calls": (None, True),
    "truncation": (None, "disabled"),
    "context_management": (None,),
}
_KNOWN = frozenset(
    (
        *("input", "instructions", "tools", "max_output_tokens", "model", "stream", "metadata", "include"),
        *("temperature", "top_p", "top_k", "seed", "stop", "reasoning", "text", "store", "user", "service_tier"),
        *("top_logprobs", "tool_choice"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "client_metadata", "stream_options"),
        *("max_tool_calls", *_OVERRULED),
    )
)
_LOGPROBS = "message.output_text.logprobs"
MOST_ECHO_BYTES = 64 << 10
_REFUSED: Mapping[str, tuple[Json, ...]] = {
    "previous_response_id": (None, ""),
    "conversation": (None,),
    "prompt": (None,),
    "background": (None, False),
    "n": (None, 1),
}


class Responses:
    """The dialect of OpenAI's Responses API."""

    name = "responses"
    takes_raw_arguments = True

    def read(self, body: Mapping[str, Json]) -> ChatRequest:
        for name, harmless in _REFUSED.items():
            if body.get(name) not in harmless:
                raise Problem(
                    "invalid", f"{name} is not supported here: {_INSTEAD.get(name, 'leave it out')}", param=name
                )
        toolbox = Toolbox()
        if body.get("tools") is not None:
            toolbox.read(body["tools"], "tools")
        transcript = Transcript(toolbox)
        instructions = body.get("instructions")
        if isinstance(instructions, str) and instructions:
            transcript.add_message("system", instructions)
        elif instructions:
            raise Problem("invalid", "instructions must be a string", param="instructions")
        if body.get("input") is not None:
            transcript.read(body["input"])
        if not transcript.messages:
            raise Problem("invalid", "input is missing", param="input")
        model, include, metadata = body.get("model"), body.get("include"), body.get("metadata")
        return ChatRequest(
            messages=transcript.messages,
            tools=tuple(toolbox.schemas),
            model=model if isinstance(model, str) else "",
            max_tokens=_count(body, "max_output_tokens"),
            is_stream=body.get("stream") is True,
            wishes=_wishes(body),
            overruled=(*_overruled(body), *dict.fromkeys(toolbox.overruled)),
            unknown=_parameters.unknown(body, _KNOWN | _REFUSED.keys()),
            options={
                "offered": toolbox.offered,
                "tools": _echo(body, "tools"),
                "instructions": _echo(body, "instructions"),
                "metadata": _echo(body, "metadata") if isinstance(metadata, Mapping) else None,
                "seals": isinstance(include, list) and "reasoning.encrypted_content" in include,
            },
        )

    def reply(self, request: ChatRequest, reply: Reply) -> bytes:
        return orjson.dumps(response_of(request, reply))

    def writer(self, request: ChatRequest, reply_id: str, created: int, prompt_tokens: int) -> Writer:
        return ResponseStream(request, reply_id, created)

    def error(self, problem: Problem) -> bytes:
        return orjson.dumps({"error": error_of(problem)})


_SEND_ALL = "nothing is stored by id; send the whole input with every request (store=false)"
_INSTEAD = {"previous_response_id": _SEND_ALL, "conversation": _SEND_ALL, "n": "a request has one reply"}


def _wishes(body: Mapping[str, Json]) -> tuple[RequestParameter, ...]:
    include, text = body.get("include"), body.get("text")
    format_ = text.get("format") if isinstance(text, Mapping) else None
    schema = format_.get("schema") if isinstance(format_, Mapping) else None
    wishes = [
        *_parameters.same(body),
        *_parameters.stop(body.get("stop"), "stop"),
        *_parameters.seed(body.get("seed")),
        *_parameters.json_format(format_, "text.format", schema),
    ]
    if isinstance(include, list) and _LOGPROBS in include:
        wishes.append(RequestParameter("logprobs", "include"))
    wishes += _parameters.top_logprobs(body.get("top_logprobs"))
    if body.get("tool_choice") == "none":
        wishes.append(RequestParameter("no_calls", "tool_choice"))
    return (*wishes, *(_forced(body.get("tool_choice")) or ()))


def _forced(choice: Json) -> list[RequestParameter] | None:
    if isinstance(choice, Mapping):
        return _parameters.calls(choice.get("type"), choice.get("name"))
    return _parameters.calls(choice, None)


def _overruled(body: Mapping[str, Json]) -> list[str]:
    names = [name for name, harmless in _OVERRULED.items() if body.get(name) not in harmless]
    reasoning, text, choice = body.get("reasoning"), body.get("text"), body.get("tool_choice")
    if choice not in (None, "auto", "none") and _forced(choice) is None:
        names.append("tool_choice")
    if isinstance(reasoning, Mapping) and reasoning.get("effort") is not None:
        names.append("reasoning.effort")
    if isinstance(text, Mapping) and text.get("verbosity") is not None:
        names.append("text.verbosity")
    return names


def _echo(body: Mapping[str, Json], name: str) -> orjson.Fragment | None:
    """Serializes a parameter for the response, once: a stream contains it three times. A long one is left out."""
    value = body.get(name)
    try:
        is_short = weigh(value)[0] <= MOST_ECHO_BYTES
        written = orjson.dumps(value) if value and is_short else b""
        return orjson.Fragment(written) if 0 < len(written) <= MOST_ECHO_BYTES else None
    except orjson.JSONEncodeError:  # orjson parses deeper nesting than it serializes, by a factor of four
        raise Problem("invalid", f"{name} is nested too deeply", param=name) from None


def _count(body: Mapping[str, Json], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Problem("invalid", f"{name} must be an integer above 0", param=name)
    return value
