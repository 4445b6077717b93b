"""The reference system's own engine protocol: `POST {url}/generate {prompt_ids, …}` → `{response_ids, logprobs}`.

That system's trainer serves it from its vLLM. Replies contain very little, with these consequences:

- Nothing is streamed and nothing can be aborted: an abandoned call continues on the engine, and its sampled tokens are
  lost. A pause or a removal waits for the calls of such an engine as long as for an engine that ignores an abort.
- A generation has no weight version; its tokens get the version that the policy had when the call started.
- A generation has no finish_reason: a reply that ends with a stop token stopped, one of full length was cut, an empty
  one was aborted, and any other is assumed to have stopped.
- The model, the context length and the meaning of the logprobs ("unknown") are not reported. The tokenizer, and the
  renderer if needed, must be named when the engine is added; a task's `limits.max_context` bounds its prompts.

`kind_at` distinguishes such an engine from a vLLM or an SGLang at the same address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NoReturn

import msgspec

from rollyard.core.failure import EngineFailure, EngineRefused
from rollyard.engines.base import EngineInfo, EngineSpec, GenerateRequest, Generation, Kind
from rollyard.engines.clients import replies
from rollyard.engines.clients.http import HttpPool
from rollyard.engines.clients.remote import (
    HEALTH_S,
    NO_LOGPROBS_NOTE,
    UNSTREAMED_NOTE,
    EngineRequest,
    RemoteEngine,
    probe_request,
)
from rollyard.engines.clients.sampling_extra import allowed_extra
from rollyard.engines.clients.streaming import TokenStream
from rollyard.engines.clients.transport import EngineTransport

NOTES = (
    UNSTREAMED_NOTE,
    "it cannot abort a call or report which weights sampled a token",
    "the meaning of its logprobs cannot be determined: its vLLM should run with processed_logprobs",
)


class _Reply(msgspec.Struct):
    response_ids: list[int]
    logprobs: list[float | None] | None = None


class ProrlEngine(RemoteEngine):
    """The client of one such engine."""

    def __init__(self, spec: EngineSpec, http: HttpPool) -> None:
        super().__init__(spec, http)
        self._is_streaming = False

    async def probe(self) -> EngineInfo:
        """Samples one token: the protocol offers no other request."""
        generation = await self._generate(probe_request(seed=1))
        untrainable = () if generation.logprobs is not None else (NO_LOGPROBS_NOTE,)
        self._info = EngineInfo(
            model=self.spec.model or PurePath(self.spec.tokenizer).name or "unknown",
            max_context=None,
            logprobs_kind="unknown",
            api="generate",
            notes=(*NOTES, *untrainable),
        )
        return self._info

    async def healthy(self) -> bool:
        """The protocol has no health path: any reply, most likely a 404, counts as healthy."""
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._wire.get(self.health_path)
        except (EngineFailure, TimeoutError) as error:
            return isinstance(error, EngineRefused)
        return True

    def _question(self, request: GenerateRequest, *, top: int, stream: bool) -> EngineRequest:
        sampling = request.sampling
        body: dict[str, Any] = {
            **allowed_extra(sampling, self.spec),
            "prompt_ids": list(request.prompt_ids),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": request.max_tokens,
            "seed": request.seed,
        }
        if sampling.top_k > 0:
            body["top_k"] = sampling.top_k
        if request.stop_token_ids:
            body["stop_token_ids"] = list(request.stop_token_ids)
        return EngineRequest("/generate", body)

    async def _generate(self, request: GenerateRequest) -> Generation:
        reply = self._wire.read(await self._ask(request, top=0), _Reply, "a generation")
        try:
            ids = replies.ids_of(reply.response_ids)
            generation = Generation(
                token_ids=ids,
                logprobs=replies.logprobs_of(reply.logprobs, len(ids)),
                finish_reason=_finish(ids, request),
                prompt_tokens=len(request.prompt_ids),
            )
            return replies.check_length(generation, request.max_tokens)
        except ValueError as error:
            raise self._wire.broken(str(error)) from None

    def _take(self, stream: TokenStream, raw: bytes) -> NoReturn:
        raise RuntimeError("this protocol has no streams")

    async def _abort(self, request_ids: Sequence[str]) -> None:
        """Does nothing: the protocol has no abort."""


def _finish(ids: Sequence[int], request: GenerateRequest) -> replies.FinishReason:
    if not ids:
        return "abort"
    if ids[-1] in request.stop_token_ids or len(ids) < request.max_tokens:
        return "stop"
    return "length"


async def kind_at(url: str, http: HttpPool) -> Kind:
    """The kind of engine at an address. vLLM and SGLang list their models; this protocol's servers have only /generate.

    Raises EngineUnavailable if nothing answers."""
    wire = EngineTransport(EngineSpec("at this address", url, Kind.PRORL), http)
    try:
        await wire.get("/v1/models")
    except EngineRefused:
        return Kind.PRORL
    try:
        await wire.get("/get_server_info")
    except EngineFailure:
        return Kind.VLLM
    return Kind.SGLANG
