"""What every engine behind a URL shares: its wire, its model list, chat, health, and freeing cancelled calls.

Invariant: a `generate` that is cancelled frees the engine. The request's id is handed to one task that the engine
owns, which aborts whatever ids have gathered in one call, bounded in time; `close` waits for it. Nothing is left
to the closing of the connection alone, which some engines do not notice.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rollyard.core import Json, Message, Sampling
from rollyard.core.failure import EngineFailure, EngineRefused
from rollyard.engines.base import ChatReply, EngineInfo, EngineSpec, GenerateRequest, Generation
from rollyard.engines.wire import Wire, session_headers

log = logging.getLogger("rollyard.engines")

FREE_S = 5.0  # for telling an engine that cancelled calls are no longer wanted
HEALTH_S = 5.0


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


class RemoteEngine(ABC):
    """See the module. The three kinds of engines are its subclasses."""

    health_path = "/health"

    def __init__(self, spec: EngineSpec, http: aiohttp.ClientSession) -> None:
        self.spec = spec
        self._wire = Wire(spec, http)
        self._info: EngineInfo | None = None
        self._model = spec.model
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

    async def generate(self, request: GenerateRequest) -> Generation:
        """One completion; see the door. Cancelling it frees the engine."""
        try:
            return await self._generate(request)
        except asyncio.CancelledError:
            self._free(request.request_id)
            raise

    async def abort(self, request_id: str) -> None:
        await self._abort([request_id])

    async def tokenize(self, text: str) -> Sequence[int] | None:
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
            "model": self._model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            **sampling.extra,
        }
        if tools:  # vLLM refuses an empty list
            body["tools"] = list(tools)
        raw = await self._wire.post("/v1/chat/completions", body, session_headers(session_id))
        answer = self._wire.read(raw, _ChatAnswer, "a chat reply")
        if not answer.choices:
            raise self._wire.broken("a chat reply has no choices")
        choice = answer.choices[0]
        usage = answer.usage or _Usage()
        message = {key: value for key, value in choice.message.items() if value is not None and value != []}
        message.setdefault("role", "assistant")
        return ChatReply(message, choice.finish_reason or "stop", usage.prompt_tokens, usage.completion_tokens)

    async def close(self) -> None:
        """Ends what it owns. The shared session stays open: it is the router's."""
        if self._freeing is not None:
            await asyncio.wait({self._freeing})

    # --- for the subclasses

    @abstractmethod
    async def _generate(self, request: GenerateRequest) -> Generation: ...

    @abstractmethod
    async def _abort(self, request_ids: Sequence[str]) -> None: ...

    async def _find_model(self) -> ModelCard:
        """The model in use: the one that the spec names, else the first that the engine lists."""
        cards = self._wire.read(await self._wire.get("/v1/models"), ModelList, "/v1/models").data
        names = [card.id for card in cards]
        if not cards:
            raise EngineRefused(f"engine {self.spec.id} serves no model")
        wanted = self.spec.model or names[0]
        if wanted not in names:
            raise EngineRefused(f"engine {self.spec.id} does not serve {wanted!r}; it has {', '.join(names)}")
        self._model = wanted
        return cards[names.index(wanted)]

    async def _readable(self, folder: str | None) -> str:
        """The folder, if it is one on this machine; an engine elsewhere names paths that mean nothing here."""
        path = Path(folder or "", "tokenizer.json")
        return str(path.parent) if folder and await asyncio.to_thread(path.is_file) else ""

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
