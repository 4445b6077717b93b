"""The interface of this package: a `Renderer` is a chat template as code. It never re-renders sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollyard.core import Json, Message

ToolSchema = Mapping[str, Json]
"""{"type": "function", "function": {"name", "description", "parameters"}}"""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. If it is not valid JSON, `arguments` is None and `error` is the reason."""

    id: str
    name: str
    arguments: Mapping[str, Json] | None
    raw: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A sampled turn, parsed from its ids. Tool calls are found by special-token ids, not by text."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    message: Message  # the same in the OpenAI format, as it enters the history


@dataclass(frozen=True, slots=True)
class Markers:
    """The ids by which a turn can be parsed while it is sampled. Thinking, if any, comes first; then text, then calls.

    A renderer with markers guarantees (tests/tokens/test_reader.py): content is the stripped text before the first call
    and outside the thinking, reasoning is the stripped text inside it, and a closed call does not change any more.
    """

    think_open: int | None = None
    think_close: int | None = None
    call_open: frozenset[int] = frozenset()
    call_close: frozenset[int] = frozenset()
    is_text: bool = False  # there are no such ids: the turn is parsed by the text of the markers (text_cut.py)


class Renderer(Protocol):
    """Converts messages to ids and sampled ids to messages, for one chat template.

    Invariant: `extend(p, s, …)[:len(p)+len(s)] == p + s`; it returns None where that cannot be verified."""

    @property
    def name(self) -> str:
        """The renderer's name, such as chatml."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant turn."""
        ...

    @property
    def longest_token_chars(self) -> int:
        """The maximum number of characters of a text that one token encodes."""
        ...

    @property
    def markers(self) -> Markers | None:
        """The ids of thinking and tool calls; None if a turn can only be parsed when it is complete."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """The ids of a whole conversation, with the prompt for the next assistant turn. Raises TaskInvalid if the chat
        template cannot render the messages."""
        ...

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
    ) -> list[int] | None:
        """The next prompt: the previous prompt, the sampled tokens, then the tokens of the new messages. None if the
        result would not start with the first two."""
        ...

    def parse(
        self, sampled_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[ToolSchema] = ()
    ) -> Parsed:
        """Parses a turn. `tools` are those it was rendered with: some formats need them to distinguish 1 from "1"."""
        ...

    def call_grammar(self, names: Sequence[str], *, is_one: bool) -> str | None:
        """The grammar (EBNF) of a turn that calls one of these tools, once or, unless `is_one`, several times. None if
        there is no grammar for this format."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokenizer's ids of a text, with markers recognised: for comparing tokenizers, not for prompts."""
        ...
