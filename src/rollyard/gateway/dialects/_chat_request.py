"""Reads a request of Chat Completions, without a schema library since this is the hot path. `chat.py` documents how
each parameter is treated.

Problems name the field as OpenAI does ("messages[1].content"), with OpenAI's codes and messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollyard.core import Json, Message
from rollyard.gateway.base import ChatRequest, Problem, RequestParameter, shown
from rollyard.gateway.dialects import _parameters
from rollyard.tokens.base import ToolSchema

OVERRULED: Mapping[str, tuple[Json, ...]] = {
    "min_p": (),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "best_of": (1,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "reasoning": (),
    "thinking": (),
    "verbosity": (),
    "web_search_options": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
"""Parameters of OpenAI and vLLM that change the sampling or the prompt, each with the values that have no effect."""

KNOWN = frozenset(
    (
        *("messages", "model", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options"),
        *("temperature", "top_p", "top_k", "stop", "seed", "logprobs", "tool_choice", "response_format"),
        "top_logprobs",
        *("metadata", "user", "store", "service_tier", "prediction", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "cache_control", "include_reasoning", "skip_special_tokens", "drop_params"),
        *("spaces_between_special_tokens", "add_generation_prompt", "include_stop_str_in_output", "request_id"),
        *OVERRULED,
    )
)
"""All other parameters are reported as unknown. Those listed here but not used change neither prompt nor sampling."""

REFUSED: Mapping[str, tuple[tuple[Json, ...], str]] = {
    "n": ((1,), "there is one completion per request"),
    "modalities": ((["text"], []), "the model writes text only"),
    "functions": (([],), "it is deprecated: use 'tools'"),
    "function_call": (("none", "auto"), "it is deprecated: use 'tool_choice'"),
    "continue_final_message": ((False,), "a completion is always a new turn"),
    "echo": ((False,), "a completion never repeats its prompt"),
}
"""Parameters that require another form of reply, with the values that do not, and the reason of the refusal."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FUNCTION = (("name", str, "a string"), ("description", str, "a string"), ("parameters", dict, "an object"))


def read(body: Mapping[str, Json]) -> ChatRequest:
    overruled: list[str] = []
    for name, value in body.items():
        if value is None:
            continue
        if name in OVERRULED:
            if value not in OVERRULED[name]:
                overruled.append(name)
        elif name in REFUSED and value not in REFUSED[name][0]:
            raise _unsupported(name, REFUSED[name][1])
    messages = body.get("messages")
    if messages is None:
        raise _missing("messages")
    if not isinstance(messages, list):
        raise _wrong_type("messages", "an array of objects", messages)
    if not messages:
        raise _invalid("messages", "empty_array", "Invalid 'messages': expected at least one message.")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise _wrong_type("model", "a string", model)
    is_stream = _flag(body.get("stream"), "stream")
    wishes = _wishes(body, overruled)
    return ChatRequest(
        messages=tuple([_message(message, at) for at, message in enumerate(messages)]),
        tools=_tools(body.get("tools"), overruled),
        model=model or "",
        max_tokens=_max_tokens(body),
        is_stream=is_stream,
        overruled=tuple(overruled),  # after the tools, which may add to it
        options={"include_usage": _include_usage(body.get("stream_options"))} if is_stream else {},
        wishes=wishes,
        unknown=_parameters.unknown(body, KNOWN | REFUSED.keys()),
    )


