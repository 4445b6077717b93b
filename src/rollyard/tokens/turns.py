"""Splits a sampled turn at its markers, and extracts a message's text: shared by the ChatML and template renderers.

A turn is split from left to right and nothing is withdrawn, so that it can be streamed while it is sampled (reader.py),
with one exception: a `</think>` without an opening makes everything before it thinking, because some models were
trained with the opening in their prompt.

Invariants. A call inside thinking is not a call. After the first call, `<think>` and `</think>` are text: a model that
writes them into a file is not thinking. Nothing before the first call is dropped except the markers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollyard.core import Json, Message
from rollyard.core.failure import InvalidRequest
from rollyard.tokens.base import Markers
from rollyard.tokens.tokenizer import Tokenizer

_TEXT_TYPES = frozenset({None, "text", "input_text", "output_text"})


@dataclass(frozen=True, slots=True)
class Cut:
    """A turn without its markers. Its text may be in two pieces: before and after the thinking."""

    text_ids: tuple[list[int], ...]
    thought: list[int]
    calls: list[tuple[list[int], bool]]  # each with whether it was closed


def qwen_markers(tokenizer: Tokenizer) -> Markers | None:
    """The markers that Qwen made common, if the vocabulary has all of them."""
    ids = [tokenizer.special_id(token) for token in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    think_open, think_close, call_open, call_close = ids
    if think_open is None or think_close is None or call_open is None or call_close is None:
        return None
    return Markers(think_open, think_close, frozenset({call_open}), frozenset({call_close}))


def cut_turn(ids: Sequence[int], markers: Markers, *, is_thinking: bool) -> Cut:
    """Splits `ids`, which end before the stop token. `is_thinking`: the prompt has opened the thinking."""
    ids = list(ids)
    before: list[int] = []
    thought: list[int] = []
    if not is_thinking:
        watched = {markers.think_open, markers.think_close, *markers.call_open}
        at = next((at for at, token in enumerate(ids) if token in watched), len(ids))
        if at < len(ids) and ids[at] == markers.think_open:
            before, ids, is_thinking = ids[:at], ids[at + 1 :], True
        elif at < len(ids) and ids[at] == markers.think_close:
            is_thinking = True  # a close without an opening
    if is_thinking:
        at = ids.index(markers.think_close) if markers.think_close in ids else len(ids)
        thought, ids = [token for token in ids[:at] if token != markers.think_open], ids[at + 1 :]
    starts = [at for at, token in enumerate(ids) if token in markers.call_open]
    calls: list[tuple[list[int], bool]] = []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=False):
        close = next((at for at in range(start, end) if ids[at] in markers.call_close), None)
        calls.append((ids[start + 1 : end if close is None else close], close is not None))
    return Cut((before, ids[: starts[0]] if starts else ids), thought, calls)


def ends_thinking(prompt_ids: Sequence[int], markers: Markers, stop_token_ids: Sequence[int]) -> bool:
    """Whether a prompt ends inside a thinking block that its template has opened for the model."""
    if markers.think_open is None:
        return False
    for token in reversed(prompt_ids):
        if token == markers.think_open:
            return True
        if token == markers.think_close or token in stop_token_ids:
            return False
    return False


def until_stop(ids: Sequence[int], stop_token_ids: Sequence[int]) -> list[int]:
    """The ids before the first stop token."""
    return list(ids[: next((at for at, token in enumerate(ids) if token in stop_token_ids), len(ids))])


def message_text(message: Message, renderer: str, escape: Callable[[str], str]) -> str:
    """A message's text, its parts joined and escaped. A part that is not text is refused, never dropped."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return escape(content)
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"renderer {renderer!r} accepts text or parts as a message's content, not {content!r:.40}")
    return escape("".join(_part_text(part, renderer) for part in content))  # a marker may span two parts


def _part_text(part: Json, renderer: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind in _TEXT_TYPES:
        text = part.get("text")
        if isinstance(text, str):
            return text
    what = "images" if "image" in str(kind) else f"parts of type {kind!r:.40}"
    raise InvalidRequest(f"renderer {renderer!r} does not support {what}: send text only")


def rendered_role(message: Message) -> Json:
    """`developer`, OpenAI's newer name for `system`, becomes `system`, which models were trained on."""
    role = message.get("role")
    return "system" if role == "developer" else role
