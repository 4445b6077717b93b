"""SGLang: token ids in, token ids out, by `/generate`.

SGLang reports one weight version per generation, the one at its end. If the weights change during the generation, that
version is wrong for the earlier tokens. So `reports_versions` is False, and the router cuts a running call before a
change.

The probe finds out whether `sampling_seed`, which older versions lack, is supported. Some versions omit `output_ids`;
the ids are then read from the logprobs.

In a stream, each event contains all tokens so far, or (with `--incremental-streaming-output`) only the new ones, and
older versions mix the two. `completion_tokens` counts all tokens in either case, so the length of a list shows which it
is: the number of new tokens, or of all tokens. Any other length is an error. Some versions end an aborted stream with
an event of such another length; the event's tokens are then ignored.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rollyard.core import Sampling
from rollyard.core.failure import EngineBroken, EngineFailure, EngineRefused, EngineUnavailable
from rollyard.engines.base import EngineInfo, EngineSpec, GenerateRequest, Generation, Top
from rollyard.engines.clients import replies
from rollyard.engines.clients.control import SglangControl
from rollyard.engines.clients.http import HttpPool
from rollyard.engines.clients.logprob_probe import TOP, logprob_semantics
from rollyard.engines.clients.remote import (
    NO_LOGPROBS_NOTE,
    UNSTREAMED_NOTE,
    EngineRequest,
    RemoteEngine,
    StreamError,
    probe_request,
)
from rollyard.engines.clients.sampling_extra import allowed_extra
from rollyard.engines.clients.streaming import TokenStream
from rollyard.engines.clients.transport import MAX_DETAIL

T = TypeVar("T")


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


_Logprob = tuple[float | None, int, str | None]


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: str | None = None
    output_token_logprobs: list[_Logprob] | None = None
    output_top_logprobs: list[list[_Logprob] | None] | None = None


class _Reply(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None


class _Event(msgspec.Struct):
    meta_info: _Meta | None = None
    output_ids: list[int] | None = None
    error: StreamError | None = None


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _ServerInfo(msgspec.Struct):
    version: str = ""


class SglangEngine(RemoteEngine):
    """The client of one SGLang server."""

    _takes_seed = True

    def __init__(self, spec: EngineSpec, http: HttpPool) -> None:
        super().__init__(spec, http)
        self.control = SglangControl(self._wire)

    async def probe(self) -> EngineInfo:
        card = await self._find_model()
        notes: list[str] = []
        request = probe_request(seed=1)
        self._takes_seed = True
        try:
            generation = await self._generate(request)
        except EngineRefused:
            self._takes_seed = False
            notes.append("it takes no sampling_seed: sampling is not repeatable")
            generation = await self._generate(request)
        if generation.logprobs is None:
            kind, more = "unknown", (NO_LOGPROBS_NOTE,)
        else:
            kind, more = await logprob_semantics(self._top_logprobs)
        if not await self._can_stream():
            notes.append(UNSTREAMED_NOTE)
        self._info = EngineInfo(
            model=card.id,
            max_context=card.max_model_len,
            logprobs_kind=kind,
            api="generate",
            version=await self._version(),
            tokenizer=await self._readable(card.root or card.id),
            model_source=card.root or "",
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
        reply = self._wire.read(await self._ask(request, top=request.top_logprobs), _Reply, "a generation")
        try:
            return replies.check_length(self._read(reply, request.top_logprobs), request.max_tokens)
        except ValueError as error:
            raise self._wire.broken(str(error)) from None

    def _question(self, request: GenerateRequest, *, top: int, stream: bool) -> EngineRequest:
        sampling = request.sampling
        params: dict[str, Any] = {
            **allowed_extra(sampling, self.spec),
            "max_new_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
        if request.stop_token_ids:
            params["stop_token_ids"] = list(request.stop_token_ids)
        if request.stop:
            params["stop"] = list(request.stop)
        if request.seed is not None and self._takes_seed:
            params["sampling_seed"] = request.seed
        body: dict[str, Any] = {
            "rid": request.request_id,
            "input_ids": list(request.prompt_ids),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": stream,
        }
        if top:
            body["top_logprobs_num"] = top
        if request.cache_salt:
            body["extra_key"] = request.cache_salt
        if request.priority:
            body["priority"] = request.priority  # SGLang: higher is earlier, as in Rollyard
        return EngineRequest("/generate", body)

    def _read(self, reply: _Reply, top: int) -> Generation:
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
        return Generation(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=replies.finish_of(meta.finish_reason.type),
            versions=()
            if meta.weight_version is None
            else replies.spans_of([(meta.weight_version, 0, len(ids))], len(ids)),
            prompt_tokens=meta.prompt_tokens,
            cached_tokens=meta.cached_tokens,
            tops=_tops(meta.output_top_logprobs, top),
        )

    def _take(self, stream: TokenStream, raw: bytes) -> Sequence[int]:
        event = self._wire.read(raw, _Event, "an event of a stream")
        if event.error is not None:
            raise self._stream_failure(event.error)
        meta = event.meta_info
        if meta is None:
            raise ValueError("an event of a stream has no meta_info")
        finish = meta.finish_reason
        if finish is not None:
            self._check_finish(finish, len(stream.token_ids) + len(event.output_ids or ()))
        stream.prompt_tokens = meta.prompt_tokens or stream.prompt_tokens
        stream.cached_tokens = meta.cached_tokens
        try:
            ids, entries = _new(event.output_ids, meta, stream.token_ids)
        except ValueError:
            if finish is None or finish.type != "abort":
                raise
            ids, entries = [], []
        tops = meta.output_top_logprobs
        if tops is not None and meta.completion_tokens is not None:  # there may be more; `_new_items` explains it
            tops = tops[: meta.completion_tokens]
        return stream.take(
            ids,
            None if entries is None else [entry[0] for entry in entries],
            None if entries is None else [entry[1] for entry in entries],
            finish=None if finish is None else finish.type,
            version=meta.weight_version,
            tops=None if tops is None else _tops(tops[-len(ids) :] if ids else (), stream.top),
        )

    def _check_finish(self, finish: _Finish, token_count: int) -> None:
        """Raises for a refused or failed call: SGLang reports it as "abort" with a status."""
        if finish.type != "abort" or finish.status_code is None or token_count:
            return
        raise self._wire.refusal(finish.status_code, (finish.message or "aborted")[:MAX_DETAIL])

    async def _abort(self, request_ids: Sequence[str]) -> None:
        failure: EngineFailure | None = None
        for request_id in request_ids:  # the API takes one id per call; a failure does not stop the others
            try:
                await self._wire.post("/abort_request", {"rid": request_id})
            except EngineFailure as error:
                failure = error
        if failure is not None:
            raise failure

    async def _top_logprobs(self, prompt: tuple[int, ...], sampling: Sampling) -> Mapping[int, float]:
        raw = await self._ask(probe_request(prompt, sampling), top=TOP)
        tops = self._wire.read(raw, _Reply, "a generation").meta_info.output_top_logprobs
        first = tops[0] if tops else None
        return {token: value for value, token, _ in first or () if value is not None}

    async def _version(self) -> str:
        try:
            return self._wire.read(await self._wire.get("/get_server_info"), _ServerInfo, "/get_server_info").version
        except (EngineRefused, EngineUnavailable, EngineBroken):
            return ""  # the version is informational


def _tops(columns: Sequence[Sequence[_Logprob] | None] | None, most: int) -> tuple[Top, ...] | None:
    """The most likely tokens at each position, if they were requested and all positions have them."""
    if not most or columns is None or None in columns:
        return None
    return tuple(replies.top_of(((token, value) for value, token, _ in entries or ()), most) for entries in columns)


def _new(
    output_ids: Sequence[int] | None, meta: _Meta, known: array[int]
) -> tuple[Sequence[int], Sequence[_Logprob] | None]:
    """The new ids and logprobs of an event, which may list all or only the new ones."""
    if meta.completion_tokens is None:
        raise ValueError("an event of a stream has no completion_tokens")
    at, total = len(known), meta.completion_tokens
    entries = meta.output_token_logprobs
    new_entries = None if entries is None else _new_items(entries, at, total, "output_token_logprobs")
    if output_ids is None:
        if new_entries is None:
            raise ValueError("an event of a stream has neither output_ids nor output_token_logprobs")
        return [entry[1] for entry in new_entries], new_entries
    new_ids = _new_items(output_ids, at, total, "output_ids")
    if new_ids is not output_ids and replies.ids_of(output_ids[:at]) != known:
        raise ValueError("a stream changed tokens that it had already sent")
    return new_ids, new_entries


def _new_items(column: Sequence[T], at: int, total: int, name: str) -> Sequence[T]:
    if len(column) == total - at:
        return column
    if len(column) >= total >= at:  # more: sampled while the event was written; the next event repeats them
        return column[at:total]
    raise ValueError(f"{name} has {len(column)} entries where {total - at} of {total} are new")
