"""An adapter of the hand-written renderers of the `renderers` package (Qwen, GLM, DeepSeek, Kimi, gpt-oss…).

Importing the package takes about 1.1 s and 50 MB (it includes an unused HTTP client), so it is imported only when such
a renderer is requested.

Invariants. An extended prompt is compared token by token with what was sent and sampled; if it differs, `extend`
returns None. Text of users and tools is escaped (tokenizer.py), which the package does not do. Thinking of earlier
turns stays in the prompt where it was sampled: dropping it would break every trace in two.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, cast

from rollyard.core import Json, Message
from rollyard.core.failure import InvalidRequest, TaskInvalid
from rollyard.tokens.base import Parsed, ToolCall, ToolSchema
from rollyard.tokens.calls import assistant_message, named_arguments, read_arguments, read_json
from rollyard.tokens.tokenizer import Tokenizer
from rollyard.tokens.turns import message_text, qwen_markers, rendered_role

_STATUS = {
    "invalid_json": "the tool call is not valid JSON",
    "unclosed_block": "the tool call was not closed",
    "missing_name": "the tool call has no name",
    "malformed_structure": "the tool call is not in the model's tool-call format",
    "unknown_tool": "there is no such tool",
}

READ_BY_PIECES = frozenset(
    {
        "qwen3",
        "qwen3-vl",
        "qwen3.5",
        "qwen3.6",
        "qwen3.8",
        "prime-qwen3",
        "nemotron-3",
        "nemotron-3-ultra",
        "nemotron-3.5",
    }
)
"""Formats that are tested to parse equally in pieces and whole (tests/tokens/test_reader.py), all with Qwen3's real
tokenizer, which has their markers. A turn of any other format is sent when it is complete."""

HARMONY = "gpt-oss"
_KNOW_DEVELOPER = frozenset({"gpt-oss", "gemma4", "deepseek-v4"})  # the others drop or refuse a developer message


def library_names() -> tuple[str, ...]:
    """The renderers of the package, except its generic one, which cannot extend a prompt exactly."""
    base = _package()
    base._populate_registry()
    return tuple(sorted(name for name in base.RENDERER_REGISTRY if name != "default"))


def library_name_of(model: str) -> str | None:
    """The renderer that the package's authors checked for exactly this model."""
    return cast("str | None", _package().MODEL_RENDERER_MAP.get(model))


class LibraryRenderer:
    """One renderer of the package."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._inner = _create(tokenizer, name)
        self.stop_token_ids: tuple[int, ...] = tuple(self._inner.get_stop_token_ids())
        self.markers = qwen_markers(tokenizer) if name in READ_BY_PIECES else None

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        written = self._messages(messages)
        try:
            return list(self._inner.render_ids(written, tools=self._tools(tools), add_generation_prompt=True))
        except Exception as error:  # each format has conversations that it cannot render, and raises its own errors
            raise TaskInvalid(
                f"renderer {self.name!r} cannot render these messages: {type(error).__name__}: {error}"
            ) from error

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
    ) -> list[int] | None:
        written = self._messages(new_messages)
        try:
            bridged = self._inner.bridge_to_next_turn(
                list(prompt_ids), list(sampled_ids), written, tools=self._tools(tools)
            )
        except Exception:  # the caller then renders the whole conversation, which reports what is wrong
            return None
        if bridged is None:
            return None
        ids: list[int] = list(bridged.token_ids)
        before = array("i", prompt_ids) + array("i", sampled_ids)
        return ids if array("i", ids[: len(before)]) == before else None

    def parse(
        self, sampled_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[ToolSchema] = ()
    ) -> Parsed:
        response = self._inner.parse_response(
            list(sampled_ids), tools=self._tools(tools), prompt_ids=list(prompt_ids) or None
        )
        calls = tuple(
            _call(call, f"call_{len(prompt_ids)}_{index}") for index, call in enumerate(response.tool_calls or ())
        )
        content, reasoning = str(response.content or ""), str(response.reasoning_content or "")
        if self.markers is not None:
            content, reasoning = content.strip(), reasoning.strip()  # the package strips thinking only if it was closed
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

    def _tools(self, tools: Sequence[ToolSchema]) -> list[dict[str, Any]] | None:
        """The schemas, whose texts may be a server's. Harmony encodes them itself, as ordinary text."""
        if self.name != HARMONY:
            tools = [cast("ToolSchema", self._escaped(cast("Json", tool))) for tool in tools]
        return [dict(tool) for tool in tools] or None

    def _escaped(self, value: Json) -> Json:
        if isinstance(value, str):
            return self._tokenizer.escape(value)
        if isinstance(value, Mapping):
            return {self._tokenizer.escape(str(name)): self._escaped(item) for name, item in value.items()}
        return [self._escaped(item) for item in value] if isinstance(value, Sequence) else value

    def _messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> dict[str, Any]:
        """A message as the package expects it: escaped text, and arguments as objects if they are objects."""
        out: dict[str, Any] = {key: self._escaped(it) if key == "name" else it for key, it in message.items()}
        out["content"] = message_text(message, self.name, self._tokenizer.escape)
        if self.name not in _KNOW_DEVELOPER:
            out["role"] = rendered_role(message)
        reasoning = message.get("reasoning_content")
        if isinstance(reasoning, str):
            out["reasoning_content"] = self._tokenizer.escape(reasoning)
        calls = message.get("tool_calls")
        if isinstance(calls, Sequence) and calls:
            out["tool_calls"] = [self._tool_call(call) for call in calls if isinstance(call, Mapping)]
        return out

    def _tool_call(self, call: Mapping[str, Json]) -> dict[str, Any]:
        name, arguments = named_arguments(call)
        if isinstance(arguments, str):
            text = self._tokenizer.escape(arguments)
            try:
                value = read_json(text)
            except ValueError:
                value = None
            arguments = value if isinstance(value, Mapping) else text
        name = self._tokenizer.escape(name)
        return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _call(call: Any, call_id: str) -> ToolCall:
    raw, name, status = str(call.raw), str(call.name or ""), str(call.status)
    if status == "ok":
        return read_arguments(name, call.arguments, raw, call_id)
    return ToolCall(call_id, name, None, raw, _STATUS.get(status, status))


def _package() -> Any:
    try:
        return import_module("renderers.base")
    except ImportError as error:
        raise InvalidRequest(
            f"the renderers package cannot be imported ({error}); install it whole: pip install renderers httpx"
        ) from error


def _create(tokenizer: Tokenizer, name: str) -> Any:
    base = _package()
    names = library_names()
    if name not in names:
        raise InvalidRequest(f"there is no renderer {name!r}; there are chatml, template, {', '.join(names)}")
    config = import_module("renderers.configs").config_from_name(name)
    retained = type(config)(thinking_retention="all")
    try:
        return base.create_renderer(tokenizer, retained)
    except (ValueError, NotImplementedError):
        pass  # the format has no setting for keeping its thinking
    except AssertionError as error:
        raise InvalidRequest(f"renderer {name!r} does not fit tokenizer {tokenizer.name_or_path!r}: {error}") from error
    return base.create_renderer(tokenizer, config)
