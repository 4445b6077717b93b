"""The reference system's own engine protocol: `POST {url}/generate {prompt_ids, …}` → `{response_ids, logprobs}`.

It is what that system's trainer serves from its vLLM, and it says very little. What follows from that:

- Nothing is streamed and nothing can be aborted: a call that nobody wants any more is left to the engine, which goes
  on with it, and what it had sampled by then is lost. A pause or a removal waits for the calls of such an engine as
  long as for one that does not obey.
- No weight version comes with a generation; its tokens have the version that the policy had when the call began.
- No finish_reason: a reply that ends with a stop token stopped, one of full length was cut, any other is believed to
  have stopped; an empty one was aborted.
- Nothing says which model it is, how long its context is, or what its logprobs mean ("unknown"). Tokenizer and, if need
  be, renderer must be named when it is added; a task's `limits.max_context` bounds its prompts.

`kind_at` tells such an engine from a vLLM or an SGLang at the same address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NoReturn

import msgspec

from rollyard.core import Sampling
from rollyard.core.failure import EngineFailure, EngineRefused
from rollyard.engines.base import EngineInfo, EngineSpec, GenerateRequest, Generation, Kind
from rollyard.engines.clients import replies
from rollyard.engines.clients.http import HttpPool
from rollyard.engines.clients.remote import HEALTH_S, UNSTREAMED_NOTE, EngineRequest, RemoteEngine
from rollyard.engines.clients.sampling_extra import allowed_extra
from rollyard.engines.clients.streaming import TokenStream
from rollyard.engines.clients.transport import EngineTransport

NOTES = (
    UNSTREAMED_NOTE,
    "it cannot abort a call, nor say which weights sampled a token",
    "what its logprobs mean cannot be found out: its vLLM should run with processed_logprobs",
)


class _Reply(msgspec.Struct):
    response_ids: list[int]
    logprobs: list[float | None] | None = None


class ProrlEngine(RemoteEngine):
    """See the module."""

    def __init__(self, spec: EngineSpec, http: HttpPool) -> None:
        super().__init__(spec, http)
        self._is_streaming = False

    async def probe(self) -> EngineInfo:
        """One token, which is all there is to ask for."""
        found = await self._generate(GenerateRequest("probe", (1, 2, 3), Sampling(), max_tokens=1, seed=1))
        untrainable = () if found.logprobs is not None else ("it gives no logprobs: it is not trainable",)
        self._info = EngineInfo(
            model=self.spec.model or PurePath(self.spec.tokenizer).name or "unknown",
            max_context=None,
            logprobs_kind="unknown",
            api="generate",
            notes=(*NOTES, *untrainable),
        )
        return self._info

    async def healthy(self) -> bool:
        """It has no path for it: any answer, a 404 most likely, is a sign of life."""
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
        """Nothing to do: see the module."""


def _finish(ids: Sequence[int], request: GenerateRequest) -> replies.FinishReason:
    if not ids:
        return "abort"
    if ids[-1] in request.stop_token_ids or len(ids) < request.max_tokens:
        return "stop"
    return "length"


async def kind_at(url: str, http: HttpPool) -> Kind:
    """What answers there. A vLLM and an SGLang list their models; this protocol's servers have nothing but /generate.

    EngineUnavailable if nothing answers at all."""
    wire = EngineTransport(EngineSpec("the one at this address", url, Kind.PRORL), http)
    try:
        await wire.get("/v1/models")
    except EngineRefused:
        return Kind.PRORL
    try:
        await wire.get("/get_server_info")
    except EngineFailure:
        return Kind.VLLM
    return Kind.SGLANG
