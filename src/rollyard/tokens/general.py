"""A renderer for any model with a chat template: it renders by the template, and extends only where it can verify it.

For models that have no renderer of their own. The tokens after a closed assistant turn are found by rendering a small
stand-in conversation (a user message, an assistant turn, then the new messages) and cutting after the close token of
the assistant turn. The stand-in is compared with what a model would have been sent and have sampled:

- the prompt for the assistant turn is unchanged, and the turn follows it directly;
- thinking, if the real tokens have any, is still there too (for templates that strip it, `extend` returns None);
- the turn ends as it does if nothing follows, and the cut is between two tokens.

At construction the same is tried after several histories. `extend` returns None for a role whose tokens depend on what
came before (for example a counter), that the template refuses, or whose text it drops.

Invariants. `extend(p, s, …)[:len(p)+len(s)] == p + s`, or None. Text of users and tools is escaped. Thinking and tool
calls are found by the ids of <think> and <tool_call> (containing JSON, as Hermes and Qwen do) if those are added tokens
of the vocabulary; in any other format they remain plain content.

Not verified: that the tokens depend on nothing but the histories tried, for example not on the date. A date that a
template writes at the start keeps the value of the first rendering.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from rollyard.core import Json, Message
from rollyard.core.failure import InvalidRequest, TaskInvalid
from rollyard.tokens.base import Markers, Parsed, ToolSchema
from rollyard.tokens.calls import assistant_message, named_arguments, read_call, read_json
from rollyard.tokens.tokenizer import Tokenizer
from rollyard.tokens.turns import cut_turn, ends_thinking, message_text, rendered_role, until_stop

_WORD = "Kestrel"
_TOOL: ToolSchema = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
_ASKED: Message = {"role": "user", "content": "One plus one?"}
_CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "aaaaaaaa1", "type": "function", "function": {"name": "look", "arguments": {}}}],
}
_RESULT: Message = {"role": "tool", "name": "look", "tool_call_id": "aaaaaaaa1", "content": "2"}
_HISTORIES: tuple[tuple[Message, ...], ...] = (
    (_ASKED,),
    (_ASKED, {"role": "assistant", "content": "Two."}, {"role": "user", "content": "Und zwei plus zwei?"}),
    ({"role": "system", "content": "Be brief."}, _ASKED),
    (_ASKED, _CALLED, _RESULT),
)
_NEEDED = 2  # the first histories must succeed: a template may support neither system turns nor tools


class TemplateRenderer:
    """Renders by the model's template. Raises ValueError if it does not end assistant turns with a special token."""

    name = "template"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._has_developer_role = tokenizer.template_contains("developer")
        self._close_text, self._close, opening = self._find_close()
        self._opens_thinking = "<think>" in opening and "</think>" not in opening
        stops = dict.fromkeys((self._close, tokenizer.eos_token_id))
        self.stop_token_ids: tuple[int, ...] = tuple(token for token in stops if token is not None)
        self._think = (tokenizer.special_id("<think>"), tokenizer.special_id("</think>"))
        self.markers = self._find_markers()
        self._follows = {has_tools: self._probe((_TOOL,) if has_tools else ()) for has_tools in (False, True)}

    @property
    def close(self) -> tuple[str, int]:
        """The token that ends an assistant's turn: its text and its id."""
        return self._close_text, self._close

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        try:
            text = self._fill(messages, tools, True)
        except InvalidRequest:
            raise
        except Exception as error:  # a template may raise anything
            raise TaskInvalid(f"the model's chat template cannot render these messages: {error}") from error
        return self._tokenizer.encode(text)

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
    ) -> list[int] | None:
        if not all(message.get("role") in self._follows[bool(tools)] for message in new_messages):
            return None
        new_text = json.dumps([[self._message(message) for message in new_messages], list(tools)], default=str)
        word = _WORD
        while word in new_text:  # the stand-in's words are searched for, so they must not occur anywhere else
            word += "q"
        has_thinking = self._has_thinking(prompt_ids, sampled_ids)
        suffix = self._suffix(_HISTORIES[0], new_messages, tools, word, has_thinking)
        if suffix is None:
            return None
        ids = [*prompt_ids, *sampled_ids]
        if self._close not in sampled_ids:  # the turn was cut off
            return [*ids, self._close, *suffix]
        after = list(sampled_ids[list(sampled_ids).index(self._close) + 1 :])
        if suffix[: len(after)] != after or self.decode(after).strip():
            return None  # the model continued after its close token
        return ids + suffix[len(after) :]

    def parse(
        self, sampled_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[ToolSchema] = ()
    ) -> Parsed:
        is_thinking = self._opens_thinking and None not in self._think
        if prompt_ids:
            is_thinking = ends_thinking(prompt_ids, self.markers, self.stop_token_ids)
        cut = cut_turn(until_stop(sampled_ids, self.stop_token_ids), self.markers, is_thinking=is_thinking)
        calls = tuple(
            read_call(self.decode(raw).strip(), f"call_{len(prompt_ids)}_{index}", is_closed=is_closed)
            for index, (raw, is_closed) in enumerate(cut.calls)
        )
        content, reasoning = "".join(map(self.decode, cut.text_ids)).strip(), self.decode(cut.thought).strip()
        return Parsed(content, reasoning, calls, assistant_message(content, reasoning, calls))

    def call_grammar(self, names: Sequence[str], *, is_one: bool) -> str | None:
        return None

    @property
    def longest_token_chars(self) -> int:
        return self._tokenizer.longest_token_chars

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    # --- the tokens after a turn ---

    def _find_close(self) -> tuple[str, int, str]:
        """(the close token, its id, the text after a user message)."""
        name = self._tokenizer.name_or_path
        if not self._tokenizer.has_chat_template:
            raise ValueError(f"{name}: it has no chat template")
        try:
            text = self._fill([_ASKED, {"role": "assistant", "content": _WORD}], (), False)
            _, _, opening = self._fill([_ASKED], (), True).rpartition(str(_ASKED["content"]))
        except Exception as error:  # a template may raise anything
            raise ValueError(f"{name}: its chat template fails for a small conversation: {error}") from error
        _, separator, tail = text.rpartition(_WORD)
        first = self._tokenizer.encode(tail.lstrip())[:1] if separator else []
        close = self.decode(first)
        if not first or self._tokenizer.special_id(close) != first[0]:
            raise ValueError(f"{name}: its chat template does not close the assistant's turn with a special token")
        return close, first[0], opening

    def _probe(self, tools: Sequence[ToolSchema]) -> frozenset[str]:
        """The roles that may follow an assistant's turn with tokens that do not depend on what was before it."""
        follows: set[str] = set()
        for role in ("user", "tool", "system", "developer"):
            new: Message = {**_RESULT, "content": "Heron"} if role == "tool" else {"role": role, "content": "Heron"}
            suffixes = [self._suffix(before, [new], tools, _WORD, self._opens_thinking) for before in _HISTORIES]
            first = suffixes[0]
            if first is None or "Heron" not in self.decode(first):
                continue
            if None not in suffixes[:_NEEDED] and all(other in (None, first) for other in suffixes):
                follows.add(role)
        return frozenset(follows)

    def _suffix(
        self,
        before: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[ToolSchema],
        word: str,
        has_thinking: bool,
    ) -> list[int] | None:
        """The tokens after the close token of a stand-in turn that is followed by `new`; None if not verified."""
        content, called, thought = f"{word}said", f"{word}called", f"{word}thought"
        turn = self._placeholder_turn(new, content, called, thought if has_thinking else "")
        try:
            sent = self._fill(before, tools, True)
            shorter = self._fill([*before, turn], tools, False)
            whole = self._fill([*before, turn, *new], tools, True)
        except Exception:  # a template may raise anything
            return None
        if any(shorter.count(mark) != whole.count(mark) for mark in (content, called)):
            return None  # the template moves or drops the turn's text
        start = whole.find(content)
        if not whole.startswith(sent) or (has_thinking and thought not in whole):
            return None
        between = whole[len(sent) : start if start >= 0 else whole.find(called)]
        if not has_thinking and ("<think>" in between or (start >= 0 and between.strip())):
            return None
        ends = [self._end_of_turn(text, content, called) for text in (shorter, whole)]
        (shorter_at, shorter_cut), (whole_at, cut) = ends
        if min(shorter_cut, cut) < 0 or shorter[shorter_at:shorter_cut] != whole[whole_at:cut]:
            return None
        if not whole[cut:].startswith(shorter[shorter_cut:]):
            return None
        head, ids = self._tokenizer.encode(whole[:cut]), self._tokenizer.encode(whole)
        return ids[len(head) :] if ids[: len(head)] == head and head[-1] == self._close else None

    def _end_of_turn(self, text: str, content: str, called: str) -> tuple[int, int]:
        """(the end of the last of the stand-in's words, the end of its close token); -1 for a missing one."""
        at = max(text.rfind(word) + len(word) if word in text else -1 for word in (content, called))
        cut = text.find(self._close_text, at) if at >= 0 else -1
        return at, cut + len(self._close_text) if cut >= 0 else -1

    def _placeholder_turn(self, new: Sequence[Message], content: str, called: str, thought: str) -> Message:
        """A turn that `new` may follow: with a call for each tool result, and thinking in the format of `parse`."""
        turn: dict[str, Json] = {"role": "assistant", "content": content}
        if thought and None in self._think:
            turn["content"] = f"<think>\n{thought}\n</think>\n\n{content}"
        elif thought:
            turn["reasoning_content"] = thought
        results = [message for message in new if message.get("role") == "tool"]
        if results:
            turn["tool_calls"] = [
                {
                    "id": result.get("tool_call_id") or "aaaaaaaa1",
                    "type": "function",
                    "function": {"name": result.get("name") or "look", "arguments": {"at": called}},
                }
                for result in results
            ]
        return turn

    def _has_thinking(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> bool:
        """Whether any turn has thinking: after a user message some templates strip all of it, not only the last."""
        if None not in self._think:
            return any(token in ids for token in self._think for ids in (sampled_ids, prompt_ids))
        return self._opens_thinking or "</think>" in self.decode([*prompt_ids, *sampled_ids])

    # --- writing ---

    def _fill(self, messages: Sequence[Message], tools: Sequence[ToolSchema], has_prompt: bool) -> str:
        schemas = [cast("Mapping[str, Json]", self._escaped(tool)) for tool in tools]
        filled = [self._message(message) for message in messages]
        return str(
            self._tokenizer.apply_chat_template(
                filled, schemas or None, add_generation_prompt=has_prompt, tokenize=False
            )
        )

    def _message(self, message: Message) -> Message:
        """A message as templates expect it: content is text, arguments are objects if they can be parsed as such."""
        out = {name: self._escaped(value) for name, value in message.items() if name != "content"}
        out["content"] = message_text(message, self.name, self._tokenizer.escape)
        if not self._has_developer_role:
            out["role"] = rendered_role(message)
        calls = out.get("tool_calls")
        if isinstance(calls, Sequence) and calls:
            out["tool_calls"] = [_tool_call(call) for call in calls if isinstance(call, Mapping)]
        else:
            out.pop("tool_calls", None)
        return out

    def _escaped(self, value: Json) -> Json:
        if isinstance(value, str):
            return self._tokenizer.escape(value)
        if isinstance(value, Mapping):
            return {self._tokenizer.escape(str(name)): self._escaped(item) for name, item in value.items()}
        return [self._escaped(item) for item in value] if isinstance(value, Sequence) else value

    # --- reading ---

    def _find_markers(self) -> Markers:
        think = self._think if None not in self._think else (None, None)
        opening, closing = (self._tokenizer.special_id(token) for token in ("<tool_call>", "</tool_call>"))
        if opening is None or closing is None:
            return Markers(*think)
        return Markers(*think, frozenset({opening}), frozenset({closing}))


def _tool_call(call: Mapping[str, Json]) -> Json:
    name, arguments = named_arguments(call)
    if isinstance(arguments, str):
        try:
            value = read_json(arguments or "{}")
        except ValueError:
            value = None
        if isinstance(value, Mapping):
            arguments = value
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}