def _wishes(body: Mapping[str, Json], overruled: list[str]) -> tuple[RequestParameter, ...]:
    format_ = body.get("response_format")
    inner = format_.get("json_schema") if isinstance(format_, dict) else None
    schema = inner.get("schema") if isinstance(inner, dict) else None
    wishes = [
        *_parameters.same(body),
        *_parameters.stop(body.get("stop"), "stop"),
        *_parameters.seed(body.get("seed")),
        *_parameters.json_format(format_, "response_format", schema),
    ]
    if _flag(body.get("logprobs"), "logprobs"):
        wishes += [RequestParameter("logprobs", "logprobs"), *_parameters.top_logprobs(body.get("top_logprobs"))]
    elif body.get("top_logprobs"):
        raise _invalid("top_logprobs", "invalid_value", "Invalid 'top_logprobs': it needs 'logprobs': true.")
    choice = body.get("tool_choice")
    if choice == "none":
        wishes.append(RequestParameter("no_calls", "tool_choice"))
    elif choice not in (None, "auto"):
        function = choice.get("function") if isinstance(choice, dict) else None
        kind = choice.get("type") if isinstance(choice, dict) else choice
        forced = _parameters.calls(kind, function.get("name") if isinstance(function, dict) else None)
        if forced is None:
            overruled.append("tool_choice")
        wishes += forced or ()
    return tuple(wishes)


# --- reading messages ---


def _message(message: Json, at: int) -> Message:
    if not isinstance(message, dict):
        raise _wrong_type(f"messages[{at}]", "an object", message)
    role = message.get("role")
    if role == "function":
        raise _unsupported(f"messages[{at}].role", "role 'function' is deprecated: use 'tool'")
    if role not in _ROLES:
        raise _missing(f"messages[{at}].role") if role is None else _unknown(f"messages[{at}].role", role, _ROLES)
    content = message.get("content")
    if not isinstance(content, str):
        content = _content(content, role, at)
    read: dict[str, Json] = {"role": role, "content": content}
    name = message.get("name")
    if name is not None:
        read["name"] = _text(name, at, "name")
    if role == "assistant":
        _assistant(message, read, at)
    elif role == "tool":
        read["tool_call_id"] = _text(message.get("tool_call_id"), at, "tool_call_id")
    return read


def _assistant(message: Mapping[str, Json], read: dict[str, Json], at: int) -> None:
    """Reads the fields that only an assistant's message has."""
    if message.get("function_call") is not None:
        raise _unsupported(f"messages[{at}].function_call", "it is deprecated: use 'tool_calls'")
    if message.get("audio") is not None:
        raise _unsupported(f"messages[{at}].audio", "the model reads text only")
    refusal = message.get("refusal")
    if refusal:
        _text(refusal, at, "refusal")
        content = read["content"]
        if isinstance(content, str):
            read["content"] = f"{content}{refusal}"
        else:
            read["content"] = [*content, {"type": "text", "text": refusal}]  # type: ignore[misc]
    for field in ("reasoning_content", "reasoning"):
        reasoning = message.get(field)
        if reasoning:
            read["reasoning_content"] = _text(reasoning, at, field)
            break
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise _wrong_type(f"messages[{at}].tool_calls", "an array of objects", calls)
    if calls:
        read["tool_calls"] = [_call(call, f"messages[{at}].tool_calls[{index}]") for index, call in enumerate(calls)]


def _call(call: Json, at: str) -> Json:
    if not isinstance(call, dict):
        raise _wrong_type(at, "an object", call)
    if call.get("type") not in (None, "function"):
        raise _unsupported(f"{at}.type", "only function calls are supported")
    function = call.get("function")
    if not isinstance(function, dict):
        raise _missing(f"{at}.function") if function is None else _wrong_type(f"{at}.function", "an object", function)
    name, arguments = function.get("name"), function.get("arguments")
    for field, value in (("id", call.get("id")), ("function.name", name), ("function.arguments", arguments)):
        if not isinstance(value, str):
            raise _missing(f"{at}.{field}") if value is None else _wrong_type(f"{at}.{field}", "a string", value)
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _content(content: Json, role: str, at: int) -> Json:
    """Reads content that is not a string: text parts are joined; a list of parts remains only if one of them is an
    image."""
    if content is None and role == "assistant":
        return ""
    if content is None:
        raise _missing(f"messages[{at}].content")
    if not isinstance(content, list):
        raise _wrong_type(f"messages[{at}].content", "a string or an array of objects", content)
    parts = [_part(part, f"messages[{at}].content[{index}]") for index, part in enumerate(content)]
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)  # type: ignore[arg-type]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _part(part: Json, at: str) -> str | dict[str, Json]:
    if not isinstance(part, dict):
        raise _wrong_type(at, "an object", part)
    kind = part.get("type")
    if kind in ("text", "refusal"):
        text = part.get(kind)
        if not isinstance(text, str):
            raise _missing(f"{at}.{kind}") if text is None else _wrong_type(f"{at}.{kind}", "a string", text)
        return text
    if kind == "image_url":
        image = part.get("image_url")
        if not isinstance(image, dict) or not isinstance(image.get("url"), str):
            raise _wrong_type(f"{at}.image_url", "an object with a 'url'", image)
        return {"type": "image_url", "image_url": image}
    raise _missing(f"{at}.type") if kind is None else _unknown(f"{at}.type", kind, ("text", "refusal", "image_url"))


