"""The digest of a history: equal for two requests with the same content, however their clients encode it.

The digest ignores differences of encoding: ids of calls, null fields, the formatting of arguments, text in parts, and a
line of the system prompt that is different in every request. It also ignores an argument whose value is the default
that the schema of its tool, in the same request, declares: agent programs fill those in (Claude Code adds
`replace_all: false`). It ignores no content: two histories that differ in a word, a call, an image or (unless
configured otherwise) reasoning have different digests. Ignoring a difference never changes a prompt: a request that
extends a history is sent the sampled ids, not what the client wrote.

Each link is the digest of the previous link and of its message, so a history is digested in one pass, and the next
message in one step. Arguments are parsed once, however often they are sent back: 60 messages with 58 calls, 66 kB in
all, cost 0.4 ms, and 1.2 ms the first time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar, cast

import orjson

from rollyard.core import Json, Message
from rollyard.core.json import encode_container
from rollyard.tokens.base import ToolSchema
from rollyard.tokens.calls import named_arguments

_T = TypeVar("_T")

_CHANGING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)
"""A line of Claude Code's system prompt that differs from request to request and has no meaning for the model."""

_EXACT = 2**53  # below this, a whole float equals the integer in every JSON library

LONG_CHARS = 16 << 10
"""A longer text is replaced by its digest. Encoding 4 MiB of line breaks as JSON holds the interpreter for 60 ms."""

MAX_CALLS, MAX_TOOLSETS = 4096, 64
"""Cache sizes: calls by their digest (0.2 kB each), tool sets by their defaults. A full cache is cleared, which only
costs time."""


@dataclass(frozen=True, slots=True)
class History:
    """`chain[n]` is the digest of the first n messages; `bare[n]` is the same without reasoning."""

    chain: tuple[bytes, ...] = (b"",)
    bare: tuple[bytes, ...] = (b"",)


@dataclass(frozen=True, slots=True)
class _Defaults:
    """The default values of one tool's arguments, in canonical JSON, and a digest of them."""

    values: Mapping[str, bytes]
    digest: bytes


_NO_DEFAULTS = _Defaults({}, b"")


@dataclass(frozen=True, slots=True)
class Toolset:
    """The tools of a request. `defaults` contains the tools that declare default values; most do not."""

    digest: bytes
    defaults: Mapping[str, _Defaults]


class Histories:
    """Digests the histories of one rollout. `has_reasoning`: reasoning is part of a history."""

    def __init__(self, *, has_reasoning: bool) -> None:
        self._has_reasoning = has_reasoning
        self._toolsets: dict[bytes, Toolset] = {}
        self._read: dict[bytes, str] = {}  # the key of arguments as written → the digest of their value

    def toolset(self, tools: Sequence[ToolSchema]) -> Toolset:
        key = digest(list(tools))
        toolset = self._toolsets.get(key)
        if toolset is None:
            toolset = Toolset(key, _defaults(tools))
            _keep(self._toolsets, key, toolset, MAX_TOOLSETS)
        return toolset

    def of(self, messages: Sequence[Message], toolset: Toolset) -> History:
        chain, bare = [b""], [b""]
        for message in messages:
            full, less = self._links(message, chain[-1], bare[-1], toolset)
            chain.append(full)
            bare.append(less)
        return History(tuple(chain), tuple(bare))

    def extended(self, history: History, message: Message, toolset: Toolset) -> History:
        chain, bare = self._links(message, history.chain[-1], history.bare[-1], toolset)
        return History((*history.chain, chain), (*history.bare, bare))

    def _links(self, message: Message, chain: bytes, bare: bytes, toolset: Toolset) -> tuple[bytes, bytes]:
        message_hash = _hash(_canonical(self._canonical_content(message, toolset)))
        bare = _hash(bare + message_hash)
        if not self._has_reasoning:
            return bare, bare
        thought = _canonical(_text(message.get("reasoning_content"))) if message.get("role") == "assistant" else b""
        return _hash(chain + message_hash + thought), bare

    def _canonical_content(self, message: Message, toolset: Toolset) -> Json:
        """The content of a message in a canonical form, which is the same for all encodings."""
        role, content, name = (
            _digest_if_long(message.get("role")),
            message.get("content"),
            _digest_if_long(message.get("name")),
        )
        if role in ("system", "developer"):
            return ["system", _text(content, _without_changing), name]
        if role == "assistant":
            calls = message.get("tool_calls")
            canonical_calls = [self._call(call, toolset) for call in calls] if isinstance(calls, Sequence) else []
            return [role, _text(content), canonical_calls]
        return [role, _text(content), name if role != "tool" else None]

    def _call(self, call: Json, toolset: Toolset) -> Json:
        name, arguments = named_arguments(call)
        defaults = toolset.defaults.get(name, _NO_DEFAULTS)
        if not isinstance(arguments, str):
            arguments = _canonical(arguments).decode()
        key = blake2b(arguments.encode("utf-8", "surrogatepass"), digest_size=16, key=defaults.digest).digest()
        arguments_digest = self._read.get(key)
        if arguments_digest is None:
            arguments_digest = _arguments(arguments, defaults.values)
            _keep(self._read, key, arguments_digest, MAX_CALLS)
        return [_digest_if_long(name), arguments_digest]


