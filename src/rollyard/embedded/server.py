"""The HTTP server of the embedded engine: the routes of vLLM that Rollyard uses, and the engine's start and stop.

    async with Engine.serve(model, tokenizer) as engine:      # in a trainer's process, sharing its weights
        ...                                                   # register engine.url with Rollyard
        with engine.weights(version=7):
            optimizer.step()

Weights change in one of three ways: in this process, under `weights`; by Rollyard's HTTP handshake (/pause, the trainer
writes, /update_weight_version, /reset_prefix_cache, /resume); or from a folder, with /update_weights_from_folder, which
vLLM does not have.

Invariants. The event loop never waits for the model: the worker's thread runs it and posts the sampled tokens. An abort
is answered immediately with the tokens reported so far, even while a step is running. /pause answers when no step is
running and none will start; calls that arrive during a pause wait.

There is no authentication: listen only where everyone may use the engine. The file is long because it is a whole
server: one short handler per path.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import orjson
from aiohttp import web

from rollyard.core.engine import TOKENIZER_PATH
from rollyard.core.version import __version__
from rollyard.embedded.batching import Batcher, Request, Settings
from rollyard.embedded.call_registry import PAUSE_MODES, CallRegistry
from rollyard.embedded.calls import Call
from rollyard.embedded.requests import (
    CHAT_FIELDS,
    GenerateBody,
    Params,
    Refused,
    TokenizeBody,
    make_request,
    read,
    read_params,
)
from rollyard.embedded.texts import Texts
from rollyard.tokens.files import list_files, paths_in

MAX_BODY_BYTES = 64 << 20
DONE = b"data: [DONE]\n\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Engine:
    """A running engine. Created by `serve`."""

    def __init__(self, batcher: Batcher, tokenizer: Any, *, name: str, root: str) -> None:
        self.name = name
        self.url = ""
        self._root = root
        self._model = batcher.model
        self._texts = Texts(tokenizer)
        self._batcher = batcher
        self._registry = CallRegistry(self._batcher)
        self._started_at = time.time()

    @classmethod
    @asynccontextmanager
    async def serve(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        name: str = "local",
        root: str = "",
        max_context: int | None = None,
        settings: Settings | None = None,
        adapter: Path | None = None,
    ) -> AsyncGenerator[Self, None]:
        """Serves a transformers model, sharing its weights (see `model.py`), or a model from `loading.load_model`.
        `root` is the folder of its tokenizer, which clients on this machine may read. An adapter is added to the
        model's weights in place. Raises Unsupported or ValueError if the model cannot be served with these options."""
        from rollyard.embedded.formats.checkpoint import Checkpoint
        from rollyard.embedded.transformer.llama import Llama
        from rollyard.embedded.transformer.model import Model

        def prepare() -> Batcher:
            if isinstance(model, Checkpoint):
                wrapped = Llama(model, max_context)
            else:
                wrapped = Model(model, max_context)
                wrapped.check()
            if adapter is not None:
                wrapped.write_weights(wrapped.read_weights(adapter))
            return Batcher(wrapped, settings or Settings())

        engine = cls(await asyncio.to_thread(prepare), tokenizer, name=name, root=root)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for method, path, handler in engine._routes():
            app.router.add_route(method, path, _guarded(handler))
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        engine._registry.worker.start()
        try:
            await web.TCPSite(runner, host, port, backlog=2048).start()
            place = f"[{host}]" if ":" in host else host
            engine.url = f"http://{place}:{runner.addresses[0][1]}"
            yield engine
        finally:
            engine._registry.abort()
            await runner.cleanup()
            await asyncio.to_thread(engine._registry.worker.stop)

    @contextmanager
    def weights(self, version: int | None = None) -> Generator[None, None, None]:
        """While it is held, nothing is sampled, and the thread that holds it may write the weights in place. See
        `Worker.weights`. Open calls continue afterwards with the new weights."""
        with self._registry.worker.weights(None if version is None else str(version)):
            yield

    # --- generating

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body: GenerateBody = read(await request.read(), GenerateBody, "the request")
        self._check_model(body.model)
        params = read_params(body.sampling_params)
        session = request.headers.get("X-Session-ID", "")
        engine_request = self._request(body.token_ids, params, body.cache_salt or "", session, body.priority)
        known_as = f"generate-tokens-{request.headers.get('X-Request-Id') or body.request_id}"
        call = Call(known_as, engine_request, has_logprobs=params.logprobs is not None)
        head = {"request_id": known_as, "model": self.name}
        self._registry.start(call)
        try:
            if body.stream:
                has_usage = body.stream_options is not None and body.stream_options.include_usage
                return await self._stream(request, call, head, has_usage)
            await call.over()
            if call.error:
                raise Refused(call.error, 500)
            return _json({**head, "choices": [call.choice()], "usage": call.usage()})
        finally:
            self._registry.end(call)

    async def _stream(
        self, request: web.Request, call: Call, head: Mapping[str, Any], has_usage: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        while True:
            await call.news()
            is_over, count = call.is_over, len(call.drawn)
            if call.error:
                error = {"error": {"message": call.error, "type": "InternalServerError", "code": 500}}
                await response.write(_event(error) + DONE)
                return response
            if count > sent or is_over:
                event = _event({**head, "choices": [call.choice(sent)]})
                sent = count
                if is_over:
                    event += _event({**head, "choices": [], "usage": call.usage()}) if has_usage else b""
                    event += DONE
                await response.write(event)
            if is_over:
                return response

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        """Answers with the whole text, tool calls included: a client that parses them generates tokens instead."""
        body: dict[str, Any] = read(await request.read(), dict[str, Any], "the request")
        self._check_model(body.get("model"))
        if body.get("stream"):
            raise Refused("chat is not streamed here: generate tokens, or request the whole answer")
        params = read_params({"max_tokens": None} | {k: v for k, v in body.items() if k not in CHAT_FIELDS})
        prompt = await asyncio.to_thread(
            self._texts.render, body.get("messages"), body.get("tools"), body.get("chat_template_kwargs")
        )
        engine_request = self._request(prompt, params, "", request.headers.get("X-Session-ID", ""), 0)
        call = Call("chat", engine_request, has_logprobs=False)
        self._registry.start(call)
        try:
            await call.over()
            if call.error:
                raise Refused(call.error, 500)
        finally:
            self._registry.end(call)
        ids = [one.token for one in call.drawn]
        text = await asyncio.to_thread(self._texts.decode, ids)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": call.finish}
        head = {"id": "chat", "object": "chat.completion", "created": 0, "model": self.name}
        return _json({**head, "choices": [choice], "usage": call.usage()})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body: TokenizeBody = read(await request.read(), TokenizeBody, "the request")
        self._check_model(body.model)

        def tokens() -> list[int]:
            if body.messages is not None:
                return self._texts.render(body.messages, body.tools, is_asking=body.add_generation_prompt)
            if body.prompt is None:
                raise Refused("the request needs a prompt or messages")
            return self._texts.encode(body.prompt, has_special_tokens=body.add_special_tokens)

        ids = await asyncio.to_thread(tokens)
        return _json({"count": len(ids), "max_model_len": self._model.max_context, "tokens": ids})

    def _request(self, prompt: list[int], params: Params, salt: str, session: str, priority: int) -> Request:
        model = self._model
        return make_request(
            prompt,
            params,
            max_context=model.max_context,
            vocabulary=model.vocabulary,
            eos_ids=model.eos_ids,
            salt=salt,
            session=session,
            priority=priority,
        )

    def _check_model(self, name: object) -> None:
        if name not in (None, "", self.name):
            raise Refused(f"The model `{name}` does not exist: this is `{self.name}`.", 404)

    # --- pauses and weights

    async def _abort_requests(self, request: web.Request) -> web.StreamResponse:
        request_ids = read(await request.read(), dict[str, list[str] | None], "the request").get("request_ids")
        self._registry.abort(None if request_ids is None else frozenset(request_ids))
        return _json({})

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        mode = request.query.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise Refused(f"mode {mode!r} is not {', '.join(PAUSE_MODES)}")
        await self._registry.pause(PAUSE_MODES[mode])
        return _json({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        await self._registry.resume()
        return _json({"status": "resumed"})

    async def _paused(self, request: web.Request) -> web.StreamResponse:
        return _json({"is_paused": self._registry.is_paused})

    async def _set_version(self, request: web.Request) -> web.StreamResponse:
        version = read(await request.read(), dict[str, Any], "the request").get("new_version")
        if version is None:
            raise Refused("new_version is missing")

        def name(batcher: Batcher) -> None:
            batcher.version = str(version)

        await self._registry.run_in_worker(name)
        return _json({"success": True, "new_version": str(version)})

    async def _weight_info(self, request: web.Request) -> web.StreamResponse:
        return _json({"weight_version": self._batcher.version})

    async def _clear(self, request: web.Request) -> web.StreamResponse:
        has_all = request.query.get("reset_running_requests", "false").lower() in ("true", "1")
        is_clear = await self._registry.run_in_worker(lambda batcher: batcher.clear(with_running=has_all))
        return _json({"success": is_clear})

    async def _load(self, request: web.Request) -> web.StreamResponse:
        """Takes {"path", "version"?} and loads other weights of the same model from a folder. All weights are read and
        checked before the first is written; open calls continue with the new ones."""
        from rollyard.embedded.transformer.model import Unsupported

        body = read(await request.read(), dict[str, Any], "the request")
        path, version = body.get("path"), body.get("version")
        if not isinstance(path, str) or not path:
            raise Refused("path is missing")

        def load() -> None:
            weights = self._model.read_weights(Path(path))
            with self._registry.worker.weights(None if version is None else str(version)):
                self._model.write_weights(weights)

        try:
            await asyncio.to_thread(load)
        except Unsupported as error:
            raise Refused(str(error)) from None
        return _json({"success": True, "weight_version": self._batcher.version})

    # --- status

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self._registry.worker.is_alive else 503)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        card = {"id": self.name, "object": "model", "root": self._root, "max_model_len": self._model.max_context}
        return _json({"object": "list", "data": [card]})

    async def _version(self, request: web.Request) -> web.StreamResponse:
        return _json({"version": f"rollyard {__version__}"})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        batcher, counts = self._batcher, self._batcher.counts
        samples: dict[str, tuple[str, float]] = {
            "vllm:num_requests_running": ("gauge", len(batcher.running)),
            "vllm:num_requests_waiting": ("gauge", len(batcher.waiting) + self._registry.deferred),
            "vllm:kv_cache_usage_perc": ("gauge", batcher.use),
            "vllm:num_preemptions_total": ("counter", counts.preemptions),
            "vllm:prefix_cache_queries_total": ("counter", counts.prompt_tokens),
            "vllm:prefix_cache_hits_total": ("counter", counts.cached_tokens),
            "vllm:generation_tokens_total": ("counter", counts.sampled_tokens),
        }
        labels = f'{{engine="0",model_name="{self.name}"}}'
        lines = [f"# TYPE {name} {kind}\n{name}{labels} {value}\n" for name, (kind, value) in samples.items()]
        lines += [
            f'vllm:request_success_total{{engine="0",model_name="{self.name}",finished_reason="{reason}"}} {count}\n'
            for reason, count in self._registry.ended.items()
        ]
        lines.append(f"process_start_time_seconds {self._started_at}\n")
        for name, by_kind in (("steps_total", counts.steps), ("step_seconds_total", counts.step_s)):
            lines.append(f"# TYPE rollyard_engine_{name} counter\n")
            lines += [f'rollyard_engine_{name}{{kind="{kind}"}} {value}\n' for kind, value in by_kind.items()]
        return web.Response(text="".join(lines), content_type="text/plain")

    async def _tokenizer_list(self, request: web.Request) -> web.StreamResponse:
        if not self._root:
            raise Refused("the folder of the tokenizer is not known", 404)
        listed = await asyncio.to_thread(list_files, Path(self._root), self.name)
        return web.Response(body=msgspec.json.encode(listed), content_type="application/json")

    async def _tokenizer_file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if not self._root or name not in {path.name for path in paths_in(Path(self._root))}:
            raise Refused(f"the tokenizer has no file {name!r}", 404)
        return web.FileResponse(Path(self._root) / name)

    def _routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("POST", "/inference/v1/generate", self._generate),
            ("POST", "/inference/v1/abort_requests", self._abort_requests),
            ("POST", "/abort_requests", self._abort_requests),
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/pause", self._pause),
            ("POST", "/resume", self._resume),
            ("GET", "/is_paused", self._paused),
            ("POST", "/update_weight_version", self._set_version),
            ("GET", "/weight_info", self._weight_info),
            ("POST", "/reset_prefix_cache", self._clear),
            ("POST", "/update_weights_from_folder", self._load),
            ("GET", "/health", self._health),
            ("GET", "/v1/models", self._models),
            ("GET", "/version", self._version),
            ("GET", TOKENIZER_PATH, self._tokenizer_list),
            ("GET", TOKENIZER_PATH + "/{name}", self._tokenizer_file),
            ("GET", "/metrics", self._metrics),
        ]


def _guarded(handler: Handler) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as refused:
            return _json({"error": {"message": refused.message, "code": refused.status}}, refused.status)

    return handle


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _event(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
