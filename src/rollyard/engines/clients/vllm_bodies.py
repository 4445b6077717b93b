"""The bodies of vLLM's complete and streamed replies to `/inference/v1/generate` and `/v1/completions`, as far as they
are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollyard.core.failure import EngineRefused
from rollyard.engines.base import Top
from rollyard.engines.clients import replies
from rollyard.engines.clients.remote import StreamError


class Neighbour(msgspec.Struct):
    logprob: float
    token_id: int | None = None
    token: str | None = None


class Entry(Neighbour):
    logprob: float | None = None  # type: ignore[assignment]  # the sampled token's may be missing
    top_logprobs: list[Neighbour] | None = None


class Content(msgspec.Struct):
    content: list[Entry] | None = None


class Weights(msgspec.Struct):
    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: Content | None = None
    weight_versions: list[Weights] | None = None
    routed_experts: str | None = None


class Cached(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: Cached | None = None


class Reply(msgspec.Struct):
    choices: list[Choice]
    usage: Usage | None = None


class Columns(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: Columns | None = None


class CompletionReply(msgspec.Struct):
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Named(msgspec.Struct, gc=False):
    """A logprob without its neighbours, which a stream repeats for every token and which are not needed."""

    logprob: float | None = None
    token_id: int | None = None
    token: str | None = None


class NamedContent(msgspec.Struct):
    content: list[Named] | None = None


class Delta(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: NamedContent | None = None
    weight_versions: list[Weights] | None = None
    routed_experts: str | None = None


class Event(msgspec.Struct):
    choices: list[Delta] = []
    usage: Usage | None = None
    error: StreamError | None = None


class ToppedEvent(msgspec.Struct):
    """An `Event` with the neighbours of each token."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: StreamError | None = None


class CompletionEvent(msgspec.Struct):
    choices: list[CompletionChoice] = []
    usage: Usage | None = None
    error: StreamError | None = None


class Tokens(msgspec.Struct):
    tokens: list[int]


class Version(msgspec.Struct):
    version: str = ""


def token_of(entry: Neighbour | Named) -> int:
    if entry.token_id is not None:
        return entry.token_id
    if entry.token is None:
        raise ValueError("a logprob names no token")
    return replies.placeholder_id(entry.token)


def tops_of(content: Sequence[Entry] | None, most: int) -> tuple[Top, ...] | None:
    """The most likely tokens at each position, if they were requested and all positions have them."""
    if not most or content is None or any(entry.top_logprobs is None for entry in content):
        return None
    return tuple(
        replies.top_of(((token_of(top), top.logprob) for top in entry.top_logprobs or ()), most) for entry in content
    )


def column_tops_of(columns: Columns | None, most: int) -> tuple[Top, ...] | None:
    """The same for `/v1/completions`."""
    if not most or columns is None or columns.top_logprobs is None or None in columns.top_logprobs:
        return None
    return tuple(
        replies.top_of(((replies.placeholder_id(name), value) for name, value in (top or {}).items()), most)
        for top in columns.top_logprobs
    )


def only(choices: Sequence[Any]) -> Any:
    """The one choice of a reply. Several raise EngineRefused: the cause is this request's parameters, so the engine
    still works for others."""
    if not choices:
        raise ValueError("0 choices where one was asked for")
    if len(choices) > 1:
        raise EngineRefused(f"it answered with {len(choices)} choices where one was asked for")
    return choices[0]


def cached(usage: Usage | None) -> int | None:
    return usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else None
