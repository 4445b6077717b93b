"""The dialect Messages: how a body is read, and how a turn is written."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.base import ChatRequest, Event, Problem, Reasoning, Reply, RequestParameter, Text, Usage
from rollyard.gateway.dialects.messages import Messages
from rollyard.tokens.base import ToolCall
from rollyard.tokens.calls import assistant_message

MESSAGES = Messages()
REQUEST = ChatRequest(messages=({"role": "user", "content": "hi"},), model="m")
USER = {"role": "user", "content": "hi"}


def read(*messages: Mapping[str, Any], **fields: Any) -> ChatRequest:
    return MESSAGES.read({"model": "m", "max_tokens": 100, "messages": list(messages), **fields})


def user(*blocks: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def result(call_id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def call(number: int, name: str, **arguments: Any) -> ToolCall:
    return ToolCall(f"call_9_{number}", name, arguments, json.dumps({"name": name, "arguments": arguments}))


def make_reply(content: str = "", reasoning: str = "", calls: Sequence[ToolCall] = (), **more: Any) -> Reply:
    fields: dict[str, Any] = {"finish": "tool_calls" if calls else "stop", "usage": Usage(), **more}
    return Reply("abc123", 0, content, reasoning, tuple(calls), **fields)


# --- reading


def test_a_request_is_read_in_chat_format() -> None:
    request = read(
        user(text("fix it")),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "s"},
                text("Looking."),
                {"type": "tool_use", "id": "toolu_abc123_call_9_0", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        user(result("toolu_abc123_call_9_0", "a.py")),
        system="Be brief.",
        stream=True,
        tools=[{"name": "Bash", "description": "Runs it.", "input_schema": {"type": "object"}}],
    )
    assert request.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "fix it"},
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "I look.",
            "tool_calls": [
                {"id": "call_9_0", "type": "function", "function": {"name": "Bash", "arguments": '{"command": "ls"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_9_0", "content": "a.py"},
    )
    assert request.tools == (
        {"type": "function", "function": {"name": "Bash", "description": "Runs it.", "parameters": {"type": "object"}}},
    )
    assert (request.model, request.max_tokens, request.is_stream, request.overruled) == ("m", 100, True, ())


def test_the_blocks_of_a_system_prompt_are_lines() -> None:
    """Otherwise Claude Code's header line, which is ignored between requests, would include the next line."""
    request = read(
        USER, system=[text("x-anthropic-billing-header: v=1;"), text("You are.", cache_control={"type": "e"})]
    )
    assert request.messages[0] == {"role": "system", "content": "x-anthropic-billing-header: v=1;\nYou are."}


def test_results_come_before_the_users_text() -> None:
    request = read(
        USER, user(result("a", "one"), result("b", [text("two"), text("three")]), text("go on"), text("now"))
    )
    assert request.messages[1:] == (
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": "two\nthree"},
        {"role": "user", "content": "go on\nnow"},
    )


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    separate = read(user(text("a")), user(text("b")), {"role": "system", "content": [text("s")]}, USER)
    together = read(user(text("a"), text("b")), {"role": "system", "content": "s"}, USER)
    assert separate == together
    assert [m["role"] for m in separate.messages] == ["user", "system", "user"]
    split = read(
        USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""}]},
        {"role": "assistant", "content": "said"},
        USER,
    )
    assert split.messages[1] == {"role": "assistant", "content": "said", "reasoning_content": "t"}


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ("no such file", "Error: no such file"),
        ("Error: no such file", "Error: no such file"),
        ("<tool_use_error>bad</tool_use_error>", "<tool_use_error>bad</tool_use_error>"),
        ([text("first"), text("second")], "Error: first\nsecond"),
        ("", "Error:"),
        (None, "Error:"),
    ],
)
def test_a_failed_result_is_marked_as_an_error(said: Any, seen: str) -> None:
    assert read(USER, user(result("a", said, is_error=True))).messages[1]["content"] == seen


def test_a_successful_result_is_unchanged() -> None:
    assert read(USER, user(result("a", "done", is_error=False))) == read(USER, user(result("a", "done")))
    assert read(USER, user({"type": "tool_result", "tool_use_id": "a"})).messages[1]["content"] == ""


def test_an_image_remains_a_part() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert read(user(text("look"), image)).messages[0]["content"] == [text("look"), part]
    failed = read(USER, user(result("a", [image], is_error=True)))
    assert failed.messages[1]["content"] == [text("Error:"), part]
    linked = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    assert read(user(linked)).messages[0]["content"] == [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]


