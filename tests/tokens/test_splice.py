"""Splicing: sampled tokens are sent again unchanged, however the client encodes its history."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollyard.tokens import ChatML, Parsed, Reader, Renderer, Tokenizer
from rollyard.tokens.splice import (
    ABANDONED,
    BRANCHED,
    NEW,
    NOT_EXTENDED,
    OTHER_TOOLS,
    REWRITTEN,
    STRIPPED,
)

from .books import SHELL, START, book, call, keep, proven
from .strategies import plain


@pytest.fixture(params=["chatml", "qwen3_renderer"])
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return request.getfixturevalue(request.param)


def test_a_conversation_is_one_trace(renderer: Renderer):
    it = book(renderer)
    messages: list[Any] = list(START)
    for number in range(4):
        turn = it.begin(messages)
        assert turn.reason is None and turn.is_extension == (number > 0)
        ids, answer = keep(it, renderer, turn, f"answer {number}")
        messages += [answer, {"role": "user", "content": f"more {number}"}]
        assert it.begin(messages).prompt[: len(turn.prompt) + len(ids)] == turn.prompt + ids
    assert proven(it) == [4] and it.forks == {}


@pytest.mark.parametrize(
    "written",
    [
        '{"a": false, "b": {"x": [1, 2.0, null]}}',
        '{ "b": {"x": [1,2.0,null]},\n "a": false }',
        "{}",
        '{"text": "\\u00e9 \\n\\"quoted\\""}',
    ],
    ids=["plain", "reordered and spaced", "no parameters", "escapes"],
)
def test_the_encoding_of_a_history_does_not_matter(renderer: Renderer, written: str):
    """`false` as `False`, empty parameters, other spacing, other ids, null fields, text in parts."""
    it = book(renderer)
    turn = it.begin(START, [SHELL])
    ids, answer = keep(it, renderer, turn, "Let me see. " + call(written))
    assert answer["tool_calls"], "the renderer did not parse the call"
    function = answer["tool_calls"][0]["function"]
    back = {
        "role": "assistant",
        "content": [{"type": "text", "text": answer["content"]}] if answer["content"] else None,
        "refusal": None,
        "tool_calls": [
            {
                "id": "toolu_other",
                "type": "function",
                "index": 0,
                "function": {
                    "name": function["name"],
                    "arguments": json.dumps(json.loads(function["arguments"]), indent=1, sort_keys=True),
                },
            }
        ],
    }
    result = {"role": "tool", "tool_call_id": "toolu_other", "content": "done"}
    after = it.begin([*START, back, result], [SHELL])
    assert after.is_extension
    assert after.prompt[: len(turn.prompt) + len(ids)] == turn.prompt + ids
    keep(it, renderer, after, "Done.")
    assert proven(it) == [2]


@pytest.mark.parametrize(
    ("sampled", "sent", "is_extension"),
    [
        ({"command": "a"}, {"command": "a", "all": False}, True),
        ({"command": "a", "all": False}, {"command": "a"}, True),
        ({"command": "a"}, {"command": "a", "all": True}, False),
        ({"command": "a", "all": True}, {"command": "a"}, False),
    ],
    ids=["added", "removed", "another value added", "another value removed"],
)
def test_an_argument_at_its_declared_default_may_be_added_or_removed(
    renderer: Renderer, sampled: Any, sent: Any, is_extension: bool
):
    """Claude Code fills in `replace_all: false`. The prompt keeps what the model wrote."""
    properties = {"command": {"type": "string"}, "all": {"type": "boolean", "default": False}}
    function = {"name": "shell", "description": "", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": function}]
    it = book(renderer)
    turn = it.begin(START, tools)
    ids, answer = keep(it, renderer, turn, call(json.dumps(sampled)))
    answer["tool_calls"][0]["function"]["arguments"] = json.dumps(sent)
    after = it.begin([*START, answer, {"role": "tool", "tool_call_id": "c", "content": "done"}], tools)
    assert after.is_extension == is_extension
    assert after.reason == (None if is_extension else REWRITTEN)
    if is_extension:
        assert after.prompt[: len(turn.prompt) + len(ids)] == turn.prompt + ids
    keep(it, renderer, after, "Done.")
    assert proven(it) == ([2] if is_extension else [1, 1])


def test_missing_content_is_another_history(renderer: Renderer):
    it = book(renderer)
    _, answer = keep(it, renderer, it.begin(START), "A long answer.")
    shorter = {**answer, "content": "A long"}
    turn = it.begin([*START, shorter, {"role": "user", "content": "More."}])
    assert not turn.is_extension and turn.reason == REWRITTEN
    keep(it, renderer, turn, "Yes.")
    assert proven(it) == [1, 1] and it.forks == {REWRITTEN: 1}


def test_reasoning_is_kept_or_taken_as_sent(qwen3_renderer: Renderer):
    for reasoning, is_extension in (("keep", True), ("as_sent", False)):
        it = book(qwen3_renderer, reasoning=reasoning)
        _, answer = keep(it, qwen3_renderer, it.begin(START), "<think>\nHm.\n</think>\n\nYes.")
        assert answer["reasoning_content"]
        without = {key: value for key, value in answer.items() if key != "reasoning_content"}
        turn = it.begin([*START, without, {"role": "user", "content": "More."}])
        assert turn.is_extension == is_extension
        assert turn.reason == (None if is_extension else STRIPPED)
        keep(it, qwen3_renderer, turn, "<think>\n\n</think>\n\nNo.")
        assert proven(it) == ([2] if is_extension else [1, 1])
        thought = it.begin([*START, answer, {"role": "user", "content": "More."}])
        assert thought.is_extension  # with its reasoning, the request extends the trace


def test_parallel_branches_fork_and_share_their_common_spans(renderer: Renderer):
    it = book(renderer)
    first = it.begin(START)
    ids, answer = keep(it, renderer, first, "One.")
    left = it.begin([*START, answer, {"role": "user", "content": "Left."}])
    right = it.begin([*START, answer, {"role": "user", "content": "Right."}])  # both are in flight
    keep(it, renderer, left, "L.")
    keep(it, renderer, right, "R.")
    assert left.prompt[: len(first.prompt) + len(ids)] == right.prompt[: len(first.prompt) + len(ids)]
    assert proven(it) == [2, 1] and it.forks == {BRANCHED: 1}
    assert [span.is_owned for span in it.traces()[1].spans] == [False, True]


def test_an_identical_request_is_a_new_sample(renderer: Renderer):
    it = book(renderer)
    keep(it, renderer, it.begin(START), "One.")
    turn = it.begin(START)
    assert not turn.is_extension
    keep(it, renderer, turn, "Another one.")
    assert proven(it) == [1, 1] and it.forks == {BRANCHED: 1}


def test_other_tools_and_other_conversations_start_new_traces(renderer: Renderer):
    it = book(renderer)
    _, answer = keep(it, renderer, it.begin(START), "One.")
    other = it.begin([*START, answer, {"role": "user", "content": "More."}], [SHELL])
    assert other.reason == OTHER_TOOLS
    agent = it.begin([{"role": "system", "content": "You are a sub-agent."}, {"role": "user", "content": "Look."}])
    assert agent.reason == NEW
    keep(it, renderer, other, "Two.")
    keep(it, renderer, agent, "Three.")
    assert proven(it) == [1, 1, 1]


def test_an_abandoned_completion_has_a_trace_that_is_untrainable(renderer: Renderer):
    it = book(renderer)
    _, answer = keep(it, renderer, it.begin(START), "One.")
    messages = [*START, answer, {"role": "user", "content": "More."}]
    keep(it, renderer, it.begin(messages), "Abandoned.", is_abandoned=True)
    again = it.begin(messages)
    assert again.is_extension
    keep(it, renderer, again, "Two.")
    assert proven(it) == [2, 1]
    assert [(trace.is_trainable, trace.untrainable_reason) for trace in it.traces()] == [
        (True, None),
        (False, ABANDONED),
    ]


def test_a_failed_request_is_not_recorded(renderer: Renderer):
    it = book(renderer)
    _, answer = keep(it, renderer, it.begin(START), "One.")
    messages = [*START, answer, {"role": "user", "content": "More."}]
    it.begin(messages)  # without a completion
    keep(it, renderer, it.begin(messages), "Two.")
    assert proven(it) == [2] and it.forks == {}


def test_a_request_without_sampled_tokens_is_not_recorded(renderer: Renderer):
    it = book(renderer)
    _, answer = keep(it, renderer, it.begin(START), "One.")
    messages = [*START, answer, {"role": "user", "content": "More."}]
    assert it.keep(it.begin(messages), [], [], finish_reason="abort").content == ""
    keep(it, renderer, it.begin(messages), "Two.")
    assert proven(it) == [2] and it.forks == {}


def test_a_retry_of_an_abandoned_first_request_is_the_first(renderer: Renderer):
    it = book(renderer)
    keep(it, renderer, it.begin(START), "Abandoned.", is_abandoned=True)
    keep(it, renderer, it.begin(START), "One.")
    assert proven(it) == [1, 1] and [trace.fork_reason for trace in it.traces()] == [ABANDONED, None]


def test_only_one_of_two_concurrent_first_requests_has_no_fork_reason(renderer: Renderer):
    it = book(renderer)
    left, right = it.begin(START), it.begin(START)
    other = it.begin([{"role": "user", "content": "Look."}])
    for turn in (left, right, other):
        keep(it, renderer, turn, "Yes.")
    assert [trace.fork_reason for trace in it.traces()] == [None, BRANCHED, NEW]
    assert proven(it) == [1, 1, 1] and it.forks == {BRANCHED: 1, NEW: 1}


def test_the_recorded_history_is_what_the_client_received(renderer: Renderer):
    """A call that could not be parsed may be sent as text; the client sends that text back."""
    it = book(renderer)
    turn = it.begin(START, [SHELL])
    text = "Look: <tool_call>{nope}</tool_call>"
    received = {"role": "assistant", "content": text}
    ids, _ = keep(it, renderer, turn, text, parsed=Parsed(text, "", (), received))
    answer = dict(renderer.parse(ids, turn.prompt, [SHELL]).message)
    assert answer["tool_calls"]
    more = {"role": "user", "content": "More."}
    after = it.begin([*START, received, more], [SHELL])
    assert after.prompt[: len(turn.prompt) + len(ids)] == turn.prompt + ids
    assert not it.begin([*START, answer, more], [SHELL]).is_extension


def test_a_turn_that_is_already_parsed_is_not_parsed_again(renderer: Renderer):
    it = book(renderer)
    turn = it.begin(START)
    ids = renderer.encode("One.")
    reader = Reader(renderer, turn.prompt)
    reader.feed(ids)
    _, parsed = reader.finish()
    assert it.keep(turn, ids, None, finish_reason="length", parsed=parsed) is parsed
    assert it.begin([*START, parsed.message, {"role": "user", "content": "More."}]).is_extension


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: [*m[:2], {"role": "assistant", "content": "Not mine."}, *m[3:]], REWRITTEN),
        (lambda m: [*m[:4], {"role": "assistant", "content": "Not mine."}, m[3]], REWRITTEN),
        (lambda m: [m[0], {"role": "user", "content": "So far: all is well."}], REWRITTEN),
        (lambda m: [*m[:3], {**m[3], "content": "Edited."}, *m[4:]], REWRITTEN),
        (lambda m: m[:3], REWRITTEN),
        (lambda m: [{"role": "user", "content": "Look."}], NEW),
        (lambda m: m[:4], BRANCHED),
        (lambda m: m[:2], BRANCHED),
    ],
    ids=[
        "first answer",
        "foreign answer",
        "compaction",
        "edited result",
        "nothing new",
        "sub-agent",
        "asked again",
        "from the start",
    ],
)
def test_every_fork_has_its_reason(renderer: Renderer, change: Any, reason: str):
    it = book(renderer)
    messages: list[Any] = list(START)
    for number in range(2):
        _, answer = keep(it, renderer, it.begin(messages), f"answer {number}")
        messages += [answer, {"role": "user", "content": f"more {number}"}]
    turn = it.begin(change(messages))
    keep(it, renderer, turn, "Yes.")
    proven(it)
    assert it.forks == {reason: 1}


def test_other_tools_are_detected_after_any_number_of_results(renderer: Renderer):
    it = book(renderer)
    _, answer = keep(it, renderer, it.begin(START, [SHELL]), call("{}") + call("{}"))
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "done"} for n in range(2)]
    assert it.begin([*START, answer, *results], []).reason == OTHER_TOOLS
    assert it.begin(START, []).reason == OTHER_TOOLS


# --- whatever a client does ---

STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "what": st.sampled_from(
                ["go on", "go on", "go on", "branch", "rewrite", "anew", "compact", "again", "lose", "abandon", "strip"]
            ),
            "said": plain,
            "answer": plain,
            "thought": st.one_of(st.none(), plain),
            "calls": st.integers(0, 2),
            "is_cut": st.booleans(),
            "role": st.sampled_from(["user", "tool", "system", "developer"]),
            "which": st.integers(0, 5),
            "is_rewritten": st.booleans(),
        }
    ),
    min_size=1,
    max_size=8,
)


def written_otherwise(message: Any) -> Any:
    """The same message as another client would encode it."""
    out = {**message, "content": [{"type": "text", "text": message["content"]}], "refusal": None}
    if message.get("tool_calls"):
        out["tool_calls"] = [
            {
                "id": f"toolu_{index}",
                "function": {
                    "arguments": _reformatted(one["function"]["arguments"]),
                    "name": one["function"]["name"],
                },
            }
            for index, one in enumerate(message["tool_calls"])
        ]
    return out


def _reformatted(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=1, sort_keys=True)
    except ValueError:
        return arguments


def without_reasoning(messages: list[Any]) -> list[Any]:
    return [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]


@pytest.mark.parametrize("name", ["chatml", "chatml of qwen3", "qwen3"])
@pytest.mark.parametrize("reasoning", ["keep", "as_sent"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_every_span_has_one_owner_whatever_a_client_does(
    chatml: ChatML, qwen3: Tokenizer, qwen3_renderer: Renderer, name: str, reasoning: str, steps: list[Any]
):
    """A prompt starts with the sampled tokens whenever the client sends back what it received."""
    renderer = {"chatml": chatml, "chatml of qwen3": ChatML(qwen3), "qwen3": qwen3_renderer}[name]
    it = book(renderer, reasoning=reasoning)
    histories: list[list[Any]] = [list(START)]
    known: dict[str, list[list[int]]] = {}  # a history with its completion → its ids, each time it was recorded

    def key(messages: list[Any]) -> str:
        roles = [{**m, "role": m["role"].replace("developer", "system")} for m in messages]
        return json.dumps(roles if reasoning == "as_sent" else without_reasoning(roles))

    for step in steps:
        what, content, which = step["what"], step["said"], step["which"]
        messages = list(histories[which % len(histories)] if what in ("branch", "again") else histories[-1])
        if what == "rewrite":
            messages[which % len(messages)] = {**messages[which % len(messages)], "content": content + "!"}
        elif what == "anew":
            messages = [{"role": "user", "content": content}]
        elif what == "compact":
            messages = [messages[0], {"role": "user", "content": "So far: " + content}]
        elif what == "strip":
            messages = without_reasoning(messages)
        sent = [written_otherwise(message) for message in messages] if step["is_rewritten"] else messages
        turn = it.begin(sent, [SHELL])
        last = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        before = known.get(key(messages[: last + 1]), [])
        if before:
            assert turn.is_extension or turn.reason == NOT_EXTENDED
            assert name == "qwen3" or turn.is_extension
        if turn.is_extension:
            assert any(turn.prompt[: len(ids)] == ids for ids in before)
        if what == "lose":
            continue
        text = "" if step["thought"] is None else f"<think>\n{step['thought']}\n</think>\n\n"
        text += step["answer"] + call(json.dumps({"text": content})) * step["calls"]
        ids, answer = keep(it, renderer, turn, text, is_cut=step["is_cut"], is_abandoned=what == "abandon")
        if what == "abandon" or not ids:
            continue
        known.setdefault(key([*messages, answer]), []).append(turn.prompt + ids)
        histories.append([*messages, answer, {"role": step["role"], "content": content}])
    proven(it)
