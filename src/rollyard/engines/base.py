"""The door of this wing: an `Engine` turns token ids into sampled token ids.

Invariants, proven for every engine by `rollyard.testing.engine_conformance`:
- What it returns is what was sampled: ids and logprobs one to one, never re-tokenized, never padded. A reply
  that breaks this is `EngineBroken`, not a repaired reply.
- `abort` ends the generation of a request; the `generate` that waits for it returns what was sampled so far,
  with finish_reason "abort".
- What was given to `on_tokens` is never taken back: the generation that is returned is exactly that. So a stream
  that breaks after its first token is a generation with finish_reason "abort", not an error.
- Errors are the EngineFailure tree and nothing else; cancelling `generate` frees the engine.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rollyard.core import Deadline, Json, Message, Sampling
from rollyard.core.engine import EngineSpec, Kind, Role
from rollyard.core.policy import PauseMode
from rollyard.core.trace import LogprobsKind
from rollyard.engines.clients.http import Contact
from rollyard.engines.clients.load import EngineLoad

__all__ = [
    "ChatReply",
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


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the probe found out."""

    model: str
    max_context: int | None
    logprobs_kind: LogprobsKind
    api: str  # which of its APIs is in use, e.g. "inference/v1/generate"
    version: str = ""
    tokenizer: str = ""  # where its model lies, if it says so and that can be read here
    reports_versions: bool = False  # weight versions come with each generation
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    session_id: str = ""
    cache_salt: str = ""
    priority: int = 0
    stop: tuple[str, ...] = ()  # texts that end it; the ids that say them are part of it
    top_logprobs: int = 0  # how many of the likeliest tokens are returned for each sampled one


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens [start, end) came from these weights. Version −1, from an engine: it has been given none."""

    version: int
    start: int
    end: int


Top = tuple[tuple[int, float], ...]
"""The likeliest tokens at one place with their logprobs, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Generation:
    token_ids: array[int]
    logprobs: array[float] | None  # None: the engine gave none; then nothing is trainable
    finish_reason: Literal["stop", "length", "abort"]
    versions: tuple[VersionSpan, ...] = ()  # empty: the engine cannot say
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    columns: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    untrainable: str = ""  # why it must not be trained on; empty: it may be
    is_tokenizer_verified: bool = True
    tops: tuple[Top, ...] | None = None  # one for each token; None: not asked for, or the engine gave none


OnTokens = Callable[[Sequence[int]], None]
"""Is told each batch of newly sampled ids, in order, as they arrive. Quick, and must not raise."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What a text engine answers."""

    message: Message
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Control(Protocol):
    """What an engine is told when its weights change: see `engines/weights/policies.py` for the order.

    Each step says whether the engine knows it. False: it has no such route (an older version, or one that was started
    without them), and what can be done from outside is all that is done. An EngineFailure: it has, and it failed."""

    async def pause(self, mode: PauseMode) -> bool:
        """It samples nothing from the reply on. What it had in flight: ended (abort), awaited (drain), kept (keep)."""
        ...

    async def set_version(self, version: int) -> bool: ...

    async def clear_cache(self) -> bool:
        """Forgets every KV block: what it kept in flight is computed anew. Tried again while blocks are held, for a
        bounded time."""
        ...

    async def resume(self) -> bool: ...

    async def version(self) -> str | None:
        """What it says of its weights; None: it does not say."""
        ...


class Engine(Protocol):
    @property
    def spec(self) -> EngineSpec: ...

    @property
    def info(self) -> EngineInfo:
        """What `probe` found; RuntimeError before it."""
        ...

    @property
    def control(self) -> Control: ...

    async def probe(self) -> EngineInfo:
        """Asks the engine what it is, and finds out what its logprobs mean."""
        ...

    async def healthy(self) -> bool:
        """One cheap question; never raises."""
        ...

    @property
    def contact(self) -> Contact:
        """Changes whenever another process may be listening at its address."""
        ...

    async def started(self) -> str | None:
        """When its process began, as it says; None where it does not. One cheap question; never raises."""
        ...

    async def load(self) -> EngineLoad | None:
        """How loaded it says it is; None where it does not tell. One cheap question; never raises."""
        ...

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Generation:
        """One completion. With `on_tokens` it is streamed; without, it is one plain call, which is cheaper.

        Each batch that `on_tokens` is told has passed every check that a whole reply must pass; together they are
        the generation's `token_ids`. A stream that breaks (cut, an error in it, nonsense) after the first token
        returns what had been told, with finish_reason "abort"; before it, it raises as a plain call does. Which
        weights sampled the tokens of a broken stream, only some engines can say.
        """
        ...

    async def abort(self, request_id: str) -> None: ...

    def hang_up(self, request_id: str) -> None:
        """Reads a streamed call no further: its `generate` ends at once as if the stream had broken there. For a
        call whose abort is not obeyed. An id that is not being streamed is ignored."""
        ...

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling,
        tools: Sequence[Mapping[str, Json]] = (),
        session_id: str = "",
    ) -> ChatReply:
        """Text in, text out: what `openai` engines and judges are for. vLLM and SGLang have it too."""
        ...

    async def tokenize(self, text: str) -> Sequence[int] | None:
        """The engine's own tokens of a text, or None where it cannot say."""
        ...

    async def close(self) -> None: ...


class Session(Protocol):
    """One rollout's hold on the engines of a policy: sticky, counted, released on every way out.

    `generate` hides what a rollout need not know: waiting while the policy is paused or no engine is up (its
    clock stands still then), another engine after a failure, and going on from the tokens that an aborted or
    timed-out call had already given. Those are kept, never sampled again.
    """

    @property
    def id(self) -> str: ...

    @property
    def engine(self) -> Engine:
        """The engine it sticks to now."""
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
        """One completion, its `versions` covering every token. When `clock` runs out the call is aborted, what
        was sampled goes to `salvage`, and DeadlineExpired is raised. An EngineFailure after something had been
        sampled hands that to `salvage` too: it is what the attempt lost.

        With `on_tokens` the calls are streamed. It is told every token once, however many calls it takes.

        When `stop` is done (its reader went away), what was sampled so far, perhaps nothing, is returned with
        finish_reason "abort". `resume` is such a part of the same completion: the completion begins with it,
        `on_tokens` is told it first, and it counts against `max_tokens`.
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
    ) -> ChatReply: ...

    async def close(self) -> None: ...
