"""The base class of engines behind a URL: transport, model list, chat, health, and freeing cancelled calls.

Invariant: a `generate` that is cancelled, or leaves a stream before its end, frees the engine. The request's id is
passed to one task that the engine owns, which aborts all collected ids in one call, bounded in time; `close` waits for
it. Closing the connection is not enough, because some engines do not notice it.

`_stream` reads a stream to its end into a `streaming.TokenStream`; a subclass only interprets one event.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from rollyard.core import Json, Message, Sampling, new_id
from rollyard.core.engine import TOKENIZER_PATH
from rollyard.core.failure import EngineBroken, EngineFailure, EngineRefused, EngineTimeout
from rollyard.engines.base import (
    ChatReply,
    Contact,
    Control,
    EngineInfo,
    EngineLoad,
    EngineSpec,
    GenerateRequest,
    Generation,
    OnTokens,
)
from rollyard.engines.clients.control import NoControl
from rollyard.engines.clients.http import DRAIN_S, HttpPool
from rollyard.engines.clients.load import read_load, read_started
from rollyard.engines.clients.sampling_extra import allowed_extra
from rollyard.engines.clients.streaming import TokenStream
from rollyard.engines.clients.transport import MAX_DETAIL, EngineTransport, session_headers

log = logging.getLogger("rollyard.engines")

FREE_S = 5.0  # to abort cancelled calls at an engine
HEALTH_S = 5.0


NOT_AN_ENGINE = "Give the URL of an engine's API without a path, such as http://gpu1:8000."

NO_LOGPROBS_NOTE = (
    "it returns no logprobs, so its trajectories are not trainable; for training, add a vLLM or SGLang server that"
    " returns them"
)
UNSTREAMED_NOTE = "it does not stream: tokens come all at once, at the end"


class EngineRequest(NamedTuple):
    """A request in the format of an engine."""

    path: str
    body: Mapping[str, Any]


class StreamError(msgspec.Struct):
    """The error event of vLLM and SGLang in a stream that fails."""

    message: str = ""
    code: int | str | None = None


class ModelCard(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ChatChoice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: str | None = None


class _ChatAnswer(msgspec.Struct):
    choices: list[_ChatChoice]
    usage: _Usage | None = None


def probe_request(
    prompt: tuple[int, ...] = (1, 2, 3), sampling: Sampling | None = None, *, seed: int | None = None, priority: int = 0
) -> GenerateRequest:
    """One token, for a probe. Its id is new: nodes probe at the same time, and SGLang refuses an id that is in use."""
    return GenerateRequest(new_id("probe"), prompt, sampling or Sampling(), max_tokens=1, seed=seed, priority=priority)


class RemoteEngine(ABC):
    """An engine behind a URL. Each kind of engine is a subclass."""

    health_path = "/health"

    def __init__(self, spec: EngineSpec, http: HttpPool) -> None:
        self.spec = spec
        self._wire = EngineTransport(spec, http)
        self.control: Control = NoControl()
        self._info: EngineInfo | None = None
        self._model = spec.model
        self._is_streaming = True  # whether the engine can stream; set by the probe
        self._live: dict[str, asyncio.Timeout] = {}  # streams being read, each with the timeout that ends its reading
        self._to_free: list[str] = []
        self._freeing: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise RuntimeError(f"engine {self.spec.id} has not been probed")
        return self._info

    @abstractmethod
    async def probe(self) -> EngineInfo: ...

    async def healthy(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._wire.get(self.health_path)
        except (EngineFailure, TimeoutError):
            return False
        return True

    @property
    def contact(self) -> Contact:
        return self._wire.contact

    async def started(self) -> str | None:
        return await read_started(self._wire)

    async def load(self) -> EngineLoad | None:
        return await read_load(self._wire)

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Generation:
        """One completion, as in `base.Engine`. Cancelling it frees the engine."""
        try:
            if on_tokens is not None and self._is_streaming:
                return await self._stream(request, on_tokens)
            generation = await self._generate(request)
        except EngineFailure:
            raise
        except BaseException:
            self._free(request.request_id)
            raise
        if on_tokens is not None and generation.token_ids:
            on_tokens(generation.token_ids)
        return generation

    async def abort(self, request_id: str) -> None:
        await self._abort([request_id])

    def hang_up(self, request_id: str) -> None:
        reading = self._live.get(request_id)
        if reading is not None and not reading.expired():
            reading.reschedule(asyncio.get_running_loop().time())

    async def tokenize(self, text: str) -> Sequence[int] | None:
        return None

    async def tokenizer_file(self, name: str = "", most_bytes: int = 1 << 20) -> bytes | None:
        try:
            return await self._wire.get(f"{TOKENIZER_PATH}/{quote(name)}" if name else TOKENIZER_PATH, most_bytes)
        except EngineRefused:  # only Rollyard's own engines have this route
            return None

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling,
        tools: Sequence[Mapping[str, Json]] = (),
        session_id: str = "",
    ) -> ChatReply:
        body: dict[str, Any] = {
            **allowed_extra(sampling, self.spec, is_chat=True),
            "model": self._model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }
        if "max_completion_tokens" in body:  # some models accept only this one
            del body["max_tokens"]
        if tools:  # vLLM refuses an empty list
            body["tools"] = list(tools)
        raw = await self._wire.post("/v1/chat/completions", body, session_headers(session_id))
        answer = self._wire.read(raw, _ChatAnswer, "a chat reply")
        if not answer.choices:
            raise self._wire.broken("a chat reply has no choices")
        if len(answer.choices) > 1:
            raise EngineRefused(f"engine {self.spec.id} answered with {len(answer.choices)} choices instead of one")
        choice = answer.choices[0]
        usage = answer.usage or _Usage()
        message = {key: value for key, value in choice.message.items() if value is not None and value != []}
        message.setdefault("role", "assistant")
        return ChatReply(message, choice.finish_reason or "stop", usage.prompt_tokens, usage.completion_tokens)

    async def close(self) -> None:
        """Waits for the freeing of cancelled calls. The shared connections stay open: the router owns them."""
        if self._freeing is not None:
            await asyncio.wait({self._freeing})

    # --- for the subclasses

    @abstractmethod
    def _question(self, request: GenerateRequest, *, top: int, stream: bool) -> EngineRequest: ...

    @abstractmethod
    async def _generate(self, request: GenerateRequest) -> Generation: ...

    @abstractmethod
    def _take(self, stream: TokenStream, raw: bytes) -> Sequence[int]:
        """Adds one event to the stream and returns its new tokens. Raises ValueError if the event is invalid."""
        ...

    @abstractmethod
    async def _abort(self, request_ids: Sequence[str]) -> None: ...

    async def _ask(self, request: GenerateRequest, *, top: int) -> bytes:
        path, body = self._question(request, top=top, stream=False)
        return await self._wire.post(path, body, session_headers(request.session_id, request.request_id))

    async def _can_stream(self) -> bool:
        """Whether the engine streams, tried with one token. An older version, or a proxy in front of it, may not."""
        self._is_streaming = True
        try:
            await self._stream(probe_request(), lambda _: None)
        except (EngineRefused, EngineBroken):
            self._is_streaming = False
        return self._is_streaming

    def _stream_failure(self, error: StreamError) -> EngineFailure:
        """The failure for an error event. SGLang sends no status with it; its plain calls answer 400 in this case."""
        status = error.code if isinstance(error.code, int) else 400
        return self._wire.refusal(status, f"a stream failed: {error.message[:MAX_DETAIL]}")

    async def _find_model(self) -> ModelCard:
        """The model in use: the one that the spec names, otherwise the first that the engine lists."""
        try:
            cards = self._wire.read(await self._wire.get("/v1/models"), ModelList, "/v1/models").data
        except (EngineRefused, EngineBroken) as error:
            is_key = error.data.get("status") in (401, 403)
            error.remedy = "Give the engine's key with --api-key." if is_key else NOT_AN_ENGINE
            raise
        names = [card.id for card in cards]
        if not cards:
            raise EngineRefused(f"engine {self.spec.id} serves no model", remedy="Start it with a model.")
        model = self.spec.model or names[0]
        if model not in names:
            has = f"engine {self.spec.id} does not serve {model!r}; it has {', '.join(names)}"
            raise EngineRefused(has, remedy="Name one of these with --model.")
        self._model = model
        return cards[names.index(model)]

    async def _readable(self, folder: str | None) -> str:
        """The folder if it exists on this machine, otherwise "": a remote engine names paths of its own machine."""
        path = Path(folder or "", "tokenizer.json")
        return str(path.parent) if folder and await asyncio.to_thread(path.is_file) else ""

    # --- streaming

    async def _stream(self, request: GenerateRequest, on_tokens: OnTokens) -> Generation:
        stream = TokenStream(request)
        is_started = False

        def take(raw: bytes) -> None:
            nonlocal is_started
            is_started = True
            try:
                fresh = self._take(stream, raw)
            except ValueError as error:
                raise self._wire.broken(str(error)) from None
            if fresh:
                on_tokens(fresh)
            if stream.finish is not None:  # complete: do not wait for an engine that leaves the stream open
                reading.reschedule(asyncio.get_running_loop().time() + DRAIN_S)

        path, body = self._question(request, top=request.top_logprobs, stream=True)
        headers = session_headers(request.session_id, request.request_id)
        try:
            async with asyncio.timeout(None) as reading:  # `hang_up` makes it expire
                self._live[request.request_id] = reading
                try:
                    await self._wire.stream(path, body, headers, take)
                finally:
                    self._live.pop(request.request_id, None)
            if stream.finish is None:
                raise self._wire.broken("a stream ended without a finish_reason")
        except (EngineFailure, TimeoutError) as error:
            if stream.finish is not None:
                return stream.generation()  # it was already complete
            is_hung_up = isinstance(error, TimeoutError)
            if is_started or is_hung_up:
                self._free(request.request_id)
            if not stream.token_ids:
                raise EngineTimeout(f"engine {self.spec.id} streamed nothing") if is_hung_up else error from None
            log.log(
                logging.INFO if is_hung_up else logging.WARNING,
                "a stream broke off; its tokens so far are kept",
                extra={"engine": self.spec.id, "tokens": len(stream.token_ids), "error": str(error)},
            )
        return stream.generation()

    # --- freeing

    def _free(self, request_id: str) -> None:
        self._to_free.append(request_id)
        if self._freeing is None or self._freeing.done():
            self._freeing = asyncio.create_task(self._free_all(), name=f"free {self.spec.id}")

    async def _free_all(self) -> None:
        while self._to_free:
            ids, self._to_free = self._to_free, []
            try:
                async with asyncio.timeout(FREE_S):
                    await self._abort(ids)
            except (EngineFailure, TimeoutError) as error:
                log.warning(
                    "cancelled calls may still run on the engine",
                    extra={"engine": self.spec.id, "calls": len(ids), "error": str(error)},
                )
