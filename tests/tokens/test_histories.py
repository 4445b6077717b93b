"""Two histories have the same digest exactly if they have the same content."""

import copy
import json
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import assume, given

from rollyard.tokens import histories
from rollyard.tokens.histories import Histories, History, digest

from .books import SHELL
from .strategies import conversations


def history_of(messages: Any, *, has_reasoning: bool = True, tools: Any = ()) -> History:
    reader = Histories(has_reasoning=has_reasoning)
    return reader.of(messages, reader.toolset(tools))


def chain(*messages: Any, tools: Any = ()) -> tuple[bytes, ...]:
    return history_of(messages, tools=tools).chain


def tool(name: str = "f", **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def answer(arguments: Any, **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        **more,
    }


SAME: dict[str, tuple[Any, Any]] = {
    "text in parts": ({"role": "user", "content": "ab"}, {"role": "user", "content": [{"text": "a"}, {"text": "b"}]}),
    "no content": ({"role": "user", "content": None}, {"role": "user"}),
    "developer": ({"role": "system", "content": "x"}, {"role": "developer", "content": "x"}),
    "arguments": (answer('{"a": [1, null], "b": "é"}'), answer({"b": "\u00e9", "a": (1, None)})),
    "whole numbers": (answer('{"a": 2.0, "b": 1e3, "c": -0.0}'), answer('{"a":2,"b":1000,"c":0}')),
    "no arguments": (answer(""), answer("{}")),
    "other mappings": (answer(MappingProxyType({"a": MappingProxyType({})})), answer({"a": {}})),
    "large numbers": (answer('{"a": 36893488147419103232}'), answer({"a": 2**65})),
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "an image": ({"role": "user", "content": [{"type": "image", "data": "a"}]}, {"role": "user", "content": ""}),
    "images": (
        {"role": "user", "content": [{"type": "image", "data": "a"}]},
        {"role": "user", "content": [{"type": "image", "data": "b"}]},
    ),
    "an image and its JSON": (
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "user", "content": '{"type":"image"}'},
    ),
    "its role": ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}),
    "its name": ({"role": "user", "content": "a", "name": "Ann"}, {"role": "user", "content": "a"}),
    "false and its text": (answer('{"a": false}'), answer('{"a": "false"}')),
    "false and none": (answer('{"a": false}'), answer('{"a": null}')),
    "not a number": (answer('{"a": NaN}'), answer('{"a": null}')),
    "beyond floats": (answer('{"a": 1e999}'), answer('{"a": null}')),
    "beyond exact floats": (answer('{"a": 1e300}'), answer('{"a": 1e301}')),
    "invalid JSON": (answer("{nope"), answer("{nope}")),
    "a thought": (answer("{}", reasoning_content="hm"), answer("{}")),
    "spaces": ({"role": "user", "content": "a"}, {"role": "user", "content": "a "}),
}


@pytest.mark.parametrize("name", SAME)
def test_differences_of_encoding_are_ignored(name: str):
    one, other = SAME[name]
    assert chain(one) == chain(other)


@pytest.mark.parametrize("name", DIFFERENT)
def test_differences_of_content_are_not_ignored(name: str):
    one, other = DIFFERENT[name]
    assert chain(one) != chain(other)


def test_a_lone_surrogate_and_deep_nesting_have_a_digest():
    assert chain({"role": "user", "content": "\ud83d"}) != chain({"role": "user", "content": "\ud83e"})
    assert chain(answer("{}", reasoning_content="\ud83d")) != chain(answer("{}"))
    for depth in (300, 900, 100_000):
        deep = '{"a": ' + "[" * depth + "]" * depth + "}"
        assert chain(answer(deep)) == chain(answer(deep)) != chain(answer("{}"))


@given(messages=conversations())
def test_a_history_is_digested_equally_step_by_step_and_at_once(messages: list[Any]):
    for has_reasoning in (True, False):
        reader, step = Histories(has_reasoning=has_reasoning), History()
        for message in messages:
            step = reader.extended(step, message, reader.toolset(()))
        whole = history_of(messages, has_reasoning=has_reasoning)
        assert step == whole and len(whole.chain) == len(messages) + 1
        copied = history_of(json.loads(json.dumps(messages)), has_reasoning=has_reasoning)
        assert copied == whole
    assert history_of(messages, has_reasoning=False).chain == history_of(messages, has_reasoning=True).bare


@given(one=conversations(), other=conversations())
def test_different_histories_share_no_link(one: list[Any], other: list[Any]):
    assume(one[0] != other[0])
    assert not set(chain(*one)[1:]) & set(chain(*other)[1:])


def test_the_order_of_keys_does_not_change_a_digest():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 2, "b": 1})


