"""The interface of the gateway: requests and replies, independent of the dialect.

A dialect is the API of an SDK: OpenAI Chat Completions, OpenAI Responses or Anthropic Messages. It only translates:
`read` converts a body to a `ChatRequest`, `Writer` and `reply` encode a `Reply`, and `error` encodes a `Problem`. It
holds no state and does no I/O; `session.py` samples, splices and records.

Invariants. A `ChatRequest` contains everything that the request contains: a part that it cannot represent raises
`Problem` and is never dropped. A `Reply` that a client sends back is read as the same message: `read` and the encoding
of a turn are inverse to each other, except for the ids of calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollyard.core import Json, Message
from rollyard.tokens.base import ToolCall, ToolSchema

ProblemKind = Literal[
    "invalid",  # the request itself: 400
    "context",  # the conversation does not fit into the model's context: 400, as the SDK expects
    "limit",  # the rollout has used up its turns, tokens or time: 400, so that SDKs do not retry
    "too_large",  # the body is too large: 413
    "not_found",  # no such path or model: 404
    "unauthorized",  # 401
    "unavailable",  # no engine, or the session has ended: 503
    "internal",  # 500
]

STATUS: Mapping[ProblemKind, int] = {
    "invalid": 400,
    "context": 400,
    "limit": 400,
    "too_large": 413,
    "not_found": 404,
    "unauthorized": 401,
    "unavailable": 503,
    "internal": 500,
}


MOST_MESSAGE_CHARS = 2000
"""The length of an error message, which may contain names and values that the client sent."""


class Problem(Exception):
    """The reason why a request gets no completion. `code` is Rollyard's and stable; `param` names the invalid field."""

    def __init__(
        self,
        kind: ProblemKind,
        message: str,
        *,
        code: str = "",
        param: str | None = None,
        used_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(message[:MOST_MESSAGE_CHARS])
        self.kind: ProblemKind = kind
        self.message = message[:MOST_MESSAGE_CHARS]
        self.code = code or kind
        self.param = None if param is None else param[:MOST_MESSAGE_CHARS]
        self.used_tokens = used_tokens  # with "context": the length of the prompt
        self.max_tokens = max_tokens  # with "context": the room for it

    @property
    def status(self) -> int:
        """The HTTP status of the response."""
        return STATUS[self.kind]


@dataclass(frozen=True, slots=True)
class RequestParameter:
    """A parameter that is granted where possible (`parameters.py`), under its dialect's name.

    stop: a list of strings. seed: an integer. logprobs, no_calls: true. top_logprobs: how many. calls: the name of the
    tool that has to be called, or "" for any. format: {"type": "json_object"}, or {"type": "json_schema", "schema": …}.
    same: granted if the task's sampling has the same value.
    """

    kind: Literal["stop", "seed", "logprobs", "top_logprobs", "no_calls", "calls", "format", "same"]
    name: str
    value: Json = True


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request in the form that is rendered, the same for all dialects.

    `messages` have OpenAI's chat format, as renderers accept it: role (system, developer, user, assistant, tool) and
    content (a string; a list of parts only if one of them is not text). An assistant's message has `tool_calls` ({"id",
    "type": "function", "function": {"name", "arguments": JSON text}}) and `reasoning_content`, a tool's message has
    `tool_call_id`. `tools` are function schemas in chat format.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    model: str = ""  # the client's name for it; echoed, never looked up: the rollout has one policy
    max_tokens: int | None = None  # an upper bound, like the task's own
    is_stream: bool = False
    wishes: tuple[RequestParameter, ...] = ()
    overruled: tuple[str, ...] = ()  # parameters that the client set and that the task overrides
    unknown: tuple[str, ...] = ()  # parameters that this dialect does not have
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # dialect-specific, for its writer


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of a completion."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token, and the likeliest tokens at its position if they were requested."""

    token: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """A completed turn as the client receives it. A retry receives the same object."""

    id: str  # letters and digits; a dialect adds its own prefix
    created: int  # seconds since 1970
    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]  # those that the client receives as calls: see `split_calls`
    finish: Finish
    usage: Usage
    stop_sequence: str | None = None  # the client's stop text that ended the turn
    logprobs: tuple[TokenLogprob, ...] | None = None  # of all sampled tokens, if they were requested
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of a reply's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of a reply's reasoning."""

    text: str


Event = Text | Reasoning | ToolCall
"""An element of a stream, in the order of sampling."""


class Writer(Protocol):
    """Encodes one streamed reply as `text/event-stream`, event by event. Each listener has its own."""

    def begin(self) -> bytes:
        """Returns the bytes before the first event."""
        ...

    def event(self, event: Event) -> bytes:
        """Returns an event, encoded."""
        ...

    def end(self, reply: Reply) -> bytes:
        """Closes open blocks and returns them with the finish reason, the usage and the terminator."""
        ...

    def error(self, problem: Problem) -> bytes:
        """Reports, after `begin`, that the reply cannot be completed."""
        ...

    def keep_alive(self) -> bytes:
        """Returns bytes that a client ignores, to keep the connection open."""
        ...


class Dialect(Protocol):
    """An API of the gateway: reads its requests, and encodes replies and errors."""

    name: str  # chat, responses, messages
    takes_raw_arguments: bool
    """Whether a call can carry arguments that are not a JSON object (OpenAI's are a string)."""

    def read(self, body: Mapping[str, Json]) -> ChatRequest:
        """Reads a request's body. Raises Problem("invalid", …) that names the invalid field."""
        ...

    def reply(self, request: ChatRequest, reply: Reply) -> bytes:
        """Returns the complete reply as JSON."""
        ...

    def writer(self, request: ChatRequest, reply_id: str, created: int, prompt_tokens: int) -> Writer:
        """Returns the encoder of one streamed reply."""
        ...

    def error(self, problem: Problem) -> bytes:
        """Returns the body of an error response as JSON."""
        ...


def shown(value: Json) -> str:
    """Describes a value in an error message by a short string or its type: a value may have megabytes."""
    if isinstance(value, str):
        return repr(value[:40])
    return {dict: "an object", list: "an array", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def split_calls(calls: Sequence[ToolCall], *, takes_raw_arguments: bool) -> tuple[tuple[ToolCall, ...], str]:
    """Returns the calls that the dialect can represent, and the text that the model wrote for the others."""
    representable: list[ToolCall] = []
    texts: list[str] = []
    for call in calls:
        if call.name and (call.arguments is not None or takes_raw_arguments):
            representable.append(call)
        else:
            texts.append(call.raw)
    return tuple(representable), "\n".join(texts)
