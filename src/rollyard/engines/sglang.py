"""SGLang: token ids in, token ids out, by `/generate`.

It tells one weight version per generation, the one at its end. When weights change in between, that is not true of
the tokens before, so `reports_versions` is False and the router cuts a running call before a change.

What older versions lack is found by asking when the engine is probed: `sampling_seed`. Some versions leave out
`output_ids`; the ids then come from the logprobs, which carry them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollyard.core import Sampling
from rollyard.core.failure import EngineBroken, EngineRefused, EngineUnavailable
from rollyard.engines import replies
from rollyard.engines.base import EngineInfo, GenerateRequest, Generation, VersionSpan
from rollyard.engines.probe import TOP, logprob_semantics
from rollyard.engines.remote import RemoteEngine
from rollyard.engines.wire import MAX_DETAIL, session_headers


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


_Logprob = tuple[float | None, int, str | None]


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    weight_version: str | None = None
    output_token_logprobs: list[_Logprob] | None = None
    output_top_logprobs: list[list[_Logprob] | None] | None = None


class _Reply(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _ServerInfo(msgspec.Struct):
    version: str = ""


class SglangEngine(RemoteEngine):
    """See the module."""

    _takes_seed = True

    async def probe(self) -> EngineInfo:
        card = await self._find_model()
        notes: list[str] = []
        request = GenerateRequest("probe", (1, 2, 3), Sampling(), max_tokens=1, seed=1)
        self._takes_seed = True
        try:
            found = await self._generate(request)
        except EngineRefused:
            self._takes_seed = False
            notes.append("it takes no sampling_seed: sampling is not repeatable")
            found = await self._generate(request)
        if found.logprobs is None:
            kind, more = "unknown", ("it gives no logprobs: its trajectories are not trainable",)
        else:
            kind, more = await logprob_semantics(self._top_logprobs)
        self._info = EngineInfo(
            model=card.id,
            max_context=card.max_model_len,
            logprobs_kind=kind,
            api="generate",
            version=await self._version(),
            tokenizer=await self._readable(card.root or card.id),
            notes=(*notes, *more),
        )
        return self._info

    async def tokenize(self, text: str) -> Sequence[int] | None:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            return self._wire.read(await self._wire.post("/tokenize", body), _Tokens, "/tokenize").tokens
        except EngineRefused:
            return None

    async def _generate(self, request: GenerateRequest) -> Generation:
        reply = self._wire.read(await self._ask(request, top=0), _Reply, "a generation")
        try:
            return replies.check_length(self._read(reply), request.max_tokens)
        except ValueError as error:
            raise self._wire.broken(str(error)) from None

    async def _ask(self, request: GenerateRequest, *, top: int) -> bytes:
        sampling = request.sampling
        params: dict[str, Any] = {
            **sampling.extra,  # first: it cannot undo what is ours to say
            "max_new_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
        if request.stop_token_ids:
            params["stop_token_ids"] = list(request.stop_token_ids)
        if request.seed is not None and self._takes_seed:
            params["sampling_seed"] = request.seed
        body: dict[str, Any] = {
            "rid": request.request_id,
            "input_ids": list(request.prompt_ids),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        if top:
            body["top_logprobs_num"] = top
        if request.cache_salt:
            body["extra_key"] = request.cache_salt
        if request.priority:
            body["priority"] = request.priority  # SGLang: the higher the earlier, as with us
        return await self._wire.post("/generate", body, session_headers(request.session_id, request.request_id))

    def _read(self, reply: _Reply) -> Generation:
        meta = reply.meta_info
        if meta.finish_reason is None:
            raise ValueError("a generation has no finish_reason")
        entries = meta.output_token_logprobs
        listed = None if entries is None else [entry[1] for entry in entries]
        values = reply.output_ids if reply.output_ids is not None else listed
        if values is None:
            raise ValueError("a generation has neither output_ids nor output_token_logprobs")
        self._check_finish(meta.finish_reason, len(values))
        ids = replies.ids_of(values)
        logprobs = None
        if entries is not None and listed is not None:
            logprobs = replies.logprobs_of([entry[0] for entry in entries], len(ids))
            replies.check_logprob_ids(values, listed)
        version = replies.version_of(meta.weight_version or "")
        return Generation(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=replies.finish_of(meta.finish_reason.type),
            versions=() if version is None or not ids else (VersionSpan(version, 0, len(ids)),),
            prompt_tokens=meta.prompt_tokens,
            cached_tokens=meta.cached_tokens,
        )

    def _check_finish(self, finish: _Finish, token_count: int) -> None:
        """SGLang also says "abort" for what it refuses or fails, with a status beside it."""
        if finish.type != "abort" or finish.status_code is None or token_count:
            return
        raise self._wire.refusal(finish.status_code, (finish.message or "aborted")[:MAX_DETAIL])

    async def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:  # its API takes one id a call
            await self._wire.post("/abort_request", {"rid": request_id})

    async def _top_logprobs(self, prompt: tuple[int, ...], sampling: Sampling) -> Mapping[int, float]:
        raw = await self._ask(GenerateRequest("probe", prompt, sampling, max_tokens=1), top=TOP)
        tops = self._wire.read(raw, _Reply, "a generation").meta_info.output_top_logprobs
        first = tops[0] if tops else None
        return {token: value for value, token, _ in first or () if value is not None}

    async def _version(self) -> str:
        try:
            return self._wire.read(await self._wire.get("/get_server_info"), _ServerInfo, "/get_server_info").version
        except (EngineRefused, EngineUnavailable, EngineBroken):
            return ""  # only for people to read
