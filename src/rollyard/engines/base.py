"""The interface of this package: an `Engine` turns prompt token ids into sampled token ids.

Invariants, tested for every engine by `rollyard.testing.engine_conformance`:
- A generation contains exactly what was sampled: one logprob per id, never re-tokenized, never padded. A reply
  that violates this raises `EngineBroken`; it is not repaired.
- `abort` ends the generation of a request; the pending `generate` returns what was sampled so far, with
  finish_reason "abort".
- Tokens passed to `on_tokens` are final: the returned generation consists of exactly those. A stream that breaks
  after its first token therefore returns a generation with finish_reason "abort" and does not raise.
- All errors are EngineFailures; cancelling `generate` frees the engine.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from rollyard.core import Deadline, Json, Message, Sampling
from rollyard.core.engine import EngineSpec, Kind, Role
from rollyard.core.policy import PauseMode
from rollyard.core.trace import LogprobsKind

__all__ = [
    "ChatReply",
    "Contact",
    "Control",
    "Engine",
    "EngineInfo",
    "EngineLoad",
    "EngineSpec",
    "GenerateRequest",
    "Generation",
    "Kind",
    "OnTokens",
    "PauseMode",
    "Role",
    "Session",
    "Top",
    "VersionSpan",
]


class Contact(NamedTuple):
    """While both numbers are unchanged, the same process answers at a target, unless a proxy is in between."""

    losses: int = 0  # connections that the other side closed, or did not accept
    gaps: int = 0  # connections opened while no other was open


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's load at one moment."""

    kv_use: float  # of its fullest rank, 0 to 1
    running: int = 0  # requests being sampled
    waiting: int = 0  # requests in the engine's own queue
    preemptions: int = 0  # since the engine started
    sampled_tokens: int | None = None  # since the engine started, of all its clients; None: not reported


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an engine, as found by its probe."""

    model: str
    max_context: int | None
    logprobs_kind: LogprobsKind
    api: str  # which of its APIs is in use, e.g. "inference/v1/generate"
    version: str = ""
    tokenizer: str = ""  # the model's folder, if the engine reports one that is readable here
    model_source: str = ""  # the model as the engine loaded it: a folder on its machine, or a hub name
    reports_versions: bool = False  # each generation carries its weight versions
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion, as it is requested from an engine."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    session_id: str = ""
    cache_salt: str = ""
    priority: int = 0
    stop: tuple[str, ...] = ()  # texts that end the completion; their token ids are part of it
    top_logprobs: int = 0  # number of most likely tokens to return for each sampled one


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens [start, end) came from these weights. Version −1: the engine has not been given a version."""

    version: int
    start: int
    end: int


Top = tuple[tuple[int, float], ...]
"""The most likely tokens at one position with their logprobs, in descending order."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The sampled tokens of one call, in columns of one length."""

    token_ids: array[int]
    logprobs: array[float] | None  # None: the engine returned none, so the generation is not trainable
    finish_reason: Literal["stop", "length", "abort"]
    versions: tuple[VersionSpan, ...] = ()  # empty: the engine does not report them
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    columns: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    untrainable: str = ""  # why it must not be trained on; empty: it is trainable
    is_tokenizer_verified: bool = True
    tops: tuple[Top, ...] | None = None  # one for each token; None: not requested, or the engine returned none
    engine: str = ""  # that sampled the last of them
    logprobs_kind: LogprobsKind | None = None  # of all of them; unknown if engines of several kinds sampled them


OnTokens = Callable[[Sequence[int]], None]
"""Receives each batch of newly sampled ids, in order, as they arrive. It must be fast and must not raise."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The reply of a text engine."""

    message: Message
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Control(Protocol):
    """The steps of a weight change at an engine; `engines/weights/policies.py` has their order.

    A step returns False if the engine has no such route (an older version, or one started without these routes); the
    service then does what it can without the engine. A step raises EngineFailure if the route exists and failed."""

    async def pause(self, mode: PauseMode) -> bool:
        """The engine samples nothing after this returns. Calls in flight are ended (abort), awaited (drain) or kept
        (keep)."""
        ...

    async def set_version(self, version: int) -> bool:
        """Sets the version that the engine reports for the tokens that it samples from then on."""
        ...

    async def clear_cache(self) -> bool:
        """Drops every KV block; calls kept in flight are computed again. Retries for a bounded time while blocks are
        held."""
        ...

    async def resume(self) -> bool:
        """The engine samples again: new calls, and calls kept in flight."""
        ...

    async def version(self) -> str | None:
        """The weight version that the engine reports, or None."""
        ...


