"""ChatML as code: `<|im_start|>role\\n … <|im_end|>\\n`, with tools in the Hermes format that Qwen made common.

For the many models that use plain ChatML and have no hand-written renderer (SmolLM2, Qwen2.5, most small
fine-tunes).

Invariants. A sampled turn is never rendered again: `extend` copies it and renders only what comes after it, closing it
first if the model did not (a length stop). Text of users and tools is escaped, so it cannot forge a turn or a tool
call. Tool calls and thinking are found by the ids of their markers if the vocabulary has all of them, otherwise by
text, and only in sampled tokens. A call inside the model's reasoning is not a call.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from functools import lru_cache

from rollyard.core import Json, Message
from rollyard.tokens.base import Markers, Parsed, ToolSchema
from rollyard.tokens.calls import assistant_message, named_arguments, read_call
from rollyard.tokens.grammar import hermes_calls
from rollyard.tokens.text_cut import cut_text
from rollyard.tokens.tokenizer import Tokenizer
from rollyard.tokens.turns import cut_turn, ends_thinking, message_text, qwen_markers, rendered_role, until_stop

_TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)

MAX_CACHED, MAX_CACHED_CHARS = 256, 1 << 16
"""The size of the cache of encoded first turns, and of what follows them in first prompts. Rollouts of one task share
both, those of one agent share its system turn with the tools. Encoding them is the most expensive step of a short
rollout."""

_OPEN = "<|im_start|>"
_ASKING = "<|im_start|>assistant\n"


class ChatML:
    """The ChatML renderer. `default_system` is the template's system turn for a conversation that has none."""

    name = "chatml"

    def __init__(self, tokenizer: Tokenizer, default_system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._default_system = default_system
        close = tokenizer.special_id("<|im_end|>")
        if close is None or tokenizer.special_id("<|im_start|>") is None:
            raise ValueError(f"{tokenizer.name_or_path}: no <|im_start|> and <|im_end|> in the vocabulary")
        self._close = close
        self._newline = tokenizer.encode("\n")
        stops = dict.fromkeys((close, tokenizer.eos_token_id, tokenizer.special_id("<|endoftext|>")))
        self.stop_token_ids: tuple[int, ...] = tuple(token for token in stops if token is not None)
        self._cached = lru_cache(MAX_CACHED)(self._encoded)
        is_cut = tokenizer.is_boundary(_OPEN) and tokenizer.is_boundary("<|im_end|>")
        self._asking = tokenizer.encode(_ASKING) if is_cut else None  # None: text must be encoded as a whole
        self.markers = qwen_markers(tokenizer) or Markers(is_text=True)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        text = self.render_text(messages, tools) + _ASKING
        second = text.find(_OPEN, len(_OPEN))  # text of users and tools is escaped, so it never matches
        parts = (text,) if self._asking is None else (text[:second], text[second:])
        ids: list[int] = []
        for part in parts:
            ids += self._cached(part) if len(part) <= MAX_CACHED_CHARS else self._tokenizer.encode(part)
        return ids

    def _encoded(self, text: str) -> array[int]:
        return array("i", self._tokenizer.encode(text))

    def render_text(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> str:
        """A whole conversation as escaped text, without the prompt for the next turn."""
        first = messages[0] if messages and rendered_role(messages[0]) == "system" else None
        system = self._text(first) if first is not None else self._default_system
        text = ""
        if tools:
            lead = "" if system is None else system + "\n\n"
            schemas = "".join("\n" + self._tokenizer.escape(_dumps(tool)) for tool in tools)
            text = f"<|im_start|>system\n{lead}{_TOOLS_HEADER}{schemas}{_TOOLS_FOOTER}<|im_end|>\n"
        elif system is not None:
            text = f"<|im_start|>system\n{system}<|im_end|>\n"
        return text + self._turns(messages[1:] if first is not None else messages)

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
    ) -> list[int] | None:
        if any(message.get("role") == "assistant" for message in new_messages):
            return None  # an assistant turn that was not sampled here means that the history was rewritten
        newline = self._newline
        if sampled_ids and list(sampled_ids[-1 - len(newline) :]) == [self._close, *newline]:
            lead, lead_ids = "", []
        elif sampled_ids and sampled_ids[-1] == self._close:
            lead, lead_ids = "\n", newline
        else:
            lead, lead_ids = "<|im_end|>\n", [self._close, *newline]
        new = self._turns(new_messages)
        if self._asking is None:
            return [*prompt_ids, *sampled_ids, *self._tokenizer.encode(f"{lead}{new}{_ASKING}")]
        return [*prompt_ids, *sampled_ids, *lead_ids, *self._tokenizer.encode(new), *self._asking]

    def parse(
        self, sampled_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[ToolSchema] = ()
    ) -> Parsed:
        ids = until_stop(sampled_ids, self.stop_token_ids)
        if self.markers.is_text:
            content, reasoning, raws = cut_text(self.decode(ids))
        else:
            is_thinking = ends_thinking(prompt_ids, self.markers, self.stop_token_ids)
            cut = cut_turn(ids, self.markers, is_thinking=is_thinking)
            content, reasoning = "".join(map(self.decode, cut.text_ids)), self.decode(cut.thought)
            raws = [(self.decode(call), is_closed) for call, is_closed in cut.calls]
        calls = tuple(
            read_call(raw.strip(), f"call_{len(prompt_ids)}_{index}", is_closed=is_closed)
            for index, (raw, is_closed) in enumerate(raws)
        )
        content, reasoning = content.strip(), reasoning.strip()
        return Parsed(content, reasoning, calls, assistant_message(content, reasoning, calls))

    def call_grammar(self, names: Sequence[str], *, is_one: bool) -> str | None:
        return hermes_calls(names, is_one=is_one)

    @property
    def longest_token_chars(self) -> int:
        return self._tokenizer.longest_token_chars

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    # --- writing ---

    def _turns(self, messages: Sequence[Message]) -> str:
        parts: list[str] = []
        for index, message in enumerate(messages):
            role = rendered_role(message)
            if role == "assistant":
                parts.append(self._assistant(message))
            elif role == "tool":
                if index == 0 or messages[index - 1].get("role") != "tool":
                    parts.append("<|im_start|>user")
                parts.append(f"\n<tool_response>\n{self._text(message)}\n</tool_response>")
                if index + 1 == len(messages) or messages[index + 1].get("role") != "tool":
                    parts.append("<|im_end|>\n")
            else:
                parts.append(f"<|im_start|>{self._escaped(role)}\n{self._text(message)}<|im_end|>\n")
        return "".join(parts)

    def _assistant(self, message: Message) -> str:
        content = self._text(message)
        reasoning = message.get("reasoning_content")
        text = "<|im_start|>assistant\n"
        if isinstance(reasoning, str) and reasoning:
            text += f"<think>\n{self._escaped(reasoning)}\n</think>\n\n"
        text += content
        calls = message.get("tool_calls")
        for index, call in enumerate(calls if isinstance(calls, Sequence) else ()):
            name, arguments = named_arguments(call)
            body = arguments if isinstance(arguments, str) else _dumps(arguments)
            lead = "\n" if content or index else ""
            name = self._escaped(name)
            text += f'{lead}<tool_call>\n{{"name": "{name}", "arguments": {self._escaped(body)}}}\n</tool_call>'
        return text + "<|im_end|>\n"

    def _text(self, message: Message) -> str:
        return message_text(message, self.name, self._tokenizer.escape)

    def _escaped(self, value: Json) -> str:
        return self._tokenizer.escape(value) if isinstance(value, str) else ""


def _dumps(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
