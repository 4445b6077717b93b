"""A large body is parsed in steps, with the same result as orjson's."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.core import Json, Sampling
from rollyard.engines.base import Kind
from rollyard.gateway import counts, intake, parser
from rollyard.gateway import parameters as wishes
from rollyard.gateway.app import CHAT, MESSAGES, RESPONSES
from rollyard.gateway.base import ChatRequest, Problem, RequestParameter
from rollyard.gateway.body_size import STEP_BYTES
from rollyard.gateway.counts import MOST_STRUCTURED_CHARS, MOST_STRUCTURED_VALUES, weigh
from rollyard.gateway.dialects import responses
from rollyard.gateway.parser import MOST_CHARS, MOST_SKELETON_BYTES, WHOLE_BYTES, TooMuchText, parse
from rollyard.tokens import histories
from rollyard.tokens.histories import LONG_CHARS, Histories
from tests.gateway.site import gateway
from tests.gateway.test_hostile import post
from tests.gateway.test_session import says

TEXT = st.text('ab"\\/,{[é€😀\n\x01', max_size=40)
JSON = st.recursive(
    st.none() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=20,
)


@pytest.fixture
def in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser, "WHOLE_BYTES", 0)
    monkeypatch.setattr(parser, "LONG_BYTES", 4)
    monkeypatch.setattr(parser, "STEP_BYTES", 16)


def outcome(read: Any, raw: bytes) -> Any:
    try:
        return read(raw)
    except ValueError:
        return ValueError


@pytest.mark.usefixtures("in_small_steps")
@given(JSON, st.booleans())
def test_parsing_in_steps_gives_the_same_result(value: Json, is_ascii: bool):
    raw = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert parse(raw) == orjson.loads(raw) == value
    assert parse(bytearray(raw)) == value


@pytest.mark.usefixtures("in_small_steps")
@given(JSON, st.booleans(), st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3)), min_size=1, max_size=3))
def test_invalid_json_is_refused_in_steps_too(value: Json, is_ascii: bool, edits: list[tuple[int, bytes]]):
    raw = json.dumps(value, ensure_ascii=is_ascii).encode()
    for at, new in edits:
        raw = raw[: at % (len(raw) + 1)] + new + raw[at % (len(raw) + 1) + len(new) :]
    assert outcome(parse, raw) == outcome(orjson.loads, raw)


@pytest.mark.usefixtures("in_small_steps")
@pytest.mark.parametrize(
    "raw",
    [
        b'"' + b"\\ud83d" * 10 + b'"',
        b'"' + b"\\ude00" * 10 + b'"',
        b'"aaaaaaaaaaaaaa\\ud83d\\ude00bbbbbbbbbbbb"',
        b'"aaaaaaaaaaaaa\\u00e9bbbbbbbbbbbb"',
        b'"' + b"\x80" * 40 + b'"',
        b'"' + b"a" * 40,
        b'"' + b"a" * 40 + b"\\",
        b'{"' + b"k" * 40 + b'":1,"' + b"k" * 40 + b'":2}',
        b'["' + b"a" * 40 + b'"',
    ],
)
def test_the_edges_of_a_step(raw: bytes):
    assert outcome(parse, raw) == outcome(orjson.loads, raw)


def test_the_parser_is_never_called_with_more_than_a_step(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    loads = orjson.loads
    monkeypatch.setattr(parser.orjson, "loads", lambda raw: (sizes.append(len(raw)), loads(raw))[1])
    for text in ("word " * (MOST_CHARS // 5), "\n" * MOST_CHARS, "😀" * (MOST_CHARS // 2), "\\" * MOST_CHARS):
        assert parse(orjson.dumps({"messages": [text]})) == {"messages": [text]}
    assert max(sizes) <= STEP_BYTES + 2


def test_a_string_that_looks_like_a_mark_is_a_string():
    """The mark that replaces a long string is random for each body."""
    long = "x" * WHOLE_BYTES
    body = {"0": "0", "a": [long, "0", "1"], long: "1"}
    assert parse(orjson.dumps(body)) == body


def test_all_texts_together_are_bounded():
    half = "x" * (MOST_CHARS // 2)
    assert parse(orjson.dumps([half, half])) == [half, half]
    with pytest.raises(TooMuchText):
        parse(orjson.dumps([half, half, "x" * 200]))


async def test_a_text_beyond_the_bound_is_a_context_overflow():
    raw = orjson.dumps({"model": "any", "messages": [{"role": "user", "content": "x" * (MOST_CHARS + 1)}]})
    async with gateway(says("ok"), engine_options={"max_context": 1 << 20}) as site:
        status, answer = await post(site, raw)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer
        assert "1048576 tokens" in answer["error"]["message"] and site.session.overflow is not None
        assert str(MOST_CHARS) in site.session.overflow.detail


def test_the_structure_without_texts_is_bounded():
    short = "x" * 120
    raw = orjson.dumps({"messages": [short] * (MOST_SKELETON_BYTES // 120)})
    with pytest.raises(Problem, match=f"{MOST_SKELETON_BYTES} is the maximum") as caught:
        intake.read(CHAT, raw)
    assert caught.value.status == 413
    longer = orjson.dumps([short * 2] * (MOST_SKELETON_BYTES // 120))
    assert len(parse(longer)) == MOST_SKELETON_BYTES // 120  # type: ignore[arg-type]


# --- values that are serialized again


def arguments_of(dialect: Any, arguments: Any) -> bytes:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    items: dict[Any, list[Json]] = {
        CHAT: [
            {"role": "user", "content": "go"},
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": text}}]},
        ],
        MESSAGES: [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": arguments}]},
            {"role": "user", "content": "go on"},
        ],
        RESPONSES: [{"type": "function_call", "call_id": "a", "name": "f", "arguments": text}],
    }
    name = "input" if dialect is RESPONSES else "messages"
    return orjson.dumps({"model": "any", "max_tokens": 9, name: items[dialect]})


@pytest.mark.parametrize("dialect", [CHAT, MESSAGES, RESPONSES], ids=lambda dialect: dialect.name)
def test_the_arguments_of_a_call_are_bounded(dialect: Any, monkeypatch: pytest.MonkeyPatch):
    intake.read(dialect, arguments_of(dialect, {"a": [1] * 100}))
    monkeypatch.setattr(type(dialect), "read", lambda *_: pytest.fail("it was read"))
    name = "input" if dialect is RESPONSES else "messages"
    with pytest.raises(Problem, match=f"Invalid '{name}'.* {MOST_STRUCTURED_VALUES} JSON values"):
        intake.read(dialect, arguments_of(dialect, {"a": [1] * MOST_STRUCTURED_VALUES}))
    with pytest.raises(Problem, match=f"Invalid '{name}'.* {MOST_STRUCTURED_CHARS} characters"):
        intake.read(dialect, arguments_of(dialect, {"a": "x" * MOST_STRUCTURED_CHARS}))


def test_tools_are_bounded_by_their_serialized_size(monkeypatch: pytest.MonkeyPatch):
    def raw(tools: list[Json], **fields: Json) -> bytes:
        return orjson.dumps({"model": "a", "messages": [{"role": "user", "content": "a"}], "tools": tools, **fields})

    def tool(**fields: Json) -> Json:
        return {"type": "function", "function": {"name": "f", "parameters": {}, **fields}}

    intake.read(CHAT, raw([tool(description="x" * (MOST_STRUCTURED_CHARS - 200))]))
    monkeypatch.setattr(type(CHAT), "read", lambda *_: pytest.fail("it was read"))
    for refused, why in (
        (raw([tool(parameters={"enum": [1] * MOST_STRUCTURED_VALUES})]), f"{MOST_STRUCTURED_VALUES} JSON values"),
        (raw([tool(description="\n" * (MOST_STRUCTURED_CHARS // 2))]), f"{MOST_STRUCTURED_CHARS} characters"),
        (raw([tool(description="x" * (MOST_STRUCTURED_CHARS // 2))] * 2), f"{MOST_STRUCTURED_CHARS} characters"),
        (raw([], metadata={"\x01" * (MOST_STRUCTURED_CHARS // 6): "x"}), f"{MOST_STRUCTURED_CHARS} characters"),
    ):
        with pytest.raises(Problem, match=why):
            intake.read(CHAT, refused)


@given(JSON)
def test_a_value_is_measured_as_serialized(value: Json):
    chars, _ = weigh(value, counts._written)
    assert chars <= len(json.dumps(value, ensure_ascii=False))


def test_a_long_text_is_not_serialized_for_comparison(monkeypatch: pytest.MonkeyPatch):
    written: list[int] = []
    dumps = orjson.dumps
    monkeypatch.setattr(histories.orjson, "dumps", lambda *a, **k: (written.append(len(r := dumps(*a, **k))), r)[1])
    known = Histories(has_reasoning=True)
    none = known.toolset(())

    def digest(text: str, **fields: Json) -> bytes:
        return known.of([{"role": "assistant", "content": text, "reasoning_content": text, **fields}], none).chain[-1]

    long = "\n" * 10 * LONG_CHARS
    parts: Json = [{"type": "text", "text": long[:7]}, {"type": "text", "text": long[7:]}]
    assert digest(long) == digest(long) == digest(long, content=parts)
    assert digest(long) != digest(long + "x") != digest("x" + long)
    assert digest(long, content=[*parts, {"type": "image"}]) != digest(long)
    assert digest(long, role=long, name=long) == digest(long, role=long, name=long)
    assert max(written) < LONG_CHARS


def test_a_schema_is_measured_before_it_is_serialized(monkeypatch: pytest.MonkeyPatch):
    for module in (wishes, responses):
        monkeypatch.setattr(module.orjson, "dumps", lambda *_: pytest.fail("it was written"))
    schema: Json = {"type": "json_schema", "schema": {"description": "\n" * 300_000}}
    request = ChatRequest((), wishes=(RequestParameter("format", "response_format", schema),))
    granted = wishes.ParameterRules(Sampling(), is_strict=False, has_structured_output=True).grant(request, Kind.VLLM)
    assert "more than" in granted.warnings[0]
    assert responses._echo({"metadata": schema}, "metadata") is None
