"""The dialect Chat Completions: how a body is read, and how a turn is written. Over HTTP: test_openai_sdk.py."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.app import MESSAGES, RESPONSES
from rollyard.gateway.base import (
    ChatRequest,
    Dialect,
    Event,
    Problem,
    ProblemKind,
    Reasoning,
    Reply,
    Text,
    TokenLogprob,
    Usage,
)
from rollyard.gateway.dialects.chat import Chat, logprob_of, model_body, models_body
from rollyard.gateway.intake import read as read_bytes
from rollyard.tokens.base import ToolCall
from rollyard.tokens.calls import assistant_message

CHAT: Dialect = Chat()
HELLO = {"role": "user", "content": "hello"}
LS_CALL = {"type": "function", "function": {"name": "ls", "arguments": "{}"}}
CHAT_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a b"}
USE = {"type": "tool_use", "id": "c1", "name": "ls", "input": {}}
USED = {"type": "tool_result", "tool_use_id": "c1", "content": "a b"}
ITEM = {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "a b"}
LS = {"type": "function", "function": {"name": "ls", "description": "lists", "parameters": {"type": "object"}}}


def read(*messages: object, **body: Any) -> ChatRequest:
    """Reads a request from its bytes."""
    return CHAT.read(orjson.loads(orjson.dumps({"model": "m", "messages": messages or [HELLO], **body})))


def problem_of(*messages: object, **body: Any) -> Problem:
    with pytest.raises(Problem) as caught:
        read(*messages, **body)
    assert caught.value.kind == "invalid"
    return caught.value


def make_reply(content: str = "", reasoning: str = "", calls: Sequence[ToolCall] = (), **more: Any) -> Reply:
    finish = more.pop("finish", "tool_calls" if calls else "stop")
    return Reply("abc", 1_700_000_000, content, reasoning, tuple(calls), finish, more.pop("usage", Usage()))


def call(number: int, name: str, arguments: Mapping[str, Any] | None, raw: str = "") -> ToolCall:
    return ToolCall(f"call_{number}", name, arguments, raw)


# --- messages ---


def test_messages_keep_their_content_and_lose_null_fields() -> None:
    request = read(
        {"role": "system", "content": "be brief", "name": None},
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "hello", "name": "ann", "cache_control": {"type": "ephemeral"}},
        {
            "role": "assistant",
            "content": "hi",
            "refusal": None,
            "audio": None,
            "function_call": None,
            "annotations": [],
        },
    )
    assert request.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "hello", "name": "ann"},
        {"role": "assistant", "content": "hi"},
    )


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    assert read({"role": "user", "content": parts}).messages == ({"role": "user", "content": "ab"},)
    assert read({"role": "user", "content": []}).messages == ({"role": "user", "content": ""},)
    tool = {"role": "tool", "tool_call_id": "call_1", "content": parts}
    assert read(tool).messages == ({"role": "tool", "tool_call_id": "call_1", "content": "ab"},)


def test_an_image_remains_a_part() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
    text = {"type": "text", "text": "what is it?", "cache_control": {"type": "ephemeral"}}
    (message,) = read({"role": "user", "content": [text, image]}).messages
    assert message["content"] == [{"type": "text", "text": "what is it?"}, image]


def test_a_refusal_is_read_as_content() -> None:
    parts = [{"type": "text", "text": "no: "}, {"type": "refusal", "refusal": "I may not"}]
    assert read({"role": "assistant", "content": parts}).messages[0]["content"] == "no: I may not"
    assert read({"role": "assistant", "content": None, "refusal": "I may not"}).messages[0]["content"] == "I may not"
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    (message,) = read({"role": "assistant", "content": [image], "refusal": "I may not"}).messages
    assert message["content"] == [image, {"type": "text", "text": "I may not"}]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_an_assistant_that_only_calls_has_no_content(content: dict[str, object]) -> None:
    tool_call = {"id": "x", "type": "function", "function": {"name": "ls", "arguments": '{"a":1}'}}
    (message,) = read({"role": "assistant", **content, "tool_calls": [{**tool_call, "index": 0}]}).messages
    assert message == {"role": "assistant", "content": "", "tool_calls": [tool_call]}
    for none in ([], None):
        assert read({"role": "assistant", **content, "tool_calls": none}).messages[0] == {
            "role": "assistant",
            "content": "",
        }


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning_content": None, "reasoning": "hm"},
        {"reasoning_content": "hm", "reasoning": "hm"},
    ],
)
def test_reasoning_has_two_names(fields: dict[str, object]) -> None:
    (message,) = read({"role": "assistant", "content": "so", **fields}).messages
    assert message == {"role": "assistant", "content": "so", "reasoning_content": "hm"}


CALL = {"id": "x", "type": "function", "function": {"name": "ls", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ("hello", "messages[1]", "invalid_type"),
        ({"content": "x"}, "messages[1].role", "missing_required_parameter"),
        ({"role": "robot", "content": "x"}, "messages[1].role", "invalid_value"),
        ({"role": ["user"], "content": "x"}, "messages[1].role", "invalid_value"),
        ({"role": "function", "name": "ls", "content": "x"}, "messages[1].role", "unsupported_parameter"),
        ({"role": "user"}, "messages[1].content", "missing_required_parameter"),
        ({"role": "user", "content": None}, "messages[1].content", "missing_required_parameter"),
        ({"role": "user", "content": 3}, "messages[1].content", "invalid_type"),
        ({"role": "user", "content": {"type": "text"}}, "messages[1].content", "invalid_type"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]", "invalid_type"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0].type", "missing_required_parameter"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text", "missing_required_parameter"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[1].content[0].text", "invalid_type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0].type", "invalid_value"),
        ({"role": "user", "content": [{"type": "file"}]}, "messages[1].content[0].type", "invalid_value"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "http://"}]},
            "messages[1].content[0].image_url",
            "invalid_type",
        ),
        ({"role": "user", "content": "x", "name": 1}, "messages[1].name", "invalid_type"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id", "missing_required_parameter"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "messages[1].tool_call_id", "invalid_type"),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "ls", "arguments": "{}"}},
            "messages[1].function_call",
            "unsupported_parameter",
        ),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[1].audio", "unsupported_parameter"),
        ({"role": "assistant", "content": "x", "refusal": ["no"]}, "messages[1].refusal", "invalid_type"),
        ({"role": "assistant", "content": "x", "reasoning": {"a": 1}}, "messages[1].reasoning", "invalid_type"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls", "invalid_type"),
        ({"role": "assistant", "tool_calls": ["ls"]}, "messages[1].tool_calls[0]", "invalid_type"),
        (
            {"role": "assistant", "tool_calls": [CALL, {**CALL, "type": "custom"}]},
            "messages[1].tool_calls[1].type",
            "unsupported_parameter",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "x"}]},
            "messages[1].tool_calls[0].function",
            "missing_required_parameter",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "id": None}]},
            "messages[1].tool_calls[0].id",
            "missing_required_parameter",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "ls", "arguments": {}}}]},
            "messages[1].tool_calls[0].function.arguments",
            "invalid_type",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"arguments": "{}"}}]},
            "messages[1].tool_calls[0].function.name",
            "missing_required_parameter",
        ),
    ],
)
def test_an_invalid_message_is_named_as_openai_does(message: object, param: str, code: str) -> None:
    problem = problem_of(HELLO, message)
    assert (problem.param, problem.code) == (param, code)
    error = json.loads(CHAT.error(problem))["error"]
    assert error == {"message": problem.message, "type": "invalid_request_error", "param": param, "code": code}


def test_a_problem_shortens_values() -> None:
    assert len(problem_of({"role": "x" * 10_000, "content": ""}).message) < 200


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": "hello"}, "messages", "invalid_type"),
        ({"messages": [HELLO], "model": 3}, "model", "invalid_type"),
        ({"messages": [HELLO], "stream": "yes"}, "stream", "invalid_type"),
        ({"messages": [HELLO], "stream": True, "stream_options": True}, "stream_options", "invalid_type"),
        (
            {"messages": [HELLO], "stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "invalid_type",
        ),
        ({"messages": [HELLO], "max_tokens": 0}, "max_tokens", "integer_below_min_value"),
        ({"messages": [HELLO], "max_tokens": "5"}, "max_tokens", "invalid_type"),
        ({"messages": [HELLO], "max_completion_tokens": True}, "max_completion_tokens", "invalid_type"),
        ({"messages": [HELLO], "n": 2}, "n", "unsupported_parameter"),
        ({"messages": [HELLO], "n": 0}, "n", "unsupported_parameter"),
        ({"messages": [HELLO], "modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"messages": [HELLO], "functions": [{"name": "ls"}]}, "functions", "unsupported_parameter"),
        ({"messages": [HELLO], "function_call": {"name": "ls"}}, "function_call", "unsupported_parameter"),
        ({"messages": [HELLO], "continue_final_message": True}, "continue_final_message", "unsupported_parameter"),
        ({"messages": [HELLO], "echo": True}, "echo", "unsupported_parameter"),
        ({"messages": [HELLO], "tools": LS}, "tools", "invalid_type"),
        ({"messages": [HELLO], "tools": ["ls"]}, "tools[0]", "invalid_type"),
        ({"messages": [HELLO], "tools": [LS, {"type": "custom"}]}, "tools[1].type", "unsupported_parameter"),
        ({"messages": [HELLO], "tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        (
            {"messages": [HELLO], "tools": [{"type": "function", "function": {"description": "?"}}]},
            "tools[0].function.name",
            "missing_required_parameter",
        ),
        (
            {"messages": [HELLO], "tools": [{"type": "function", "function": {"name": "ls", "parameters": []}}]},
            "tools[0].function.parameters",
            "invalid_type",
        ),
    ],
)
def test_an_invalid_parameter_is_named(body: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(Problem) as caught:
        CHAT.read(body)
    assert (caught.value.kind, caught.value.param, caught.value.code) == ("invalid", param, code)


# --- parameters ---


def test_a_tool_has_only_the_fields_that_the_model_sees() -> None:
    strict = {
        "type": "function",
        "function": {**LS["function"], "strict": True},
        "cache_control": {"type": "ephemeral"},
    }  # type: ignore[dict-item]
    bare = {"type": "function", "function": {"name": "ls", "description": None, "parameters": None, "strict": None}}
    request = read(tools=[strict, strict, bare])
    assert request.tools == (LS, LS, {"type": "function", "function": {"name": "ls"}})
    assert request.overruled == ("strict",)
    assert read(tools=None).tools == read(tools=[]).tools == ()


def test_parameters_that_change_the_sampling_are_overruled_by_name() -> None:
    request = read(
        temperature=0,
        top_p=1.0,
        seed=7,
        stop=["\n"],
        logprobs=True,
        tool_choice="required",
        parallel_tool_calls=False,
        response_format={"type": "json_object"},
        reasoning_effort="low",
    )
    assert set(request.overruled) == {"parallel_tool_calls", "reasoning_effort"}
    assert {wish.name: (wish.kind, wish.value) for wish in request.wishes} == {
        "temperature": ("same", 0),
        "top_p": ("same", 1.0),
        "seed": ("seed", 7),
        "stop": ("stop", ["\n"]),
        "logprobs": ("logprobs", True),
        "tool_choice": ("calls", ""),
        "response_format": ("format", {"type": "json_object"}),
    }


def test_parameters_without_effect_are_not_overruled() -> None:
    request = read(
        temperature=None,
        n=1,
        stop=None,
        logit_bias={},
        frequency_penalty=0,
        presence_penalty=0.0,
        logprobs=False,
        tool_choice="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        modalities=["text"],
        metadata={"a": "b"},
        user="u",
        store=True,
        service_tier="flex",
        prompt_cache_key="k",
    )
    assert request == read()
    assert read(something_new={"x": 1}, nothing=None).unknown == ("something_new",)


def test_the_smaller_of_two_bounds_applies() -> None:
    assert read().max_tokens is None
    assert read(max_tokens=5).max_tokens == read(max_completion_tokens=5).max_tokens == 5
    assert read(max_tokens=9, max_completion_tokens=5).max_tokens == 5


def test_usage_is_an_option_of_streams() -> None:
    assert not read().is_stream
    assert read(stream=True).options == {"include_usage": False}
    assert read(stream=True, stream_options={"include_usage": True}).options == {"include_usage": True}
    assert read(stream=False, stream_options={"include_usage": True}) == read()


def test_the_model_is_optional() -> None:
    assert CHAT.read({"messages": [HELLO]}).model == ""


# --- whole replies ---


def test_a_reply_has_openais_format() -> None:
    usage = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=5, reasoning_tokens=2)
    assert json.loads(CHAT.reply(read(), make_reply("hi", usage=usage))) == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 2},
        },
        "system_fingerprint": None,
    }


def test_a_reply_that_only_calls_has_null_content() -> None:
    calls = [call(0, "ls", {"path": "é", "all": True}), call(1, "cat", None, raw="{broken")]
    (choice,) = json.loads(CHAT.reply(read(), make_reply(reasoning="hm", calls=calls)))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "ls", "arguments": '{"path": "é", "all": true}'}},
            {"id": "call_1", "type": "function", "function": {"name": "cat", "arguments": "{broken"}},
        ],
    }


def test_an_empty_turn_has_empty_content_and_a_truncated_one_finish_reason_length() -> None:
    (choice,) = json.loads(CHAT.reply(read(), make_reply(finish="length")))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


def test_numbers_that_json_libraries_treat_differently_are_returned_as_recorded() -> None:
    """orjson refuses integers beyond 64 bits and writes infinity as null."""
    turn = make_reply(calls=[call(0, "f", {"n": 2**70, "x": float("inf")})])
    (choice,) = json.loads(CHAT.reply(read(), turn))["choices"]
    assert choice["message"]["tool_calls"] == assistant_message("", "", turn.calls)["tool_calls"]


# --- streams ---


def written(request: ChatRequest, turn: Reply, events: Sequence[Event]) -> list[Any]:
    """Returns the data of each server-sent event; the terminator unchanged."""
    writer = CHAT.writer(request, turn.id, turn.created, prompt_tokens=0)
    raw = writer.begin() + b"".join(map(writer.event, events)) + writer.end(turn)
    assert raw.endswith(b"\n\n")
    lines = raw.decode().split("\n\n")[:-1]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def events_of(turn: Reply) -> list[Event]:
    """Splits a turn into events as a session streams it: about a token at a time."""
    lead = [Reasoning(letter) for letter in turn.reasoning]
    return [*lead, *(Text(letter) for letter in turn.content), *turn.calls]


def accumulated(chunks: Sequence[Any]) -> dict[str, Any]:
    """Returns the message that a client assembles."""
    message: dict[str, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    (part,) = value
                    calls = message.setdefault("tool_calls", [])
                    if part["index"] == len(calls):
                        calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
                    else:
                        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
                elif isinstance(value, str) and key != "role":
                    message[key] = message.get(key, "") + value
                else:
                    message[key] = value
    return message


def test_a_stream_is_made_of_openais_chunks() -> None:
    turn = make_reply("ok", "hm", [call(0, "ls", {"a": 1})])
    chunks = written(read(stream=True), turn, [Reasoning("hm"), Text("ok"), *turn.calls])
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-abc"}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk["model"] == "m" and "usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"reasoning_content": "hm"},
        {"content": "ok"},
        {"tool_calls": [{"index": 0, "id": "call_0", "type": "function", "function": {"name": "ls", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["tool_calls"]


def test_usage_comes_last_if_requested() -> None:
    request = read(stream=True, stream_options={"include_usage": True})
    *chunks, last = written(request, make_reply("ok", usage=Usage(3, 1, 2)), [Text("ok")])
    assert [chunk["usage"] for chunk in chunks] == [None, None, None]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_parallel_calls_are_counted_per_writer() -> None:
    turn = make_reply(calls=[call(0, "a", {}), call(1, "b", {})])
    for _ in range(2):
        chunks = written(read(stream=True), turn, turn.calls)
        parts = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert [part["index"] for part in parts] == [0, 0, 1, 1]


def test_text_with_line_breaks_stays_one_event() -> None:
    (_, chunk, _) = written(read(stream=True), make_reply("a\n\nb"), [Text("a\n\ndata: [DONE]\n\nb\r\n\u2028")])
    assert chunk["choices"][0]["delta"]["content"] == "a\n\ndata: [DONE]\n\nb\r\n\u2028"


def test_a_keep_alive_is_a_comment_and_a_problem_an_error_object() -> None:
    writer = CHAT.writer(read(stream=True), "abc", 0, prompt_tokens=0)
    assert writer.keep_alive() == b": keep-alive\n\n"
    problem = Problem("unavailable", "no engine", code="engine_unavailable")
    data = writer.error(problem)
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.removeprefix(b"data: ").rstrip() == CHAT.error(problem)


# --- replies that are sent back ---

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
ARGUMENTS = st.dictionaries(TEXT, st.none() | st.booleans() | st.integers() | TEXT | st.lists(TEXT, max_size=2))
CALLS = st.lists(st.tuples(TEXT.filter(bool), ARGUMENTS | st.none(), TEXT), max_size=3)


@given(content=TEXT, reasoning=TEXT, calls=CALLS)
def test_a_turn_that_is_sent_back_is_read_as_it_was_sent(
    content: str, reasoning: str, calls: list[tuple[str, Mapping[str, Any] | None, str]]
) -> None:
    tool_calls = [call(index, name, arguments, raw) for index, (name, arguments, raw) in enumerate(calls)]
    turn = make_reply(content, reasoning, tool_calls)
    expected = assistant_message(content, reasoning, turn.calls)
    whole = json.loads(CHAT.reply(read(), turn))["choices"][0]["message"]
    assert read(whole).messages == (expected,)
    streamed = accumulated(written(read(stream=True), turn, events_of(turn)))
    assert read(streamed).messages == (expected,)


# --- errors ---


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("invalid", "invalid_request_error"),
        ("limit", "invalid_request_error"),
        ("too_large", "invalid_request_error"),
        ("not_found", "not_found_error"),
        ("unauthorized", "authentication_error"),
        ("unavailable", "server_error"),
        ("internal", "server_error"),
    ],
)
def test_each_kind_of_problem_has_its_type(kind: ProblemKind, expected: str) -> None:
    error = json.loads(CHAT.error(Problem(kind, "why", code="turn_limit")))["error"]
    assert error == {"message": "why", "type": expected, "param": None, "code": "turn_limit"}


def test_an_overflow_has_openais_message() -> None:
    """litellm detects an overflow only by `this model's maximum context length is` in the lowercase message."""
    known = Problem("context", "too long", code="context_limit", used_tokens=90, max_tokens=64)
    unknown = Problem("context", "the engine refused 90 tokens", code="context_limit", used_tokens=90)
    for problem in (known, unknown):
        error = json.loads(CHAT.error(problem))["error"]
        assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert error["param"] == "messages"
        assert "this model's maximum context length is" in error["message"].lower()
    assert (
        "64 tokens. However, your messages resulted in 90 tokens." in json.loads(CHAT.error(known))["error"]["message"]
    )
    assert "the engine refused 90 tokens" in json.loads(CHAT.error(unknown))["error"]["message"]


# --- models ---


def test_one_list_of_models_satisfies_both_sdks() -> None:
    body = json.loads(models_body(("a", "b")))
    assert (body["object"], body["has_more"], body["first_id"], body["last_id"]) == ("list", False, "a", "b")
    assert [model["id"] for model in body["data"]] == ["a", "b"]
    assert body["data"][0] == {
        "id": "a",
        "object": "model",
        "created": 0,
        "owned_by": "rollyard",
        "type": "model",
        "display_name": "a",
        "created_at": "1970-01-01T00:00:00Z",
    }
    assert json.loads(model_body("a")) == body["data"][0]
    assert json.loads(models_body(()))["first_id"] is None


def test_the_bytes_of_a_part_of_a_character_are_unknown():
    assert logprob_of(TokenLogprob("é", -1.0))["bytes"] == [195, 169]
    assert logprob_of(TokenLogprob("�", -1.0))["bytes"] is None


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (CHAT, {"messages": [HELLO, {"role": "assistant", "tool_calls": [{"id": "c1", **LS_CALL}]}, CHAT_RESULT]}),
        (MESSAGES, {"messages": [HELLO, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [USED]}]}),
        (RESPONSES, {"input": [HELLO, ITEM, OUTPUT]}),
    ],
)
def test_a_result_has_the_name_of_the_tool_that_was_called(dialect: Dialect, body: dict[str, Any]):
    """Chat templates such as gpt-oss's show it, and the SDKs do not send it."""
    *_, result = read_bytes(dialect, orjson.dumps({"model": "m", "max_tokens": 9, **body})).messages
    assert (result["role"], result["name"]) == ("tool", "ls")


def test_a_long_name_of_a_tool_is_not_repeated_for_each_result():
    """A body of 1 MB would become a conversation of gigabytes."""
    call = {"id": "c1", "type": "function", "function": {"name": "n" * 300_000, "arguments": "{}"}}
    messages = [HELLO, {"role": "assistant", "tool_calls": [call]}, *[CHAT_RESULT] * 1000]
    *_, result = read_bytes(CHAT, orjson.dumps({"messages": messages})).messages
    assert "name" not in result
