"""Cases in which rendering a history again gives other tokens than were sampled, and splicing does not."""

from typing import Any

import pytest

from rollyard.tokens import ChatML, Renderer, Tokenizer
from rollyard.tokens.library import LibraryRenderer

from .books import SHELL, START, book, call, keep


@pytest.fixture(params=["chatml", "qwen3_renderer"])
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return request.getfixturevalue(request.param)


def pieces(renderer: Renderer, *texts: str) -> list[int]:
    """Tokens that the tokenizer would not return for the whole text, but that a model may sample."""
    return [token for text in texts for token in renderer.encode(text)]


XML = "<tool_call>\n<function=shell>\n<parameter=quiet>\nfalse\n</parameter>\n</function>\n</tool_call>"
BREAKERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "false, which comes back as False": ("qwen3.5", (XML,)),
    "false written as the template would not": ("qwen3", (call('{"a":false}'),)),
    "no parameters, which come back as empty ones": ("qwen3", ('<tool_call>\n{"name": "shell"}\n</tool_call>',)),
    "empty parameters in another order": ("qwen3", ('<tool_call>\n{"arguments": {}, "name": "shell"}\n</tool_call>',)),
    "a text in other tokens than the tokenizer's": ("qwen3", ("hel", "lo wor", "ld")),
    "a newline that merges with the prompt's": ("qwen3", ("\n", "Yes.")),
    "thinking that the template strips": ("qwen3", ("<think>\nHm.\n</think>\n\nYes.",)),
    "spaces before the end": ("qwen3", ("Yes.  \n\n",)),
}


@pytest.mark.parametrize("name", BREAKERS)
def test_splicing_keeps_tokens_that_rendering_again_changes(qwen3: Tokenizer, name: str):
    """Each case is first shown to change the tokens when rendered again; otherwise it would test nothing."""
    family, texts = BREAKERS[name]
    renderer = LibraryRenderer(qwen3, family)
    it = book(renderer, reasoning="keep")
    turn = it.begin(START, [SHELL])
    ids = [*pieces(renderer, *texts), *renderer.stop_token_ids[:1]]
    parsed = it.keep(turn, ids, [-0.5] * len(ids), finish_reason="stop", versions=[(0, 0, len(ids))])
    sent = {key: value for key, value in parsed.message.items() if key != "reasoning_content"}
    messages = [*START, sent, {"role": "user", "content": "More."}]
    known = turn.prompt + ids
    anew = renderer.render(messages, [SHELL])
    assert anew[: len(known)] != known
    if "False" in name:
        assert "False" in renderer.decode(anew) and "False" not in renderer.decode(known)
    after = it.begin(messages, [SHELL])
    assert after.is_extension and after.prompt[: len(known)] == known


@pytest.mark.parametrize("texts", [("hel", "lo wor", "ld"), ("\n", "Yes.")], ids=["inside", "at the prompt's end"])
def test_splicing_keeps_tokens_that_encoding_the_text_again_changes(
    chatml: ChatML, qwen3: Tokenizer, texts: tuple[str, ...]
):
    """BPE merges tokens that were sampled separately: keeping text instead of ids trains on tokens never sampled."""
    renderer = ChatML(qwen3)
    it = book(renderer)
    turn = it.begin(START)
    ids = [*pieces(renderer, *texts), *renderer.stop_token_ids[:1]]
    known = turn.prompt + ids
    again = renderer.encode(renderer.decode(known))
    assert again != known and renderer.decode(again) == renderer.decode(known)
    parsed = it.keep(turn, ids, None, finish_reason="stop")
    after = it.begin([*START, parsed.message, {"role": "user", "content": "More."}])
    assert after.prompt[: len(known)] == known


def test_the_newline_after_the_close_token_is_there_once(renderer: Renderer):
    """Engines stop at the close token, templates write a newline after it: appending only the new turn loses it."""
    it = book(renderer)
    turn = it.begin(START)
    ids, answer = keep(it, renderer, turn, "Yes.")
    more = {"role": "user", "content": "More."}
    new_turn = renderer.encode("<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n")
    as_the_template = renderer.render([*START, answer, more])
    assert turn.prompt + ids + new_turn != as_the_template
    assert it.begin([*START, answer, more]).prompt == as_the_template


def test_splicing_ignores_a_header_line_that_changes(renderer: Renderer):
    def messages(header: str) -> list[Any]:
        lines = [f"x-anthropic-billing-header: cc_version={header};", "You are an agent.\nBe brief."]
        parts = [{"type": "text", "text": line} for line in lines]
        return [{"role": "system", "content": parts}, {"role": "user", "content": "Go."}]

    it = book(renderer)
    turn = it.begin(messages("1.a"))
    ids, answer = keep(it, renderer, turn, "Yes?")
    known, later = turn.prompt + ids, [*messages("1.b"), answer, {"role": "user", "content": "More."}]
    assert renderer.render(later)[: len(known)] != known
    assert it.begin(later).prompt[: len(known)] == known
    later[0] = {"role": "system", "content": [later[0]["content"][0], {"type": "text", "text": "You are.\nBe brief."}]}
    assert not it.begin(later).is_extension  # only that line may change, not the text after it
