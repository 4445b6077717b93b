"""Splicing: what was sampled is sent again as it was, however the client wrote its history down."""

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollyard.core import Sampling, Trajectory
from rollyard.tokens import Renderer, verify
from rollyard.tokens.splice import (
    ABANDONED,
    BRANCHED,
    NEW,
    OTHER_TOOLS,
    REWRITTEN,
    Book,
    Turn,
)
from tests.tokens.strategies import plain

SHELL = {"type": "function", "function": {"name": "shell", "description": "", "parameters": {"type": "object"}}}
START = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]


@pytest.fixture(params=["chatml", "qwen3_renderer"])
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return request.getfixturevalue(request.param)


def book(renderer: Renderer, **more: Any) -> Book:
    return Book(renderer, sampling=Sampling(), policy="p", model="m", **more)


def keep(it: Book, renderer: Renderer, turn: Turn, text: str, **more: Any) -> Any:
    """As an engine would answer: any tokens, here those of a text, and the one that ends a turn."""
    ids = [*renderer.encode(text), *renderer.stop_token_ids[:1]]
    parsed = it.keep(
        turn,
        ids,
        [-0.5] * len(ids),
        finish_reason="stop",
        versions=[(3, 0, len(ids))],
        logprobs_kind="processed",
        **more,
    )
    return ids, copy.deepcopy(dict(parsed.message))


def proven(it: Book) -> list[int]:
    """Verifies all traces; the number of owned spans in each."""
    traces = it.traces()
    verify(Trajectory("r", 1, traces=traces))
    owned = [span.turn for trace in traces for span in trace.spans if span.is_owned]
    assert sorted(owned) == list(range(it.turns))
    assert sum(trace.sampled_tokens for trace in traces) == it.sampled_tokens
    return [sum(span.is_owned for span in trace.spans) for trace in traces]


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {arguments}}}\n</tool_call>'


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
def test_how_a_client_writes_its_history_down_does_not_matter(renderer: Renderer, written: str):
    """`false` as `False`, empty parameters, other spacing, other ids, null fields, text in parts: known breakers."""
    it = book(renderer)
    turn = it.begin(START, [SHELL])
    ids, answer = keep(it, renderer, turn, "Let me see. " + call(written))
    assert answer["tool_calls"], "the renderer did not read the call"
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


def test_a_changing_header_line_is_no_other_history(renderer: Renderer):
    it = book(renderer)

    def messages(header: str) -> list[Any]:
        system = f"x-anthropic-billing-header: cc_version={header};\nBe brief."
        return [{"role": "system", "content": system}, {"role": "user", "content": "Go."}]

    turn = it.begin(messages("1.a"))
    ids, answer = keep(it, renderer, turn, "Yes?")
    after = it.begin([*messages("1.b"), answer, {"role": "user", "content": "More."}])
    assert after.prompt[: len(turn.prompt) + len(ids)] == turn.prompt + ids  # the model goes on seeing the first one


def test_missing_content_is_another_history(renderer: Renderer):
    it = book(renderer)
    _, answer = keep(it, renderer, it.begin(START), "A long answer.")
    shorter = {**answer, "content": "A long"}
    turn = it.begin([*START, shorter, {"role": "user", "content": "More."}])
    assert not turn.is_extension and turn.reason == REWRITTEN
    keep(it, renderer, turn, "Yes.")
    assert proven(it) == [1, 1] and it.forks == {REWRITTEN: 1}


def test_what_was_thought_is_kept_or_is_as_it_was_sent(qwen3_renderer: Renderer):
    for reasoning, is_extension in (("keep", True), ("as_sent", False)):
        it = book(qwen3_renderer, reasoning=reasoning)
        _, answer = keep(it, qwen3_renderer, it.begin(START), "<think>\nHm.\n</think>\n\nYes.")
        assert answer["reasoning_content"]
        without = {key: value for key, value in answer.items() if key != "reasoning_content"}
        turn = it.begin([*START, without, {"role": "user", "content": "More."}])
        assert turn.is_extension == is_extension
        keep(it, qwen3_renderer, turn, "<think>\n\n</think>\n\nNo.")
        assert proven(it) == ([2] if is_extension else [1, 1])
        thought = it.begin([*START, answer, {"role": "user", "content": "More."}])
        assert thought.is_extension  # who sends it back, extends


def test_parallel_branches_fork_and_share_what_they_share(renderer: Renderer):
    it = book(renderer)
    first = it.begin(START)
    ids, answer = keep(it, renderer, first, "One.")
    left = it.begin([*START, answer, {"role": "user", "content": "Left."}])
    right = it.begin([*START, answer, {"role": "user", "content": "Right."}])  # both are on their way
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
    assert proven(it) == [1, 1]