# --- defaults that a tool's schema declares ---

EDIT = tool(all={"type": "boolean", "default": False}, n={"default": 2.0}, inner={"default": {"a": []}}, path={})


@pytest.mark.parametrize(
    "with_it",
    ['{"path": "a", "all": false}', '{"n": 2, "path": "a"}', '{"inner": {"a": []}, "n": 2.0, "path": "a"}'],
)
def test_an_argument_at_its_declared_default_equals_a_missing_one(with_it: str):
    without = answer('{"path": "a"}')
    assert chain(answer(with_it), tools=[EDIT]) == chain(without, tools=[EDIT])
    assert chain(answer(with_it)) != chain(without)  # without a declared default


@pytest.mark.parametrize(
    "other",
    [
        '{"path": "a", "all": true}',
        '{"path": "a", "all": null}',
        '{"path": "a", "all": 0}',
        '{"path": "a", "all": "false"}',
        '{"path": "a", "inner": {}}',
        '{"path": "a", "more": false}',
        '{"path": "b"}',
        '[{"all": false}]',
    ],
)
def test_any_other_value_is_another_call(other: str):
    assert chain(answer(other), tools=[EDIT]) != chain(answer('{"path": "a"}'), tools=[EDIT])


@pytest.mark.parametrize(
    "tools",
    [
        [tool("g", all={"default": False})],
        [tool(inner={"properties": {"all": {"default": False}}})],
        [tool(all={"default": False}), tool(all={"default": True})],
        [tool(all={"default": False}), tool(), tool(all={"default": False})],
        [{"function": None}, {"function": {"name": "f", "parameters": []}}, tool(all=[]), {"function": {"name": []}}],
        [tool(all={"default": False}, text={"default": [float("nan"), "\ud83d"]})],
    ],
    ids=["another tool's", "nested", "offered twice", "offered thrice", "no schema", "not JSON"],
)
def test_only_defaults_of_the_tools_own_arguments_count(tools: Any):
    assert chain(answer('{"all": false}'), tools=tools) != chain(answer("{}"), tools=tools)


def test_only_the_tools_of_the_same_request_count():
    """One reader with its cache: an entry for other tools must not be used."""
    reader = Histories(has_reasoning=True)
    sets = [reader.toolset(tools) for tools in ((), [EDIT], [tool(all={"default": True})])]
    for _ in range(2):
        same = [reader.of([answer('{"all": false}')], it) == reader.of([answer("{}")], it) for it in sets]
        assert same == [False, True, False]


# --- its cost ---


def test_arguments_are_parsed_once_however_often_they_are_sent(monkeypatch: pytest.MonkeyPatch):
    parsed: list[str] = []
    parse = json.loads
    monkeypatch.setattr(histories.json, "loads", lambda text, **how: parsed.append(text) or parse(text, **how))
    reader = Histories(has_reasoning=True)
    toolset, messages = reader.toolset([SHELL]), [answer(f'{{"n": {n}}}') for n in range(5)]
    first = reader.of(messages, toolset)
    assert len(parsed) == 5
    assert reader.of(copy.deepcopy(messages), toolset) == first and len(parsed) == 5


def test_caches_are_bounded_and_clearing_them_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(histories, "MAX_CALLS", 3)
    monkeypatch.setattr(histories, "MAX_TOOLSETS", 3)
    reader = Histories(has_reasoning=True)
    messages = [answer(f'{{"n": {n}}}') for n in range(10)]
    toolset = reader.toolset([EDIT])
    first = reader.of(messages, toolset)
    assert reader.of(messages, toolset) == first == history_of(messages, tools=[EDIT])
    for n in range(10):
        reader.toolset([tool(f"t{n}")])
    assert reader.toolset([EDIT]) == toolset
    assert len(reader._read) <= 3 and len(reader._toolsets) <= 3


def test_no_text_equals_an_image():
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    written = json.dumps(image, sort_keys=True, separators=(",", ":"))
    shown = chain({"role": "user", "content": [image]})
    for text in (written, f"\0{written}", f"[{written}]"):
        assert chain({"role": "user", "content": text}) != shown
    both = [{"role": "user", "content": [*lead, image, {"type": "text", "text": "b"}]} for lead in (["a"], ["", "a"])]
    assert chain(both[0]) == chain(both[1]) != chain({"role": "user", "content": ["b", image, "a"]})


def test_arguments_that_cannot_be_compared_raise():
    deep: Any = 1
    for _ in range(5000):
        deep = {"a": deep}
    call = {"id": "1", "function": {"name": "f", "arguments": deep}}
    with pytest.raises(RecursionError):
        chain({"role": "assistant", "content": "", "tool_calls": [call]})
