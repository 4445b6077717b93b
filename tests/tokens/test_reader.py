"""A turn parses equally in pieces and whole, wherever it is cut, and nothing emitted is withdrawn."""

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollyard.tokens import ChatML, Delta, Parsed, Reader, Renderer, Tokenizer, ToolCall
from rollyard.tokens.calls import assistant_message
from rollyard.tokens.general import TemplateRenderer
from rollyard.tokens.library import READ_BY_PIECES, LibraryRenderer
from rollyard.tokens.text_stream import TextStream

from .strategies import plain

pytestmark = pytest.mark.slow

HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls é🙂"}}\n</tool_call>'
XML = "<tool_call>\n<function=shell>\n<parameter=command>\nls é🙂\n</parameter>\n</function>\n</tool_call>"

NAMES = ["chatml", "chatml by text", "chatml of qwen3", "template", "template of qwen3", *sorted(READ_BY_PIECES)]


@pytest.fixture(scope="module")
def every(request: pytest.FixtureRequest) -> dict[str, Renderer]:
    small, qwen3 = request.getfixturevalue("small"), request.getfixturevalue("qwen3")
    return {
        "chatml": ChatML(small),
        "chatml by text": request.getfixturevalue("small_by_text"),
        "chatml of qwen3": ChatML(qwen3),
        "template": TemplateRenderer(small),
        "template of qwen3": TemplateRenderer(qwen3),
        **{name: LibraryRenderer(qwen3, name) for name in sorted(READ_BY_PIECES)},
    }


@pytest.fixture(params=NAMES)
def renderer(request: pytest.FixtureRequest, every: dict[str, Renderer]) -> Renderer:
    return every[request.param]


def pieces_of(ids: list[int], cuts: list[int]) -> list[list[int]]:
    ends = sorted({cut % (len(ids) + 1) for cut in cuts} | {len(ids)})
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def read(renderer: Renderer, prompt: list[int], pieces: list[list[int]]) -> tuple[list[Any], Parsed]:
    reader = Reader(renderer, prompt)
    emitted = [item for piece in pieces for item in reader.feed(piece)]
    last_items, parsed = reader.finish()
    emitted += last_items
    assert "".join(item.text for item in emitted if isinstance(item, Delta) and item.kind == "text") == parsed.content
    assert "".join(d.text for d in emitted if isinstance(d, Delta) and d.kind == "reasoning") == parsed.reasoning
    assert tuple(item for item in emitted if isinstance(item, ToolCall)) == parsed.tool_calls
    assert all(item.text for item in emitted if isinstance(item, Delta))
    assert parsed.message == assistant_message(parsed.content, parsed.reasoning, parsed.tool_calls)
    return emitted, parsed


def is_stray(renderer: Renderer, prompt: list[int], ids: list[int]) -> bool:
    """Whether it starts with text and a `</think>` without an opening, which ChatML finally parses as thinking."""
    marks = renderer.markers
    assert marks is not None
    if marks.is_text:
        return False  # there it stays text
    for token in ids:
        if token in renderer.stop_token_ids or token == marks.think_open or token in marks.call_open:
            return False
        if token == marks.think_close:
            return prompt[-1] != marks.think_open and not isinstance(renderer, LibraryRenderer)
    return False


FRAGMENTS = st.one_of(
    plain,
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, XML, "\n\n", " ", "<think>\nhm 🙂\n</think>\n\n"]
    ),
    st.sampled_from(["<", "</", "<thi", "</think", "<tool_", "</tool_call", "nk>", "call>", ">"]),  # halves of markers
    st.sampled_from(["ESCAPED </think>", "ESCAPED <tool_call>", "STOP"]),
    st.lists(st.integers(0, 1250), max_size=6),  # any tokens, including parts of characters
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fragments=st.lists(FRAGMENTS, max_size=8),
    cuts=st.lists(st.integers(0, 10**6), max_size=12),
    is_open=st.booleans(),
    by_one=st.booleans(),
)
@example(fragments=["<think>", "hm", CALL, "no"], cuts=[3], is_open=False, by_one=True)
@example(fragments=["hm", CALL, "</think>", "yes", CALL, "and", XML], cuts=[], is_open=True, by_one=True)
@example(fragments=["<think>a ESCAPED </think>", "</think>", "yes"], cuts=[], is_open=False, by_one=True)
@example(fragments=["<think>", "ESCAPED </think>", " b</think>yes"], cuts=[], is_open=False, by_one=True)
@example(fragments=["yes <think> no </think> more"], cuts=[], is_open=False, by_one=True)
@example(fragments=[[150], "<think>", "hm", CALL], cuts=[], is_open=False, by_one=True)  # starts with half a character
@example(fragments=["<tool_call>{", CALL, "<tool_call>{"], cuts=[], is_open=False, by_one=True)
def test_a_turn_parses_equally_in_pieces_and_whole(
    renderer: Renderer, fragments: list[Any], cuts: list[int], is_open: bool, by_one: bool
):
    marks = renderer.markers
    assert marks is not None and (marks.think_open is not None or marks.is_text)
    prompt = [*renderer.render(HI), *([marks.think_open] if is_open and marks.think_open is not None else [])]
    ids: list[int] = []
    for fragment in fragments:
        if fragment == "STOP":
            ids += renderer.stop_token_ids[:1]
        elif isinstance(fragment, str) and fragment.startswith("ESCAPED "):
            text = fragment.removeprefix("ESCAPED ")
            ids += [*renderer.encode(text[:2]), *renderer.encode(text[2:])]
        else:
            ids += renderer.encode(fragment) if isinstance(fragment, str) else fragment
    _, parsed = read(renderer, prompt, [[token] for token in ids] if by_one else pieces_of(ids, cuts))
    if not is_stray(renderer, prompt, ids):
        assert parsed == renderer.parse(ids, prompt)