def test_parameters_of_the_task_are_overruled_by_name() -> None:
    request = read(
        USER,
        temperature=0.5,
        top_p=None,
        stop_sequences=[],
        thinking={"type": "adaptive"},
        tool_choice={"type": "any"},
        tools=[
            {"type": "web_search_20250305", "name": "web_search"},
            {"type": "bash_20250124", "name": "bash"},
            {"name": "later", "input_schema": {}, "defer_loading": True},
            {"type": "custom", "name": "now", "input_schema": {}, "cache_control": {"type": "ephemeral"}},
        ],
        metadata={"user_id": "u"},
        context_management={"edits": []},
        something_new=True,
    )
    assert set(request.overruled) == {"thinking", "tools.type", "tools.defer_loading"}
    assert request.wishes == (
        RequestParameter("same", "temperature", 0.5),
        RequestParameter("calls", "tool_choice", ""),
    )
    assert request.unknown == ("something_new",)
    assert request.tools == ({"type": "function", "function": {"name": "now", "parameters": {}}},)
    assert read(USER, tool_choice={"type": "auto"}, tools=None).overruled == ()
    assert read(USER, tool_choice={"type": "auto", "disable_parallel_tool_use": True}).overruled == ("tool_choice",)


ASSISTANT = {"role": "assistant", "content": "I"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [], "system": "only this"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [text(7)]}]}, "messages.0.content.0.text"),  # pyright: ignore
        ({"messages": [USER, ASSISTANT]}, "messages"),
        ({"messages": [user({"type": "document", "source": {}})]}, "messages.0.content.0"),
        ({"messages": [user({"no": "type"})]}, "messages.0.content.0"),
        ({"messages": [user(result("a", [{"type": "tool_reference"}]))]}, "messages.0.content.0.content.0"),
        ({"messages": [user({"type": "image", "source": {"type": "file"}})]}, "messages.0.content.0.source"),
        ({"messages": [user({"type": "tool_result", "content": ""})]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0.input"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
        ({"tools": {}}, None),
        ({"tools": {"name": "x"}}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"model": None}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
    ],
)
def test_an_invalid_field_is_named(body: dict[str, Any], param: str | None) -> None:
    whole = {"model": "m", "max_tokens": 1, "messages": [USER], **body}
    if param is None:
        MESSAGES.read(whole)
        return
    with pytest.raises(Problem) as caught:
        MESSAGES.read(whole)
    assert (caught.value.kind, caught.value.param) == ("invalid", param)
    assert caught.value.message.startswith(f"{param}: ")


# --- writing


def test_a_reply_is_a_message() -> None:
    usage = Usage(prompt_tokens=100, cached_tokens=60, completion_tokens=7)
    calls = [call(0, "Bash", command="ls"), call(1, "Read", path="é", lines=10**30)]
    reply = json.loads(MESSAGES.reply(REQUEST, make_reply("Hm.", "I think.", calls, usage=usage)))
    assert reply == {
        "id": "msg_abc123",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "I think.", "signature": reply["content"][0]["signature"]},
            {"type": "text", "text": "Hm."},
            {"type": "tool_use", "id": "toolu_abc123_call_9_0", "name": "Bash", "input": {"command": "ls"}},
            {
                "type": "tool_use",
                "id": "toolu_abc123_call_9_1",
                "name": "Read",
                "input": {"path": "é", "lines": 10**30},
            },
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 40,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 60,
            "output_tokens": 7,
        },
    }
    assert reply["content"][0]["signature"]
    assert json.loads(MESSAGES.reply(REQUEST, make_reply("a", finish="length")))["stop_reason"] == "max_tokens"
    assert json.loads(MESSAGES.reply(REQUEST, make_reply("")))["stop_reason"] == "end_turn"


def events_of(stream: bytes) -> Iterator[dict[str, Any]]:
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


def streamed(events: Sequence[Event], whole: Reply) -> bytes:
    writer = MESSAGES.writer(REQUEST, "abc123", 0, 100)
    return writer.begin() + b"".join(map(writer.event, events)) + writer.keep_alive() + writer.end(whole)


