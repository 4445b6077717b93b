"""vLLM: token ids in, token ids out, by `/inference/v1/generate`, or by `/v1/completions` where that is disabled.

The probe finds out which one works: without `--enable-scale-out` the first answers 403 (404 in older versions). The
second accepts token ids and returns them with `return_token_ids`, but reports no weight versions.

Checked against vLLM 0.32.0: a generation aborted by id returns at once, with finish_reason "abort" and the tokens and
logprobs sampled so far. Its id is `generate-tokens-ID` on the first API and `cmpl-ID-0` on the second. vLLM ignores
unknown ids, so an abort that overtakes its request is lost and the caller has to repeat it. Up to 0.28 the logprobs
name their tokens "token_id:N"; both formats are read.

In a stream, each event of either API contains only new tokens. The finish_reason comes with the last tokens (alone when
aborted), the weight versions of all tokens come with it and not before, and usage comes in a separate event. So a
stream that breaks off has no weight versions, and the router treats a streamed call as one without them.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from rollyard.core import Sampling
from rollyard.core.failure import EngineRefused
from rollyard.engines.base import EngineInfo, EngineSpec, GenerateRequest, Generation
from rollyard.engines.clients import replies
from rollyard.engines.clients.control import UNCONTROLLED_NOTE, VllmControl
from rollyard.engines.clients.http import HttpPool
from rollyard.engines.clients.logprob_probe import TOP, logprob_semantics
from rollyard.engines.clients.remote import (
    NO_LOGPROBS_NOTE,
    UNSTREAMED_NOTE,
    EngineRequest,
    RemoteEngine,
    probe_request,
)
from rollyard.engines.clients.sampling_extra import allowed_extra
from rollyard.engines.clients.streaming import TokenStream
from rollyard.engines.clients.vllm_bodies import (
    CompletionChoice,
    CompletionEvent,
    CompletionReply,
    Event,
    Reply,
    Tokens,
    ToppedEvent,
    Version,
    cached,
    column_tops_of,
    only,
    token_of,
    tops_of,
)

GENERATE = "inference/v1/generate"
COMPLETIONS = "v1/completions"
TOPLESS_NOTE = f"the meaning of its logprobs is unknown; start vLLM with --max-logprobs {TOP} or more"

NO_TOKEN_IDS = (
    "this is an older vLLM, or another engine: its kind is sglang for SGLang, openai for a chat endpoint (--kind)"
)


class VllmEngine(RemoteEngine):
    """The client of one vLLM server."""

    _api = GENERATE
    _takes_priority = True

    def __init__(self, spec: EngineSpec, http: HttpPool) -> None:
        super().__init__(spec, http)
        self.control = VllmControl(self._wire)

    async def probe(self) -> EngineInfo:
        card = await self._find_model()
        notes: list[str] = []
        first = probe_request()
        self._api = GENERATE
        try:
            generation = await self._generate(first)
        except EngineRefused as error:
            if error.data.get("status") not in (403, 404):
                raise
            notes.append(f"{GENERATE} is disabled (start vLLM with --enable-scale-out); {COMPLETIONS} is used")
            self._api = COMPLETIONS
            generation = await self._first_completion(first)
        if generation.logprobs is None:
            kind, more = "unknown", (NO_LOGPROBS_NOTE,)
        else:
            try:
                kind, more = await logprob_semantics(self._top_logprobs)
            except EngineRefused as error:
                kind, more = "unknown", (f"{TOPLESS_NOTE} ({error.detail})",)
        if not await self._can_stream():
            notes.append(UNSTREAMED_NOTE)
        if not await self._accepts_priority():
            notes.append("it does not schedule by priority")
        if not await VllmControl(self._wire).exists():
            notes.append(UNCONTROLLED_NOTE.format(how="start vLLM with VLLM_SERVER_DEV_MODE=1"))
        self._info = EngineInfo(
            model=card.id,
            max_context=card.max_model_len,
            logprobs_kind=kind,
            api=self._api,
            version=await self._version(),
            tokenizer=await self._readable(card.root),
            model_source=card.root or "",
            reports_versions=self._api == GENERATE and await self._reports_versions(),
            notes=(*notes, *more),
        )
        return self._info

    async def _first_completion(self, request: GenerateRequest) -> Generation:
        try:
            return await self._generate(request)
        except EngineRefused as error:
            if error.data.get("status") != 404:
                raise
            raise error.with_detail(f"{error.detail}: {NO_TOKEN_IDS}") from None

    async def tokenize(self, text: str) -> Sequence[int] | None:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            return self._wire.read(await self._wire.post("/tokenize", body), Tokens, "/tokenize").tokens
        except EngineRefused:
            return None

    # --- one generation

    async def _generate(self, request: GenerateRequest) -> Generation:
        top = request.top_logprobs
        raw = await self._ask(request, top=top)
        try:
            generation = self._read_generate(raw, top) if self._api == GENERATE else self._read_completion(raw, top)
            return replies.check_length(generation, request.max_tokens)
        except ValueError as error:
            raise self._wire.broken(str(error)) from None

    def _question(self, request: GenerateRequest, *, top: int, stream: bool) -> EngineRequest:
        sampling = request.sampling
        params: dict[str, Any] = {
            **allowed_extra(sampling, self.spec),
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "logprobs": top,
        }
        if request.seed is not None:
            params["seed"] = request.seed
        if request.stop_token_ids:
            params["stop_token_ids"] = list(request.stop_token_ids)
        if request.stop:
            params["stop"] = list(request.stop)
        ids = list(request.prompt_ids)
        body: dict[str, Any] = {"model": self._model, "request_id": request.request_id}
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        if request.priority and self._takes_priority:
            body["priority"] = -request.priority  # vLLM: lower is earlier
        if self._api == GENERATE:
            body |= {"token_ids": ids, "sampling_params": params}
        else:
            body = {**params, **body, "prompt": ids, "return_token_ids": True, "return_tokens_as_token_ids": True}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return EngineRequest(f"/{self._api}", body)

    def _read_generate(self, raw: bytes, top: int) -> Generation:
        reply = self._wire.read(raw, Reply, "a generation")
        choice = only(reply.choices)
        ids = replies.ids_of(choice.token_ids)
        logprobs: array[float] | None = None
        if choice.logprobs is not None and choice.logprobs.content is not None:
            content = choice.logprobs.content
            logprobs = replies.logprobs_of([entry.logprob for entry in content], len(ids))
            replies.check_logprob_ids(choice.token_ids, [token_of(entry) for entry in content])
        spans = [(span.version, span.start, span.end) for span in choice.weight_versions or ()]
        columns: dict[str, bytes] = {}
        if choice.routed_experts is not None:
            columns["routed_experts"] = base64.b64decode(choice.routed_experts, validate=True)
        return Generation(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=replies.finish_of(choice.finish_reason),
            versions=replies.spans_of(spans, len(ids)),
            prompt_tokens=reply.usage.prompt_tokens if reply.usage else 0,
            cached_tokens=cached(reply.usage),
            columns=columns,
            tops=tops_of(choice.logprobs.content, top) if choice.logprobs else None,
        )

    def _read_completion(self, raw: bytes, top: int) -> Generation:
        reply = self._wire.read(raw, CompletionReply, "a completion")
        choice = only(reply.choices)
        if choice.token_ids is None:
            raise ValueError(f"{COMPLETIONS} returned no token_ids: {NO_TOKEN_IDS}")
        ids = replies.ids_of(choice.token_ids)
        values = choice.logprobs.token_logprobs if choice.logprobs else None
        return Generation(
            token_ids=ids,
            logprobs=replies.logprobs_of(values, len(ids)),
            finish_reason=replies.finish_of(choice.finish_reason),
            prompt_tokens=reply.usage.prompt_tokens if reply.usage else 0,
            cached_tokens=cached(reply.usage),
            tops=column_tops_of(choice.logprobs, top),
        )

    def _take(self, stream: TokenStream, raw: bytes) -> Sequence[int]:
        with_tops = ToppedEvent if stream.top else Event  # an Event skips decoding the top logprobs
        shape = with_tops if self._api == GENERATE else CompletionEvent
        event = self._wire.read(raw, shape, "an event of a stream")
        if event.error is not None:
            raise self._stream_failure(event.error)
        if event.usage is not None:
            stream.prompt_tokens = event.usage.prompt_tokens
            stream.cached_tokens = cached(event.usage)
        if not event.choices:
            return ()
        choice = only(event.choices)
        if choice.token_ids is None:
            raise ValueError("an event of a stream has no token_ids")
        if isinstance(choice, CompletionChoice):
            values = choice.logprobs.token_logprobs if choice.logprobs else None
            tops = column_tops_of(choice.logprobs, stream.top)
            return stream.take(choice.token_ids, values, finish=choice.finish_reason, tops=tops)
        content = choice.logprobs.content if choice.logprobs else None
        experts = choice.routed_experts
        return stream.take(
            choice.token_ids,
            None if content is None else [entry.logprob for entry in content],
            None if content is None else [token_of(entry) for entry in content],
            finish=choice.finish_reason,
            spans=[(span.version, span.start, span.end) for span in choice.weight_versions or ()],
            columns={} if experts is None else {"routed_experts": base64.b64decode(experts, validate=True)},
            tops=tops_of(content, stream.top) if stream.top else None,
        )

    async def _abort(self, request_ids: Sequence[str]) -> None:
        if self._api == GENERATE:
            paths, ids = (
                ("/inference/v1/abort_requests", "/abort_requests"),
                [f"generate-tokens-{i}" for i in request_ids],
            )
        else:
            paths, ids = ("/abort_requests", "/inference/v1/abort_requests"), [f"cmpl-{i}-0" for i in request_ids]
        for path in paths:  # /abort_requests needs VLLM_SERVER_DEV_MODE=1; an engine may have neither
            try:
                await self._wire.post(path, {"request_ids": ids})
                return
            except EngineRefused as error:
                if error.data.get("status") not in (403, 404, 405) or path == paths[-1]:
                    raise

    # --- used by the probe

    async def _top_logprobs(self, prompt: tuple[int, ...], sampling: Sampling) -> Mapping[int, float]:
        raw = await self._ask(probe_request(prompt, sampling), top=TOP)
        try:
            if self._api == GENERATE:
                content = only(self._wire.read(raw, Reply, "a generation").choices).logprobs
                entry = content.content[0] if content and content.content else None
                return {token_of(top): top.logprob for top in (entry.top_logprobs or ())} if entry else {}
            columns = only(self._wire.read(raw, CompletionReply, "a completion").choices).logprobs
            tops = columns.top_logprobs[0] if columns and columns.top_logprobs else None
            return {replies.placeholder_id(token): value for token, value in (tops or {}).items()}
        except ValueError as error:
            raise self._wire.broken(str(error)) from None

    async def _reports_versions(self) -> bool:
        raw = await self._ask(probe_request(), top=0)
        return only(self._wire.read(raw, Reply, "a generation").choices).weight_versions is not None

    async def _accepts_priority(self) -> bool:
        self._takes_priority = True
        try:
            await self._ask(probe_request(priority=1), top=0)
        except EngineRefused:
            self._takes_priority = False
        return self._takes_priority

    async def _version(self) -> str:
        try:
            return self._wire.read(await self._wire.get("/version"), Version, "/version").version
        except EngineRefused:
            return ""