def test_other_tools_and_other_conversations_begin_anew(renderer: Renderer):
    it = book(renderer)
    _, answer = keep(it, renderer, it.begin(START), "One.")
    other = it.begin([*START, answer, {"role": "user", "content": "More."}], [SHELL])
    assert other.reason == OTHER_TOOLS
    agent = it.begin([{"role": "system", "content": "You are a sub-agent."}, {"role": "user", "content": "Look."}])
    assert agent.reason == NEW
    keep(it, renderer, other, "Two.")
    keep(it, renderer, agent, "Three.")
    assert proven(it) == [1, 1, 1]


def test_an_abandoned_completion_keeps_a_trace_that_is_not_trained_on(renderer: Renderer):
    it = book(renderer)
    _, answer = keep(it, renderer, it.begin(START), "One.")
    messages = [*START, answer, {"role": "user", "content": "More."}]
    keep(it, renderer, it.begin(messages), "Nobody reads this.", is_abandoned=True)
    again = it.begin(messages)
    assert again.is_extension
    keep(it, renderer, again, "Two.")
    assert proven(it) == [2, 1]
    assert [(trace.is_trainable, trace.untrainable_reason) for trace in it.traces()] == [
        (True, None),
        (False, ABANDONED),
    ]


def test_a_request_that_fails_leaves_no_mark(renderer: Renderer):
    it = book(renderer)
    _, answer = keep(it, renderer, it.begin(START), "One.")
    messages = [*START, answer, {"role": "user", "content": "More."}]
    it.begin(messages)  # and nothing came of it
    keep(it, renderer, it.begin(messages), "Two.")
    assert proven(it) == [2] and it.forks == {}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["go on", "go on", "go on", "branch", "rewrite", "anew", "compact", "lose", "abandon"]),
        plain,
        plain,
        st.booleans(),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_whatever_a_client_does_every_span_has_one_owner(renderer: Renderer, steps: list[Any]):
    it = book(renderer)
    histories: list[list[Any]] = [list(START)]
    sampled: list[tuple[list[Any], list[int], list[int]]] = []  # history with its completion, prompt, ids
    for what, said, answer_text, has_call, which in steps:
        history = histories[-1] if what != "branch" else histories[which % len(histories)]
        messages = list(history)
        if what == "rewrite" and len(messages) > 2:
            messages[which % len(messages)] = {**messages[which % len(messages)], "content": said + "!"}
        elif what == "anew":
            messages = [{"role": "user", "content": said}]
        elif what == "compact" and len(messages) > 3:
            messages = [messages[0], {"role": "user", "content": "So far: " + said}]
        turn = it.begin(messages, [SHELL])
        if turn.is_extension:
            known = [prompt + ids for before, prompt, ids in sampled if before == messages[: len(before)]]
            assert any(turn.prompt[: len(ids)] == ids for ids in known)
        if what == "lose":
            continue
        text = answer_text + (call(json.dumps({"text": said})) if has_call else "")
        ids, answer = keep(it, renderer, turn, text, is_abandoned=what == "abandon")
        if what != "abandon":
            sampled.append(([*messages, answer], turn.prompt, ids))
            histories.append([*messages, answer, {"role": "user", "content": said}])
    proven(it)


def pieces(renderer: Renderer, *texts: str) -> list[int]:
    """Tokens that no tokenizer would give for the whole text: a model may sample them all the same."""
    return [token for text in texts for token in renderer.encode(text)]


BREAKERS: dict[str, tuple[str, ...]] = {
    "false written as the template would not": (
        '<tool_call>\n{"name": "shell", "arguments": {"a":false}}\n</tool_call>',
    ),
    "empty parameters": ('<tool_call>\n{"arguments": {}, "name": "shell"}\n</tool_call>',),
    "a text in other tokens than the tokenizer's": ("hel", "lo wor", "ld"),
    "thinking that the template strips": ("<think>\nHm.\n</think>\n\nYes.",),
    "spaces before the end": ("Yes.  \n\n",),
}


@pytest.mark.parametrize("name", BREAKERS)
def test_what_breaks_rendering_anew_does_not_break_this(qwen3_renderer: Renderer, name: str):
    """Each is shown to break the plain way, or it would show nothing."""
    it = book(qwen3_renderer, reasoning="keep")
    turn = it.begin(START, [SHELL])
    ids = [*pieces(qwen3_renderer, *BREAKERS[name]), *qwen3_renderer.stop_token_ids[:1]]
    parsed = it.keep(turn, ids, [-0.5] * len(ids), finish_reason="stop", versions=[(0, 0, len(ids))])
    sent = {key: value for key, value in parsed.message.items() if key != "reasoning_content"}
    messages = [*START, sent, {"role": "user", "content": "More."}]
    known = turn.prompt + ids
    assert qwen3_renderer.render(messages, [SHELL])[: len(known)] != known
    after = it.begin(messages, [SHELL])
    assert after.is_extension and after.prompt[: len(known)] == known