def _text(value: Json, at: int, field: str) -> str:
    if not isinstance(value, str):
        param = f"messages[{at}].{field}"
        raise _missing(param) if value is None else _wrong_type(param, "a string", value)
    return value


# --- reading parameters ---


def _tools(tools: Json, overruled: list[str]) -> tuple[ToolSchema, ...]:
    """Reads tools with the fields that the model sees. `strict` is not one: it asks the server to constrain the
    sampling."""
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise _wrong_type("tools", "an array of objects", tools)
    read: list[ToolSchema] = []
    for at, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise _wrong_type(f"tools[{at}]", "an object", tool)
        if tool.get("type") not in (None, "function"):
            raise _unsupported(f"tools[{at}].type", "only tools of type 'function' are supported")
        function = tool.get("function")
        if not isinstance(function, dict):
            param = f"tools[{at}].function"
            raise _missing(param) if function is None else _wrong_type(param, "an object", function)
        if function.get("strict") and "strict" not in overruled:
            overruled.append("strict")
        schema: dict[str, Json] = {}
        for key, kind, expected in _FUNCTION:
            value = function.get(key)
            if isinstance(value, kind):
                schema[key] = value
            elif value is not None:
                raise _wrong_type(f"tools[{at}].function.{key}", expected, value)
        if not schema.get("name"):
            raise _missing(f"tools[{at}].function.name")
        read.append({"type": "function", "function": schema})
    return tuple(read)


def _max_tokens(body: Mapping[str, Json]) -> int | None:
    least: int | None = None
    for param in ("max_tokens", "max_completion_tokens"):
        value = body.get(param)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong_type(param, "an integer", value)
        if value < 1:
            message = f"Invalid '{param}': expected a value >= 1, but got {value} instead."
            raise _invalid(param, "integer_below_min_value", message)
        least = value if least is None else min(least, value)
    return least


def _include_usage(options: Json) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise _wrong_type("stream_options", "an object", options)
    return _flag(options.get("include_usage"), "stream_options.include_usage")


def _flag(value: Json, param: str) -> bool:
    if value is None or isinstance(value, bool):
        return value is True
    raise _wrong_type(param, "a boolean", value)


# --- OpenAI's error messages ---


def _invalid(param: str, code: str, message: str) -> Problem:
    return Problem("invalid", message, code=code, param=param)


def _missing(param: str) -> Problem:
    return _invalid(param, "missing_required_parameter", f"Missing required parameter: '{param}'.")


def _unsupported(param: str, why: str) -> Problem:
    return _invalid(param, "unsupported_parameter", f"Unsupported parameter: '{param}' is not supported here: {why}.")


def _unknown(param: str, value: Json, known: Sequence[str]) -> Problem:
    return _invalid(param, "invalid_value", f"Invalid value: {shown(value)}. Supported values are: {', '.join(known)}.")


def _wrong_type(param: str, expected: str, value: Json) -> Problem:
    got = _KINDS.get(type(value), "null")
    message = f"Invalid type for '{param}': expected {expected}, but got {got} instead."
    return _invalid(param, "invalid_type", message)


_KINDS: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    str: "a string",
    list: "an array",
    dict: "an object",
}