def digest(value: object) -> bytes:
    """The digest of any JSON value, independent of the order of its keys."""
    return _hash(_canonical(value))


def _keep(cache: dict[bytes, _T], key: bytes, value: _T, most: int) -> None:
    if len(cache) >= most:
        cache.clear()
    cache[key] = value


def _without_changing(text: str) -> str:
    return _CHANGING.sub("", text) if "x-anthropic-billing-header:" in text else text


def _unchanged(text: str) -> str:
    return text


def _text(content: Json, clean: Callable[[str], str] = _unchanged) -> Json:
    """Text parts are joined; a part that is not text (an image) stays a part, so that no text equals it."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _digest_if_long(clean(content))
    parts: list[Json] = []
    pieces: list[str] = []
    for part in content if isinstance(content, Sequence) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            pieces.append(clean(text))
        else:
            parts += [_digest_if_long("".join(pieces)), [part]]
            pieces = []
    last = _digest_if_long("".join(pieces))
    return [*parts, last] if parts else last


def _digest_if_long(value: Json) -> Json:
    """A long text's digest, computed step by step, in an object, so that no text equals it. Other values unchanged."""
    if not isinstance(value, str) or len(value) <= LONG_CHARS:
        return value
    hashed = blake2b(digest_size=16)
    for at in range(0, len(value), LONG_CHARS):
        hashed.update(value[at : at + LONG_CHARS].encode("utf-8", "surrogatepass"))
    return {"text": hashed.hexdigest()}


def _arguments(text: str, defaults: Mapping[str, bytes]) -> str:
    """The digest of the arguments' value, or of their text if it is not JSON."""
    try:
        value = _read(text or "{}")
        if defaults and isinstance(value, Mapping):
            value = {
                key: item for key, item in value.items() if key not in defaults or _canonical(item) != defaults[key]
            }
        return _hash(_canonical(value)).hex()
    except (ValueError, RecursionError):
        return "text " + _hash(text.encode("utf-8", "surrogatepass")).hex()


def _defaults(tools: Sequence[ToolSchema]) -> dict[str, _Defaults]:
    """The defaults of each tool's parameters, without nested ones. A name that occurs twice has none, nor has a tool
    whose defaults are not JSON."""
    defaults: dict[str, _Defaults] = {}
    seen: set[str] = set()
    for tool in tools:
        function = _mapping(tool.get("function"))
        name, properties = function.get("name"), _mapping(_mapping(function.get("parameters")).get("properties"))
        declared = {
            key: schema["default"]
            for key, schema in properties.items()
            if isinstance(schema, Mapping) and "default" in schema
        }
        if not isinstance(name, str):
            continue
        if name in seen:
            defaults.pop(name, None)
        elif declared:
            with suppress(ValueError, RecursionError):
                values = {key: _canonical(_read(_canonical(value).decode())) for key, value in declared.items()}
                defaults[name] = _Defaults(values, digest(declared))
        seen.add(name)
    return defaults


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}


def _read(text: str) -> Json:
    return cast("Json", json.loads(text, parse_float=_number, parse_constant=_refuse))


def _number(text: str) -> int | float | str:
    """2.0 becomes 2, as JavaScript writes it. A number beyond the range of a float stays text."""
    value = float(text)
    if value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value if abs(value) != float("inf") else text


def _refuse(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


def _canonical(value: object) -> bytes:
    try:
        return orjson.dumps(value, default=encode_container, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # an integer beyond 64 bits, a lone surrogate, or nesting beyond orjson's limit
        return json.dumps(
            value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=encode_container
        ).encode()


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
