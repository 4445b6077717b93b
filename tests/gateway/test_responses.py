"""The dialect Responses: how a body is read, how a turn is written, and that the two are inverse."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rollyard.gateway.base import ChatRequest, Event, Problem, Reasoning, Reply, RequestParameter, Text, Usage
from rollyard.gateway.dialects.responses import Responses
from rollyard.tokens.base import ToolCall
from rollyard.tokens.calls import assistant_message

DIALECT = Responses()
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin"},
}
TOOLS: Any = [
    {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": False},
    PATCH,
    {"type": "local_shell"},
    {
        "type": "namespace",
        "name": "team",
        "description": "Helpers.",
        "tools": [{"type": "function", "name": "ask", "description": "Asks."}, {"type": "function", "name": "end"}],
    },
    {"type": "web_search"},
]


def read(items: Any = "hi", **fields: Any) -> ChatRequest:
    return DIALECT.read({"model": "m", "input": items, **fields})


def make_reply(content: str = "", reasoning: str = "", calls: Sequence[ToolCall] = (), finish: Any = "stop") -> Reply:
    return Reply("ab12", 1_700_000_000, content, reasoning, tuple(calls), finish, Usage(10, 4, 6, 2))


def call(name: str, arguments: Any, number: int = 0) -> ToolCall:
    raw = json.dumps({"name": name, "arguments": arguments})
    return ToolCall(f"call_7_{number}", name, arguments if isinstance(arguments, dict) else None, raw)


def streamed(request: ChatRequest, events: Sequence[Event], whole: Reply) -> list[dict[str, Any]]:
    writer = DIALECT.writer(request, whole.id, whole.created, 10)
    data = writer.begin() + b"".join(map(writer.event, events)) + writer.end(whole)
    return read_events(data)


@functools.cache
def event_format() -> TypeAdapter[Any]:
    from openai.types.responses import ResponseStreamEvent

    return TypeAdapter(ResponseStreamEvent)


def read_events(data: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for block in data.decode().strip().split("\n\n"):
        name, _, body = block.partition("\n")
        event = orjson.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "response.failed":  # the SDK lists some error codes; OpenAI itself sends others
            event_format().validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


# --- requests


def test_a_text_is_one_user_message_after_the_instructions():
    request = read("hi", instructions="Be brief.")
    assert request.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"})
    assert request.model == "m" and not request.is_stream and request.max_tokens is None


def test_messages_are_read_with_and_without_a_type_and_in_parts():
    request = read(
        [
            {"role": "developer", "content": "D"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}] * 2},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "see"}, image("data:x")]},
        ]
    )
    assert request.messages == (
        {"role": "developer", "content": "D"},
        {"role": "user", "content": "aa"},
        {"role": "assistant", "content": "no"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:x"}}],
        },
    )


def image(url: str) -> dict[str, str]:
    return {"type": "input_image", "image_url": url}


def test_the_items_of_one_turn_are_one_message():
    request = read(
        [
            {"role": "user", "content": "go"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "looking"}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "ask", "namespace": "team", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
            {"role": "assistant", "content": "done"},
        ]
    )
    assert [message["role"] for message in request.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    turn = request.messages[1]
    assert turn["content"] == "looking" and turn["reasoning_content"] == "hm"
    assert [one["function"] for one in turn["tool_calls"]] == [  # pyright: ignore
        {"name": "look", "arguments": '{"at": 1}'},
        {"name": "team__ask", "arguments": "{}"},
    ]
    assert request.messages[3] == {"role": "tool", "tool_call_id": "c2", "content": "two"}
    assert request.messages[4] == {"role": "assistant", "content": "done", "reasoning_content": "so"}


def test_consecutive_turns_stay_separate():
    items = [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert [m["content"] for m in read(items).messages] == ["one", "two"]
    items = [{"type": "message", "id": f"msg_{reply}_0", "role": "assistant", "content": reply} for reply in ("a", "b")]
    assert [m["content"] for m in read(items).messages] == ["a", "b"]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    assert len(read([{"role": "assistant", "content": "one"}, thought]).messages) == 2


def test_calls_of_one_turn_are_joined_even_with_outputs_between_them():
    items = []
    for number in range(2):
        items.append(
            {"type": "function_call", "id": f"fc_ab_{number}", "call_id": f"c{number}", "name": "x", "arguments": "{}"}
        )
        items.append({"type": "function_call_output", "call_id": f"c{number}", "output": "ok"})
    messages = read(items).messages
    assert [message["role"] for message in messages] == ["assistant", "tool", "tool"]
    assert len(messages[0]["tool_calls"]) == 2  # pyright: ignore


def test_tools_are_offered_as_functions_and_server_side_ones_are_not():
    request = read(tools=TOOLS)
    functions: dict[str, Any] = {tool["function"]["name"]: tool["function"] for tool in request.tools}  # pyright: ignore
    assert list(functions) == ["look", "apply_patch", "local_shell", "team__ask", "team__end"]
    assert functions["look"] == {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    description = functions["apply_patch"]["parameters"]["properties"]["input"]["description"]
    assert "lark grammar:\nstart: begin" in description
    assert functions["team__ask"]["description"] == "Helpers.\n\nAsks."
    assert functions["team__end"]["parameters"] == {"type": "object", "properties": {}}
    assert request.overruled == ("tools.format", "tools.web_search")


def test_tools_that_are_added_in_the_input_are_offered_too():
    late = {"type": "function", "name": "late"}
    added = {"type": "additional_tools", "role": "developer", "tools": [late, TOOLS[0]]}  # one of them is a duplicate
    assert len(read([{"role": "user", "content": "x"}, added], tools=TOOLS[:1]).tools) == 2


def test_overruled_parameters_are_named():
    request = read(
        temperature=0.2,
        top_p=None,
        tool_choice="required",
        parallel_tool_calls=False,
        truncation="auto",
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema"}, "verbosity": "low"},
        store=True,
        user="u",
        service_tier="auto",
        prompt_cache_key="k",
    )
    assert request.wishes == (
        RequestParameter("same", "temperature", 0.2),
        RequestParameter("same", "text.format", {"type": "json_schema"}),
        RequestParameter("calls", "tool_choice", ""),
    )
    assert request.overruled == ("parallel_tool_calls", "truncation", "reasoning.effort", "text.verbosity")
    assert read(tool_choice="auto", reasoning={"summary": "auto"}, text={"format": {"type": "text"}}).overruled == ()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_output_tokens": True}, "max_output_tokens"),
        ({"input": "x", "instructions": ["y"]}, "instructions"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "assistant", "content": [image("u")]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "x", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "local_shell_call", "call_id": "c"}]}, "input[0].action"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "summary": [3]}]}, "input[0].summary"),
        ({"input": "x", "tools": {}}, "tools"),
        ({"input": "x", "tools": [3]}, "tools[0]"),
        ({"input": "x", "tools": [{}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "function", "name": "f", "parameters": 3}]}, "tools[0].parameters"),
        ({"input": "x", "tools": [TOOLS[0], {"type": "custom", "name": "look"}]}, "tools[1]"),
    ],
)
def test_an_invalid_request_names_the_field(body: dict[str, Any], param: str):
    with pytest.raises(Problem) as raised:
        DIALECT.read(body)
    assert raised.value.kind == "invalid" and raised.value.param == param


# --- replies


def test_a_reply_is_a_complete_response_of_the_sdks_type():
    request = read(tools=TOOLS, max_output_tokens=99, metadata={"k": "v"}, instructions="I")
    calls = [call("look", {"at": 1}), call("apply_patch", {"input": "*** Begin"}, 1), call("team__ask", {"q": "x"}, 2)]
    calls.append(call("local_shell", {"command": ["ls"]}, 3))
    from openai.types.responses import Response

    response = Response.model_validate_json(
        DIALECT.reply(request, make_reply("text", "hm", calls, "tool_calls")), strict=True
    )
    assert response.id == "resp_ab12" and response.status == "completed" and response.output_text == "text"
    kinds = ["reasoning", "message", "function_call", "custom_tool_call", "function_call", "local_shell_call"]
    assert [item.type for item in response.output] == kinds
    looked, patched, asked = (item.model_dump() for item in response.output[2:5])
    assert json.loads(looked["arguments"]) == {"at": 1} and looked["call_id"] == "call_7_0"
    assert patched["input"] == "*** Begin"
    assert (asked["namespace"], asked["name"]) == ("team", "ask")
    assert response.usage is not None
    assert response.usage.to_dict() == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 16,
    }
    assert response.max_output_tokens == 99 and response.metadata == {"k": "v"} and response.instructions == "I"
    assert len(response.tools) == len(TOOLS)


def test_a_truncated_reply_is_incomplete():
    body = DIALECT.reply(read(), make_reply("tex", finish="length"))
    from openai.types.responses import Response

    response = Response.model_validate_json(body)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # pyright: ignore


def test_a_stream_adds_up_to_the_whole():
    request = read(tools=TOOLS, include=["reasoning.encrypted_content"])
    calls = [call("look", {"at": 1}), call("apply_patch", {"input": "p"}, 1), call("local_shell", {"command": []}, 2)]
    whole = make_reply("text", "hm", calls, "tool_calls")
    events = streamed(request, [Reasoning("h"), Reasoning("m"), Text("te"), Text("xt"), *calls], whole)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        *("output_item.added", "output_item.done", "completed"),
    ]
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == "text"
    assert events[-1]["response"] == orjson.loads(DIALECT.reply(request, whole))
    done_items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done_items == events[-1]["response"]["output"]
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.added"] == [
        0,
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("reasoning", ["", "hm"])
def test_an_empty_turn_is_an_empty_message(reasoning: str):
    whole = make_reply(reasoning=reasoning)
    events = streamed(read(), [Reasoning(reasoning)] if reasoning else [], whole)
    assert events[-1]["response"] == orjson.loads(DIALECT.reply(read(), whole))
    output = events[-1]["response"]["output"]
    assert output[-1]["content"][0]["text"] == ""
    assert read([{"role": "user", "content": "x"}, *output]).messages[1]["content"] == ""


@pytest.mark.parametrize(
    ("events", "whole"),
    [
        ([Text("tex")], make_reply("tex", finish="length")),
        ([Reasoning("h")], make_reply(reasoning="h", finish="length")),
        ([Text("a"), call("look", {})], make_reply("a", calls=[call("look", {})], finish="length")),
    ],
)
def test_a_truncated_stream_ends_incomplete(events: list[Event], whole: Reply):
    *_, done, last = streamed(read(), events, whole)
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"
    assert last["response"] == orjson.loads(DIALECT.reply(read(), whole))
    assert done["item"] == last["response"]["output"][-1]


def test_a_stream_that_fails_ends_failed_with_its_output_so_far():
    writer = DIALECT.writer(read(), "ab", 1, 10)
    data = writer.begin() + writer.event(Text("half"))
    data += writer.error(Problem("unavailable", "no engine", code="engine_unavailable"))
    last = read_events(data.replace(writer.keep_alive(), b""))[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "engine_unavailable", "message": "no engine"}


def test_a_keep_alive_is_a_comment():
    assert DIALECT.writer(read(), "ab", 1, 10).keep_alive().startswith(b":")


def test_errors_have_openais_format():
    error = orjson.loads(DIALECT.error(Problem("context", "too long", code="context_limit")))["error"]
    assert error == {
        "message": "too long",
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
    }
    error = orjson.loads(DIALECT.error(Problem("invalid", "bad", param="input")))["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "input", "invalid")
    assert orjson.loads(DIALECT.error(Problem("internal", "oh")))["error"]["type"] == "server_error"


# --- replies that are sent back

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
JSONS = st.recursive(st.none() | st.booleans() | st.integers() | TEXTS, lambda inner: st.lists(inner, max_size=2))
ARGUMENTS = st.one_of(
    st.dictionaries(TEXTS, JSONS, max_size=3),
    st.fixed_dictionaries({"input": TEXTS}),
    st.fixed_dictionaries(
        {"command": st.lists(TEXTS, max_size=2)},
        optional={"env": st.dictionaries(TEXTS, TEXTS, max_size=1), "timeout_ms": st.integers() | st.none()},
    ),
    st.just("no object"),
)
NAMES = st.sampled_from(["look", "apply_patch", "local_shell", "team__ask", "unknown"])


@given(TEXTS, TEXTS, st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3), st.booleans(), st.booleans())
def test_a_reply_that_is_sent_back_is_read_as_the_same_message(
    content: str, reasoning: str, named_arguments: list[tuple[str, Any]], seals: bool, streams: bool
):
    request = read(tools=TOOLS, include=["reasoning.encrypted_content"] if seals else [])
    calls = [call(name, arguments, number) for number, (name, arguments) in enumerate(named_arguments)]
    whole = make_reply(content, reasoning, calls)
    if streams:
        events: list[Event] = [Reasoning(reasoning)] if reasoning else []
        output = streamed(request, [*events, *([Text(content)] if content else []), *calls], whole)[-1]["response"][
            "output"
        ]
    else:
        output = orjson.loads(DIALECT.reply(request, whole))["output"]
    if seals:  # a client that keeps only this field sends this back
        output = [{k: v for k, v in item.items() if item["type"] != "reasoning" or k != "content"} for item in output]
    outputs = [{"type": "function_call_output", "call_id": "c", "output": "ok"}] * bool(calls)
    (back, *rest) = read([*output, *outputs], tools=TOOLS).messages
    assert essence(back) == essence(assistant_message(content, reasoning, calls))
    assert [message["role"] for message in rest] == ["tool"] * len(outputs)


def essence(message: Mapping[str, Any]) -> list[Any]:
    """Returns a message without ids and JSON formatting."""
    parts: list[Any] = [message["role"], message["content"], message.get("reasoning_content", "")]
    for one in message.get("tool_calls", ()):
        parts.append((one["function"]["name"], json.loads(one["function"]["arguments"])))
    return parts


@pytest.mark.parametrize("name", ["tools", "metadata"])
def test_parameters_that_cannot_be_echoed_are_refused_before_sampling(name: str):
    deep: Any = {}
    for _ in range(400):
        deep = {"a": deep}
    value = [{"type": "function", "name": "f", "parameters": deep}] if name == "tools" else deep
    with pytest.raises(Problem) as refused:
        read(**{name: value})
    assert (refused.value.kind, refused.value.param) == ("invalid", name)


@pytest.mark.parametrize("timeout_ms", [10**30, -(10**30), 2**53])
def test_a_number_of_any_length_is_returned_as_the_model_wrote_it(timeout_ms: int):
    request = read(tools=TOOLS)
    calls = (call("local_shell", {"command": ["ls"], "timeout_ms": timeout_ms}),)
    (item,) = orjson.loads(DIALECT.reply(request, make_reply(calls=calls)))["output"]
    assert item["type"] == "function_call"
    assert json.loads(item["arguments"])["timeout_ms"] == timeout_ms
    assert streamed(request, calls, make_reply(calls=calls))[-1]["type"] == "response.completed"