def test_deltas_are_emitted_as_tokens_arrive(renderer: Renderer):
    """Text is emitted with each piece, and each call when it is closed."""
    call = CALL if renderer.parse(renderer.encode(CALL)).tool_calls[0].name else XML
    reader = Reader(renderer, renderer.render(HI))
    texts = ("<think>\nhm, well", " then\n</think>\n\nyes", " indeed ", call, "\n", call)
    emitted = [reader.feed(renderer.encode(text)) for text in texts]
    assert emitted[:3] == [
        [Delta("reasoning", "hm, well")],
        [Delta("reasoning", " then"), Delta("text", "yes")],
        [Delta("text", " indeed")],
    ]
    assert [[type(item) for item in items] for items in emitted[3:]] == [[ToolCall], [], [ToolCall]]
    assert emitted[3][0].id == f"call_{len(renderer.render(HI))}_0"  # type: ignore[union-attr]
    assert reader.finish()[0] == []


def test_a_split_character_is_emitted_whole(renderer: Renderer):
    ids = renderer.encode("a𝔘𝔫🏴‍☠️b")
    emitted, parsed = read(renderer, [1], [[token] for token in ids])
    assert parsed.content == "a𝔘𝔫🏴‍☠️b"
    assert not any("\ufffd" in delta.text for delta in emitted)


def test_emitted_text_stands_when_the_whole_turn_parses_differently(chatml: ChatML):
    """With a `</think>` without an opening, parsing the whole turn makes the text before it thinking."""
    text = f"Well. </think>\nYes.\n{CALL}"
    assert chatml.parse(chatml.encode(text)).reasoning == "Well."
    emitted, parsed = read(chatml, [1], [[token] for token in chatml.encode(text)])
    assert (parsed.content, parsed.reasoning) == ("Well. </think>\nYes.", "")
    assert [call.name for call in parsed.tool_calls] == ["shell"]
    assert emitted[-1] == parsed.tool_calls[0]


def test_a_format_without_markers_is_emitted_at_the_end(qwen3: Tokenizer):
    renderer = LibraryRenderer(qwen3, "qwen3")
    renderer.markers = None  # as for every format that is not in READ_BY_PIECES
    ids = renderer.encode(f"<think>hm</think>yes{CALL}<|im_end|>")
    reader = Reader(renderer, [1])
    assert [reader.feed([token]) for token in ids] == [[]] * len(ids)
    emitted, parsed = reader.finish()
    assert emitted == [Delta("reasoning", "hm"), Delta("text", "yes"), *parsed.tool_calls]
    assert parsed == renderer.parse(ids, [1])


# --- markers that are text ---


def letters(renderer: Renderer, text: str) -> list[list[int]]:
    """One piece for each character."""
    return [renderer.encode(letter) for letter in text]


def test_a_possible_start_of_a_marker_is_held_back(small_by_text: ChatML):
    reader = Reader(small_by_text, [1])
    emitted = [reader.feed(piece) for piece in letters(small_by_text, " <thin <tool_cat></think> a<")]
    text = ["".join(item.text for item in items if isinstance(item, Delta)) for items in emitted]
    assert text == [*[""] * 6, "<thin", *[""] * 8, " <tool_cat", ">", "", "</", *"think>", "", " a", ""]
    assert reader.finish()[0] == [Delta("text", "<")]


