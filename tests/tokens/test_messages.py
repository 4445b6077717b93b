"""Messages that models were not trained on: developer turns, late system turns, images."""

import pytest

from rollyard.core.failure import InvalidRequest
from rollyard.tokens import ChatML, Renderer
from rollyard.tokens.general import TemplateRenderer

ASK = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(params=["chatml", "template", "chatml of qwen3", "template of qwen3", "qwen3"])
def renderer(request: pytest.FixtureRequest) -> Renderer:
    tokenizer = request.getfixturevalue("qwen3" if "qwen3" in request.param else "small")
    if request.param == "qwen3":
        return request.getfixturevalue("qwen3_renderer")
    return (ChatML if "chatml" in request.param else TemplateRenderer)(tokenizer)


def test_a_developer_message_is_rendered_as_system(renderer: Renderer):
    for following in ([ASK], [{"role": "system", "content": "Also."}, ASK]):
        as_developer = renderer.render([{"role": "developer", "content": "Be brief."}, *following])
        assert as_developer == renderer.render([{"role": "system", "content": "Be brief."}, *following])
    prompt, sampled = renderer.render([ASK]), [*renderer.encode("yes"), *renderer.stop_token_ids[:1]]
    late = [renderer.extend(prompt, sampled, [{"role": role, "content": "Now."}]) for role in ("developer", "system")]
    assert late[0] is not None and late[0] == late[1]
    assert "<|im_start|>system\nNow.<|im_end|>" in renderer.decode(late[0])


def test_system_turns_are_rendered_at_any_position(renderer: Renderer):
    """Claude Code and Codex put reminders there."""
    instructions = [{"role": role, "content": f"Word{n}."} for n, role in enumerate(["system", "system", "developer"])]
    answer = {"role": "assistant", "content": "Yes."}
    text = renderer.decode(renderer.render([*instructions, ASK, answer, *instructions, ASK, *instructions]))
    assert [text.count(f"Word{n}.") for n in range(3)] == [3, 3, 3]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (IMAGE, "does not support images"),
        ({"type": "input_image", "image_url": "data:"}, "does not support images"),
        ({"type": "input_audio", "input_audio": {}}, "does not support parts of type 'input_audio'"),
        ({"type": "text", "text": None}, "does not support parts of type 'text'"),
        (7, "does not support parts of type 'int'"),
    ],
)
def test_a_part_that_is_not_text_is_refused_never_dropped(renderer: Renderer, part: object, says: str):
    message = {"role": "user", "content": [{"type": "text", "text": "See: "}, part]}
    with pytest.raises(InvalidRequest, match=f"renderer '{renderer.name}' {says}"):
        renderer.render([message])
    sampled = [*renderer.encode("yes"), *renderer.stop_token_ids[:1]]
    for role in ("user", "tool"):
        with pytest.raises(InvalidRequest, match=says):
            renderer.extend(renderer.render([ASK]), sampled, [{**message, "role": role}])


def test_content_that_is_neither_text_nor_parts_is_refused(renderer: Renderer):
    with pytest.raises(InvalidRequest, match="accepts text or parts"):
        renderer.render([{"role": "user", "content": {"type": "text", "text": "hi"}}])


def test_text_in_parts_renders_as_plain_text(renderer: Renderer):
    parts = [{"type": "text", "text": "h"}, {"type": "input_text", "text": "i"}]
    assert renderer.render([{"role": "user", "content": parts}]) == renderer.render([ASK])
    assert renderer.render([{"role": "user", "content": None}]) == renderer.render([{"role": "user", "content": ""}])


def test_markers_inside_a_call_are_part_of_the_call(renderer: Renderer):
    """In a file that contains thinking tags, neither the tags nor the text before them is thinking."""
    text = '<tool_call>\n{"name": "write", "arguments": {"text": "<think>a</think>b"}}\n</tool_call>'
    parsed = renderer.parse(renderer.encode(text), renderer.render([ASK]))
    assert parsed.reasoning == parsed.content == ""
    assert [call.arguments for call in parsed.tool_calls] == [{"text": "<think>a</think>b"}]


@pytest.mark.parametrize("name", ["chatml", "template"])
def test_text_before_thinking_is_content(small, name: str):
    renderer = ChatML(small) if name == "chatml" else TemplateRenderer(small)
    parsed = renderer.parse(small.encode("Let me think. <think>hm</think>Yes."), renderer.render([ASK]))
    assert (parsed.content, parsed.reasoning) == ("Let me think. Yes.", "hm")