def test_a_stream_sends_blocks_one_after_the_other() -> None:
    events = [Reasoning("I "), Reasoning("think."), Text("Hm"), Text("."), call(0, "Bash", command="ls"), Text("so")]
    usage = Usage(prompt_tokens=100, cached_tokens=60, completion_tokens=7)
    sent_events = list(events_of(streamed(events, make_reply("Hm.so", "I think.", [call(0, "Bash")], usage=usage))))
    assert [(event["type"], event.get("index")) for event in sent_events] == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),  # the signature
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("content_block_start", 3),
        ("content_block_delta", 3),
        ("ping", None),
        ("content_block_stop", 3),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert sent_events[0]["message"]["usage"]["input_tokens"] == 100
    assert sent_events[10]["content_block"] == {
        "type": "tool_use",
        "id": "toolu_abc123_call_9_0",
        "name": "Bash",
        "input": {},
    }
    assert sent_events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert sent_events[-2]["usage"]["input_tokens"] == 40
    assert sent_events[-2]["usage"]["cache_read_input_tokens"] == 60


def test_a_number_beyond_the_float_range_becomes_the_largest_float() -> None:
    reply = MESSAGES.reply(REQUEST, make_reply(calls=[call(0, "f", x=[float("inf")], y={"z": -float("inf")}, s="inf")]))
    got = json.loads(reply)["content"][0]["input"]
    assert got == {"x": [1.7976931348623157e308], "y": {"z": -1.7976931348623157e308}, "s": "inf"}
    assert b"Infinity" not in reply


# --- replies that are sent back

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(TEXTS.filter(bool), st.dictionaries(TEXTS, VALUES, max_size=3)), max_size=3).map(
    lambda items: tuple(ToolCall(f"call_5_{i}", name, arguments, "") for i, (name, arguments) in enumerate(items))
)


def back(content: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return read(USER, {"role": "assistant", "content": list(content)}, USER).messages[1]


@given(TEXTS, TEXTS, CALLS)
def test_a_reply_that_is_sent_back_is_read_as_the_turn(
    content: str, reasoning: str, calls: tuple[ToolCall, ...]
) -> None:
    reply = json.loads(MESSAGES.reply(REQUEST, make_reply(content, reasoning, calls)))
    assert back(reply["content"]) == assistant_message(content, reasoning, calls)


@given(st.lists(TEXTS.map(Text) | TEXTS.map(Reasoning), max_size=8), CALLS, st.integers(0, 8))
def test_a_stream_that_is_sent_back_is_read_as_the_turn(
    deltas: list[Event], calls: tuple[ToolCall, ...], at: int
) -> None:
    events = [*deltas[:at], *calls, *deltas[at:]]
    content = "".join(event.text for event in deltas if isinstance(event, Text))
    reasoning = "".join(event.text for event in deltas if isinstance(event, Reasoning))
    blocks: list[dict[str, Any]] = []
    for event in events_of(streamed(events, make_reply(content, reasoning, calls))):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            match event["delta"]:
                case {"type": "input_json_delta", "partial_json": value}:
                    blocks[-1]["input"] = json.loads(value)
                case {"type": "text_delta" | "thinking_delta" | "signature_delta", **delta}:
                    [(name, value)] = delta.items()
                    blocks[-1][name] += value
    assert all(block.get("signature", "signed") for block in blocks)
    assert back(blocks) == assistant_message(content, reasoning, calls)


# --- errors


@pytest.mark.parametrize(
    ("problem", "kind", "message"),
    [
        (Problem("invalid", "messages: no"), "invalid_request_error", "messages: no"),
        (
            Problem("context", "too long", used_tokens=9000, max_tokens=8192),
            "invalid_request_error",
            "prompt is too long: 9000 tokens > 8192 maximum",
        ),
        (Problem("context", "the engine says so"), "invalid_request_error", "prompt is too long: the engine says so"),
        (Problem("limit", "all 5 turns are used up"), "invalid_request_error", "all 5 turns are used up"),
        (Problem("too_large", "big"), "request_too_large", "big"),
        (Problem("not_found", "none"), "not_found_error", "none"),
        (Problem("unauthorized", "key"), "authentication_error", "key"),
        (Problem("unavailable", "ended"), "api_error", "ended"),
        (Problem("internal", "oh"), "api_error", "oh"),
    ],
)
def test_errors_have_anthropics_format(problem: Problem, kind: str, message: str) -> None:
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
    assert json.loads(MESSAGES.error(problem)) == body
    [event] = events_of(MESSAGES.writer(REQUEST, "abc123", 0, 1).error(problem))
    assert event == body