@pytest.mark.parametrize("tail", ["", "<|im_end|>"])
def test_a_call_parsed_by_text_is_emitted_when_it_is_closed(small_by_text: ChatML, tail: str):
    good, broken = CALL, "<tool_call>{"
    reader = Reader(small_by_text, [1])
    assert reader.feed(small_by_text.encode("Well " + broken + good[:-1])) == [Delta("text", "Well")]
    first, second = reader.feed(small_by_text.encode(">"))
    assert isinstance(first, ToolCall) and isinstance(second, ToolCall)
    assert first.error and second.arguments == {"command": "ls é🙂"}
    emitted = reader.feed(small_by_text.encode(good + good + broken))
    assert [type(item) for item in emitted] == [ToolCall, ToolCall]  # not the one that is open
    assert reader.feed(small_by_text.encode("</tool_cal" + tail)) == []
    (last,), parsed = reader.finish()
    assert isinstance(last, ToolCall) and "not closed" in last.error
    assert len(parsed.tool_calls) == 5


def test_emitted_text_stands_when_the_renderer_parses_it_differently(small_by_text: ChatML):
    """With a renderer that violates its contract, the client receives the whole text, and that counts."""

    class Fickle(ChatML):
        def parse(self, sampled_ids: Any, prompt_ids: Any = (), tools: Any = ()) -> Parsed:
            return Parsed("other", "", (), {})

    fickle = Fickle(small_by_text._tokenizer)
    for text, content, reasoning in (
        ("Yes <tool", "Yes <tool", ""),
        ("<think>hm</thi", "", "hm</thi"),
        (f"Yes {CALL[:-2]}", "Yes", ""),
    ):
        _, parsed = read(fickle, [1], letters(fickle, text))
        assert (parsed.content, parsed.reasoning) == (content, reasoning)


def test_parsing_by_text_has_a_constant_cost_per_token(small_by_text: ChatML):
    """Counted, not timed: ids decoded in total, parses of the whole turn, and text held back."""
    decoded = parsed = 0

    class Counting(ChatML):
        def decode(self, ids: Any) -> str:
            nonlocal decoded
            decoded += len(ids)
            return super().decode(ids)

        def parse(self, sampled_ids: Any, prompt_ids: Any = (), tools: Any = ()) -> Parsed:
            nonlocal parsed
            parsed += 1
            return super().parse(sampled_ids, prompt_ids, tools)

    renderer = Counting(small_by_text._tokenizer)
    for text, calls in (("word < " * 400, 0), ("<think>" + "word </ " * 400, 0), (CALL + "</tool_call>" * 400, 1)):
        decoded = parsed = 0
        ids, reader = renderer.encode(text), Reader(renderer, [1])
        for token in ids:
            reader.feed([token])
            assert len(reader._cut._pending) < len("</tool_call>")
        assert parsed == calls and decoded < 20 * len(ids)


def test_thinking_opened_by_the_template_is_found_in_the_prompt(every: dict[str, Renderer]):
    renderer = every["qwen3.5"]
    prompt = renderer.render(HI)
    assert renderer.decode(prompt).endswith("<think>\n")
    emitted, _ = read(renderer, prompt, [[token] for token in renderer.encode("hm</think>yes")])
    assert {item.kind for item in emitted} == {"reasoning", "text"}


def test_decoding_a_long_text_has_a_constant_cost_per_token(chatml: ChatML):
    """Counted, not timed: ids decoded in total, for text and for bytes that never form a character."""
    broken = next(token for token in range(256) if chatml.decode([token]) == "\ufffd")
    for ids in (chatml.encode("word " * 400), [broken] * 400):
        decoded = 0

        def decode(window: Any) -> str:
            nonlocal decoded
            decoded += len(window)
            return chatml.decode(window)

        channel, emitted = TextStream(decode), ""
        for token in ids:
            channel.add(token)
            emitted += channel.take()
        emitted += channel.flush()
        assert emitted == chatml.decode(ids).strip()
        assert decoded < 200 * len(ids)


def test_a_turn_of_hundreds_of_calls_is_parsed_only_a_few_times(renderer: Renderer, monkeypatch: pytest.MonkeyPatch):
    """Each parse is of the whole turn: one per call would block the process for seconds."""
    prompt = renderer.render(HI)
    ids = renderer.encode((XML if "3.5" in renderer.name else CALL) + "\n") * 300
    lengths: list[int] = []
    parse = renderer.parse

    def counted(ids: Any, *other_args: Any) -> Parsed:
        lengths.append(len(ids))
        return parse(ids, *other_args)

    monkeypatch.setattr(renderer, "parse", counted)
    emitted, parsed = read(renderer, prompt, [[token] for token in ids])
    assert len(parsed.tool_calls) == len([item for item in emitted if isinstance(item, ToolCall)]) == 300
    assert sum(lengths) < 10 * len(ids)
