"""The door of this wing: a `Renderer` is a chat template as code, and never re-renders what was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollyard.core import Json, Message

ToolSchema = Mapping[str, Json]
"""{"type": "function", "function": {"name", "description", "parameters"}}"""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. `arguments` is None, and `error` says why, if it was not proper JSON."""

    id: str
    name: str
    arguments: Mapping[str, Json] | None
    raw: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A sampled turn, read back from its ids. Tool calls are found by special-token ids, not by text."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    message: Message  # the same in the OpenAI shape, as it enters the history


@dataclass(frozen=True, slots=True)
class Markers:
    """The ids by which a turn can be read while it is sampled. Thinking comes first, if at all; then text, then calls.

    A renderer that has them promises (tests/tokens/test_reader.py): content is the stripped text before the first call
    and outside the thinking, reasoning is the stripped text inside it, and a call that was closed stays what it is.
    """

    think_open: int | None = None
    think_close: int | None = None
    call_open: frozenset[int] = frozenset()
    call_close: frozenset[int] = frozenset()
    is_text: bool = False  # there are no such ids: the turn is read by the text of the markers (text_cut.py)


class Renderer(Protocol):
    """Invariant: `extend(p, s, …)[:len(p)+len(s)] == p + s`, always; None where it cannot be shown."""

    @property
    def name(self) -> str: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def longest_token_chars(self) -> int:
        """No token stands for more characters of a text than this."""
        ...

    @property
    def markers(self) -> Markers | None:
        """None: a turn of this format can only be read whole."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """A whole conversation, with the prompt for the next assistant turn."""
        ...

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
    ) -> list[int] | None:
        """The next prompt: what was sent, what was sampled, then the tokens of what is new."""
        ...

    def parse(
        self, sampled_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[ToolSchema] = ()
    ) -> Parsed:
        """Reads a turn back. `tools` are those it was rendered with: some formats need them to tell 1 from "1"."""
        ...

    def call_grammar(self, names: Sequence[str], *, is_one: bool) -> str | None:
        """The grammar (EBNF) of a turn that calls one of these tools, once or, unless `is_one`, several times; None: it
        is not known for this format."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def encode(self, text: str) -> list[int]:
        """The tokenizer's own ids of a text, markers recognised: for comparing tokenizers, not for prompts."""
        ...