class Engine(Protocol):
    """A client of one inference server. Its calls raise EngineFailure, unless stated otherwise."""

    @property
    def spec(self) -> EngineSpec:
        """The engine as it was registered."""
        ...

    @property
    def info(self) -> EngineInfo:
        """The result of `probe`; raises RuntimeError before it."""
        ...

    @property
    def control(self) -> Control:
        """The engine's control API, for weight changes."""
        ...

    async def probe(self) -> EngineInfo:
        """Determines the engine's properties, including the meaning of its logprobs. Raises EngineFailure."""
        ...

    async def healthy(self) -> bool:
        """One cheap request; never raises."""
        ...

    @property
    def contact(self) -> Contact:
        """Changes whenever another process may be listening at its address."""
        ...

    async def started(self) -> str | None:
        """The start time that the engine's process reports, or None. One cheap request; never raises."""
        ...

    async def load(self) -> EngineLoad | None:
        """The load that the engine reports, or None. One cheap request; never raises."""
        ...

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Generation:
        """One completion. With `on_tokens` it is streamed; without, it is one plain call, which is cheaper.

        Each batch passed to `on_tokens` has passed every check that a complete reply must pass; together they are
        the generation's `token_ids`. A stream that breaks (cut off, an error event, invalid data) after its first
        token returns the tokens already passed on, with finish_reason "abort"; before its first token it raises as a
        plain call does. Only some engines report the weight versions of a broken stream.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Asks the engine to end a call, whose `generate` then returns what was sampled. An unknown id is ignored."""
        ...

    def hang_up(self, request_id: str) -> None:
        """Stops reading a streamed call: its `generate` ends at once, as if the stream had broken there. For a call
        whose abort the engine does not obey. An id that is not being streamed is ignored."""
        ...

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling,
        tools: Sequence[Mapping[str, Json]] = (),
        session_id: str = "",
    ) -> ChatReply:
        """Text in, text out: used for `openai` engines and judges. vLLM and SGLang support it too."""
        ...

    async def tokenize(self, text: str) -> Sequence[int] | None:
        """The text's tokens by the engine's own tokenizer, or None if it has no route for this."""
        ...

    async def tokenizer_file(self, name: str = "", most_bytes: int = 1 << 20) -> bytes | None:
        """A file of its tokenizer, or without a name the list of them as JSON. None if the engine serves none."""
        ...

    async def close(self) -> None:
        """Closes the connections to the engine."""
        ...


class Session(Protocol):
    """One rollout's use of a policy's engines: sticky, counted, and released on every exit path.

    `generate` handles internally: waiting while the policy is paused or no engine is up (the rollout's clock is
    stopped meanwhile), moving to another engine after a failure, and continuing from the tokens that an aborted or
    timed-out call had already returned. Those tokens are kept, never sampled again.
    """

    @property
    def id(self) -> str:
        """The id that engines use to find the session's prefix cache."""
        ...

    @property
    def engine(self) -> Engine:
        """The engine that the session is currently assigned to."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        sampling: Sampling,
        max_tokens: int,
        seed: int | None,
        stop_token_ids: tuple[int, ...],
        clock: Deadline,
        model_s: float,
        salvage: Callable[[Generation], None] = lambda _: None,
        on_tokens: OnTokens | None = None,
        resume: Generation | None = None,
        stop: asyncio.Future[None] | None = None,
        stop_texts: tuple[str, ...] = (),
        top_logprobs: int = 0,
    ) -> Generation:
        """One completion, its `versions` covering every token. When `clock` expires, the call is aborted, the sampled
        tokens are passed to `salvage`, and DeadlineExpired is raised. If an EngineFailure is raised after tokens were
        sampled, they are passed to `salvage` too: they are what the attempt lost.

        With `on_tokens` the calls are streamed. It receives every token once, however many calls are needed.

        When `stop` is done (its reader disconnected), the method returns what was sampled so far, possibly nothing,
        with finish_reason "abort". `resume` is such a partial completion: the new completion starts with it,
        `on_tokens` receives it first, and it counts against `max_tokens`.
        """
        ...

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling,
        tools: Sequence[Mapping[str, Json]],
        clock: Deadline,
        model_s: float,
    ) -> ChatReply:
        """Returns one reply as text. Raises DeadlineExpired when `clock` expires, and EngineFailure."""
        ...

    async def close(self) -> None:
        """Releases the seat. Idempotent."""
        ...
