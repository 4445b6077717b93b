"""The door of this wing: what a request says, in any dialect, and what it is told.

A dialect is how some SDK writes a conversation with a model: OpenAI Chat Completions, OpenAI Responses, Anthropic
Messages. It only translates: `read` makes an `ChatRequest` of a body, `Writer` and `reply` put a `Reply` into its words, and
`error` a `Problem`. It holds no state and does no I/O; what is sampled, spliced and recorded is `session.py`'s.

Invariants. An `ChatRequest` loses nothing that was said: a part that has no place in it is a `Problem`, never dropped. What a
client sends back of a `Reply` reads as the same message: `read` and the writing of a turn are inverse to each other,
but for the ids of calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollyard.core import Json, Message
from rollyard.tokens.base import ToolCall, ToolSchema

ProblemKind = Literal[
    "invalid",  # the request itself: 400
    "context",  # the conversation does not fit into the model's context: 400, as that SDK expects it
    "limit",  # the rollout has used up its turns, tokens or time: 400, never to be tried again
    "too_large",  # the body: 413
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
"""Of what a client is told is wrong: names and values of its own may be in it."""


class Problem(Exception):
    """Why a request gets no completion. `code` is ours and stable; `param` names the field that was wrong."""

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
        self.used_tokens = used_tokens  # with "context": what the prompt has …
        self.max_tokens = max_tokens  # … and what there is room for

    @property
    def status(self) -> int:
        return STATUS[self.kind]


@dataclass(frozen=True, slots=True)
class RequestParameter:
    """A parameter that is granted where it can be (`parameters.py`), by the name that its dialect has for it.

    stop: a list of texts. seed: a whole number. logprobs, no_calls: true. top_logprobs: how many. calls: the name of
    the tool that has to be called, or "" for any. format: {"type": "json_object"}, or {"type": "json_schema",
    "schema": …}. same: granted if the task's sampling has that very value.
    """

    kind: Literal["stop", "seed", "logprobs", "top_logprobs", "no_calls", "calls", "format", "same"]
    name: str
    value: Json = True


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request, in the one shape that is rendered.

    `messages` are in OpenAI's chat shape as our renderers take it: role (system, developer, user, assistant, tool),
    content (a string; a list of parts only where one of them is not text), and of an assistant `tool_calls` ({"id",
    "type": "function", "function": {"name", "arguments": JSON text}}) and `reasoning_content`; of a tool
    `tool_call_id`. `tools` are function schemas in chat's shape.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    model: str = ""  # as the client names it; echoed, never looked up: the rollout has one policy
    max_tokens: int | None = None  # an upper bound; the task's own is one too
    is_stream: bool = False
    wishes: tuple[RequestParameter, ...] = ()
    overruled: tuple[str, ...] = ()  # parameters that the client set and that do not count here: the task's win
    unknown: tuple[str, ...] = ()  # parameters that this dialect does not have
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the dialect's own, for its writer


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token, and the likeliest ones in its place if they were asked for."""

    token: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """A completed turn as the client is told it; the same object however often it is told."""

    id: str  # letters and digits; a dialect puts its own prefix before it
    created: int  # seconds since 1970
    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]  # those that the client is told as calls: named, see `tellable`
    finish: Finish
    usage: Usage
    stop_sequence: str | None = None  # the client's own, where one ended it
    logprobs: tuple[TokenLogprob, ...] | None = None  # of all sampled tokens, if they were asked for
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


Event = Text | Reasoning | ToolCall
"""What a stream is made of, in the order it was sampled."""


class Writer(Protocol):
    """One streamed answer, event by event, as bytes of `text/event-stream`. Made per listener."""

    def begin(self) -> bytes: ...

    def event(self, event: Event) -> bytes: ...

    def end(self, told: Reply) -> bytes:
        """The rest: whatever closes blocks, the finish, the usage, the terminator."""
        ...

    def error(self, problem: Problem) -> bytes:
        """After `begin`: the answer cannot be completed."""
        ...

    def keep_alive(self) -> bytes:
        """Something that a client ignores, while nothing comes."""
        ...


class Dialect(Protocol):
    name: str  # chat, responses, messages
    takes_raw_arguments: bool
    """Whether a call whose arguments are no JSON object can be told as a call (OpenAI: they are a text)."""

    def read(self, body: Mapping[str, Json]) -> ChatRequest:
        """Raises Problem("invalid", …) naming what was wrong."""
        ...

    def reply(self, ask: ChatRequest, told: Reply) -> bytes:
        """The whole answer, as JSON."""
        ...

    def writer(self, ask: ChatRequest, reply_id: str, created: int, prompt_tokens: int) -> Writer: ...

    def error(self, problem: Problem) -> bytes:
        """The body of an error answer, as JSON."""
        ...


def shown(value: Json) -> str:
    """A value in an error message: a text in short, of anything else the kind. All of it may be megabytes."""
    if isinstance(value, str):
        return repr(value[:40])
    return {dict: "an object", list: "an array", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def tellable(calls: Sequence[ToolCall], *, takes_raw_arguments: bool) -> tuple[tuple[ToolCall, ...], str]:
    """The calls that a client can be told as such, and the others as the text that the model wrote."""
    told: list[ToolCall] = []
    rest: list[str] = []
    for call in calls:
        if call.name and (call.arguments is not None or takes_raw_arguments):
            told.append(call)
        else:
            rest.append(call.raw)
    return tuple(told), "\n".join(rest)
