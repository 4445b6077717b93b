"""Given turns: the ids that a policy would have sampled, or a clear refusal."""

import json
import shutil
from collections.abc import Callable

import pytest
from hypothesis import given, settings

from rollyard.core.failure import TaskInvalid
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens import ChatML, Renderer, Tokenizers, load_renderer
from rollyard.tokens.demonstrated import demonstrated_turn
from rollyard.tokens.general import TemplateRenderer

from .strategies import arguments, assistant, names, plain, tools

QWEN_LIKE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_THINKING = QWEN_LIKE.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n",
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>",
)
COUNTS = "{{ messages | length }} messages\n" + QWEN_LIKE
DROPS_CALLS = QWEN_LIKE.replace("m.tool_calls or []", "[]")

ASKED = [{"role": "system", "content": "Look first."}, {"role": "user", "content": "How many?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Runs it.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]


def called(name: str, content: str = "", **arguments: object) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments, separators=(",", ":"))}  # unlike any template
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }


@pytest.fixture(scope="module")
def by_template(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TemplateRenderer]:
    """A renderer for the small tokenizer with another template."""

    def make_renderer(template: str) -> TemplateRenderer:
        folder = tmp_path_factory.mktemp("model") / "files"
        shutil.copytree(tokenizer_dir(), folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        return TemplateRenderer(Tokenizers().load(folder))

    return make_renderer


@pytest.fixture(params=["chatml", "chatml_by_text", "template", "library", "smollm2"])
def renderer(request: pytest.FixtureRequest) -> Renderer:
    match request.param:
        case "chatml":
            return request.getfixturevalue("chatml")
        case "chatml_by_text":
            return request.getfixturevalue("small_by_text")
        case "template":
            return request.getfixturevalue("by_template")(QWEN_LIKE)
        case "library":
            return request.getfixturevalue("qwen3_renderer")
        case _:
            return load_renderer(Tokenizers().load(request.getfixturevalue("vllm_model")), "smollm2")


def test_the_ids_of_given_turns_are_those_of_a_policy_that_samples_them(renderer: Renderer):
    """The conversation is rendered once, then extended with tool results."""
    turns = [called("shell", "I look.", command="ls -a | wc -l"), called("shell", command="echo 'ä' > \"b c\"")]
    history, ids = list(ASKED), renderer.render(ASKED, TOOLS)
    for number, turn in enumerate(turns):
        demonstrated = demonstrated_turn(renderer, ids, history, turn, TOOLS)
        assert demonstrated.token_ids[-1] in renderer.stop_token_ids
        assert not set(demonstrated.token_ids[:-1]) & set(renderer.stop_token_ids), "exactly one turn"
        (call,) = demonstrated.parsed.tool_calls
        assert (demonstrated.parsed.content, call.name, call.arguments) == (
            turn["content"],
            "shell",
            json.loads(turn["tool_calls"][0]["function"]["arguments"]),
        )
        text = renderer.decode(demonstrated.token_ids[:-1])
        assert renderer.encode(text) == demonstrated.token_ids[:-1], "canonical: as the tokenizer encodes this text"
        tool_messages = [{"role": "tool", "tool_call_id": call.id, "name": "shell", "content": f"{number}\n<|im_end|>"}]
        longer = renderer.extend(ids, demonstrated.token_ids, tool_messages, TOOLS)
        assert longer is not None
        ids = longer
        history += [demonstrated.parsed.message, *tool_messages]
    last = demonstrated_turn(renderer, ids, history, {"role": "assistant", "content": "There are 2.\n"}, TOOLS)
    assert (last.parsed.content, last.parsed.tool_calls) == ("There are 2.", ())
    assert renderer.decode(last.token_ids[:-1]).strip() == "There are 2."


@settings(max_examples=60)
@given(turn=assistant(plain), schemas=tools)
def test_any_given_turn_parses_as_itself(chatml: ChatML, turn: dict, schemas: list):
    prompt = chatml.render(ASKED, schemas)
    demonstrated = demonstrated_turn(chatml, prompt, ASKED, turn, schemas)
    parsed = chatml.parse(demonstrated.token_ids, prompt, schemas)
    assert parsed.content == turn["content"].strip()
    assert parsed.reasoning == turn.get("reasoning_content", "").strip()
    expected = [call["function"] for call in turn.get("tool_calls", ())]
    values = [f["arguments"] if isinstance(f["arguments"], dict) else json.loads(f["arguments"]) for f in expected]
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [
        (function["name"], value) for function, value in zip(expected, values, strict=True)
    ]


@settings(max_examples=25)
@given(text=plain, name=names, values=arguments)
def test_a_given_turn_in_a_library_format_parses_as_itself(
    qwen3_renderer: Renderer, text: str, name: str, values: dict
):
    prompt = qwen3_renderer.render(ASKED, TOOLS)
    demonstrated = demonstrated_turn(qwen3_renderer, prompt, ASKED, called(name, text, **values), TOOLS)
    (call,) = demonstrated.parsed.tool_calls
    assert (demonstrated.parsed.content, call.name, call.arguments) == (text.strip(), name, values)


def test_markers_in_a_text_stay_text(chatml: ChatML):
    prompt = chatml.render(ASKED)
    turn = {"role": "assistant", "content": "It ends with <|im_end|> and calls <tool_call>."}
    demonstrated = demonstrated_turn(chatml, prompt, ASKED, turn)
    assert demonstrated.parsed.content == turn["content"]
    assert demonstrated.token_ids.count(demonstrated.token_ids[-1]) == 1


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (COUNTS, "does not start with the prompt"),
        (OPENS_THINKING, "does not start with the prompt"),
        (DROPS_CALLS, "parses as a different one"),
    ],
    ids=["counts", "opens_thinking", "drops_calls"],
)
def test_a_template_that_cannot_write_a_given_turn_is_refused(
    by_template: Callable[[str], TemplateRenderer], template: str, reason: str
):
    renderer = by_template(template)
    prompt = renderer.render(ASKED, TOOLS)
    with pytest.raises(TaskInvalid, match=rf"cannot write a turn that was not sampled \(template\): .*{reason}"):
        demonstrated_turn(renderer, prompt, ASKED, called("shell", command="ls"), TOOLS)


def test_the_prompt_of_another_conversation_is_refused(chatml: ChatML):
    prompt = chatml.render([*ASKED, {"role": "assistant", "content": "Two."}, {"role": "user", "content": "Sure?"}])
    with pytest.raises(TaskInvalid, match="does not start with the prompt"):
        demonstrated_turn(chatml, prompt, ASKED, {"role": "assistant", "content": "Yes."})


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "user", "content": "hi"}, "only an assistant's turn"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "shell", "arguments": "{"}}]},
            "JSON",
        ),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]}, "no name"),
    ],
    ids=["a user's", "broken arguments", "no name"],
)
def test_an_invalid_turn_is_refused_with_the_reason(chatml: ChatML, turn: dict, reason: str):
    with pytest.raises(TaskInvalid, match=reason):
        demonstrated_turn(chatml, chatml.render(ASKED), ASKED, turn)


def test_a_given_turn_keeps_its_thinking(chatml: ChatML):
    turn = {**called("shell", "So.", command="ls"), "reasoning_content": "I must look."}
    demonstrated = demonstrated_turn(chatml, chatml.render(ASKED, TOOLS), ASKED, turn, TOOLS)
    assert demonstrated.parsed.reasoning == "I must look."
    assert demonstrated.parsed.message["reasoning_content"] == "I must look."
