"""An engine with scripted replies: a real HTTP server with vLLM's API (or SGLang's, or the reference system's) and no
model.

    async with ScriptedEngine(script=lambda turn: "hello") as engine:
        spec = EngineSpec("e1", engine.url, Kind.VLLM)

or as a separate process, which prints one line of JSON with its `url` when it is ready:

    python -m rollyard.testing.scripted_engine --script script.json --latency-s 0.5

With `stream`, tokens are sent at their rate, many per event; without a rate all at once, in one event.

All output is deterministic: the script determines the reply, and the token, its position and the token before it
determine each logprob (`scripted_logprob`). So a completion that is interrupted and continued, here or on another
scripted engine, equals an uninterrupted one. `cached_tokens` is the true common prefix with the session's last call.

It is designed to be cheap (benchmarks send it thousands of calls a second): a bare `web.Server` with a table of paths,
replies encoded once, and no timer for an immediate answer. The file is long because it is a whole server: one short
handler per path.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import msgspec
import orjson
from aiohttp import web

from rollyard.core.engine import TOKENIZER_PATH
from rollyard.core.trace import common_prefix
from rollyard.testing.script import (
    END,
    START,
    ByteTokenizer,
    Fault,
    FolderTokenizer,
    Reply,
    Rules,
    Script,
    Tokenizer,
    Turn,
)
from rollyard.testing.scripted_control import Controls
from rollyard.testing.scripted_dialects import (
    ChatFormat,
    CompletionFormat,
    GenerateFormat,
    ProrlFormat,
    ReplyFormat,
    SglangFormat,
    StreamFormat,
    chat_prompt,
    spoil,
)
from rollyard.testing.scripted_sampling import Finish, LogprobsMode, Sampled, cut_at_text, cut_reply
from rollyard.testing.scripted_streams import MIDWAY, stream_out
from rollyard.testing.scripted_work import ScriptedGeneration, ScriptedGenerations
from rollyard.testing.tokenizer_files import tokenizer_dir

K = TypeVar("K")
V = TypeVar("V")

Dialect = Literal["vllm", "sglang", "prorl"]
MAX_BODY_BYTES = 64 << 20
_METRICS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "kv_use": "vllm:kv_cache_usage_perc",
        "running": "vllm:num_requests_running",
        "total": "vllm:request_success_total",
        "waiting": "vllm:num_requests_waiting",
        "preemptions": "vllm:num_preemptions_total",
        "sampled": "vllm:generation_tokens_total",
    },
    "sglang": {
        "kv_use": "sglang:token_usage",
        "running": "sglang:num_running_reqs",
        "total": "sglang:num_requests_total",
        "waiting": "sglang:num_queue_reqs",
        "preemptions": "sglang:num_retracted_requests_total",
        "sampled": "sglang:generation_tokens_total",
    },
}
MAX_SESSIONS = 16_384  # sessions whose last prompt is kept, for cached_tokens and call numbers


@dataclass(frozen=True, slots=True)
class Recorded:
    """A received request."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    prompt_ids: Sequence[int] = ()

    @property
    def session_id(self) -> str:
        return self.headers.get("X-Session-ID", "")


class ScriptedEngine:
    """A scripted engine, started by `async with` or `start`. Attributes may be changed while it runs."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        dialect: Dialect = "vllm",
        model: str = "scripted",
        root: str = "",
        max_context: int = 32_768,
        latency_s: float | Callable[[Turn], float] = 0.0,
        tokens_per_s: float | None = None,
        logprobs_mode: LogprobsMode = "processed",
        is_scale_out: bool = True,
        has_old_logprobs: bool = False,
        is_incremental: bool = False,
        record: int = 1000,
        port: int = 0,
    ) -> None:
        self.script: Script = script or Rules()
        self.tokenizer: Tokenizer = tokenizer or ByteTokenizer()
        self.tokenizer_folder: Path | None = None  # whose files it serves
        self.can_tokenize = True  # off: it has no /tokenize, so its tokenizer cannot be determined
        self.dialect = dialect
        self.model = model
        self.root = root
        self.max_context = max_context
        self.latency_s = latency_s
        self.tokens_per_s = tokens_per_s
        self.logprobs_mode: LogprobsMode = logprobs_mode
        self.is_scale_out = is_scale_out
        self.has_old_logprobs = has_old_logprobs
        self.is_incremental = is_incremental  # SGLang's --incremental-streaming-output
        self.is_healthy = True
        self.kv_use: float | Callable[[], float] | None = None  # in /metrics; None: not included
        self.preemptions = 0  # in /metrics, with `kv_use`
        self.sampled_tokens: int | None = None  # in /metrics; None: not included
        self.started_at: float | None = time.time()  # in /metrics; None: not included
        self.requests: deque[Recorded] = deque(maxlen=record)
        self.aborted: deque[str] = deque(maxlen=1000)
        self.total = 0
        self._port = port
        self._faults: deque[Fault | int] = deque()
        self._work = ScriptedGenerations()
        self.control = Controls(self._work, self._end)  # pauses and weight updates
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._prefixes: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._encoded: dict[tuple[str, bool], list[int]] = {}
        self._runner: web.ServerRunner | None = None
        self._marker = array("i", self.tokenizer.encode(f"{START}assistant"))
        self._newline = self.tokenizer.encode("\n")
        self._paths = self._routes()

    # --- start and stop

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts to listen; a second start uses the same port."""
        server = web.Server(self._handle, request_factory=_large_request, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, backlog=4096, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Closes every connection. Running generations are lost, as with a real engine."""
        runner, self._runner = self._runner, None
        if runner is not None:
            server = runner.server
            self._work.stop()
            if isinstance(server, web.Server):
                for connection in server.connections:
                    connection.force_close()
                    if connection.transport is not None:
                        connection.transport.abort()
            await runner.cleanup()

    async def restart(self) -> None:
        """Simulates a new process: the same address, and weights without a version."""
        await self.stop()
        self.control.version = "default"
        self._work.new_version("default")
        self.started_at = None if self.started_at is None else time.time()
        await self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    # --- for tests

    def fail_next(self, count: int, fault: Fault | int) -> None:
        """Makes the next `count` generations fail with `fault`."""
        for _ in range(count):
            self._faults.append(fault)

    @property
    def calls(self) -> list[Recorded]:
        """The recorded generations that belong to sessions, without probes."""
        return [request for request in self.requests if request.session_id and request.prompt_ids]

    @property
    def version(self) -> str:
        """The weight version that the engine reports."""
        return self.control.version

    @version.setter
    def version(self, version: str) -> None:
        self.control.version = version

    @property
    def running(self) -> int:
        return len(self._work.running)

    async def idle(self) -> None:
        """Waits until nothing is being generated."""
        await self._work.idle.wait()

    async def busy(self) -> None:
        """Waits until something is being generated."""
        await self._work.busy.wait()

    # --- HTTP

    def _routes(self) -> Mapping[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]]:
        common = {
            "/health": self._health,
            "/v1/models": self._models,
            "/v1/chat/completions": self._chat,
            "/tokenize": self._tokenize,
            TOKENIZER_PATH: self._tokenizer_list,
            "/update_weight_version": self._control,
            "/metrics": self._metrics,
        }
        if self.dialect == "prorl":  # its only route
            return {"/generate": self._prorl}
        if self.dialect == "sglang":
            return common | {
                "/generate": self._sglang,
                "/abort_request": self._sglang_abort,
                "/get_server_info": self._version_info,
                "/get_weight_version": self._weight_info,
                "/pause_generation": self._control,
                "/flush_cache": self._control,
                "/continue_generation": self._control,
            }
        return common | {
            "/inference/v1/generate": self._generate,
            "/inference/v1/abort_requests": self._abort,
            "/abort_requests": self._abort,
            "/v1/completions": self._completion,
            "/version": self._version_info,
            "/weight_info": self._weight_info,
            "/pause": self._control,
            "/is_paused": self._is_paused,
            "/reset_prefix_cache": self._control,
            "/resume": self._control,
        }

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        route = self._paths.get(request.path)
        if request.path.startswith(f"{TOKENIZER_PATH}/"):
            route = self._tokenizer_file
        if route is None:
            return _json({"detail": "Not Found"}, 404)
        if not self.is_scale_out and request.path.startswith("/inference/"):
            return _json({"error": {"message": "scale-out is not enabled", "code": 403}}, 403)
        try:
            return await route(request)
        except _Refusal as refusal:
            return _json({"error": {"message": refusal.message, "code": refusal.status}}, refusal.status)
        except (KeyError, TypeError, ValueError) as error:
            return _json({"error": {"message": f"{type(error).__name__}: {error}", "code": 400}}, 400)

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=200 if self.is_healthy else 503)

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        card = {"id": self.model, "object": "model", "root": self.root or self.model, "max_model_len": self.max_context}
        return _json({"object": "list", "data": [card]})

    async def _version_info(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json({"version": "scripted"})

    async def _weight_info(self, request: web.BaseRequest) -> web.StreamResponse:
        if not self.control.is_there:
            return _json({"detail": "Not Found"}, 404)
        return _json({"weight_version": self.version})

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        labels = f'{{engine="0",model_name="{self.model}"}}'
        names = _METRICS[self.dialect]
        samples: dict[str, float] = {names["running"]: self.running, names["total"]: self.total}
        if self.kv_use is not None:
            use = self.kv_use() if callable(self.kv_use) else self.kv_use
            samples |= {names["kv_use"]: use, names["waiting"]: 0, names["preemptions"]: self.preemptions}
        if self.sampled_tokens is not None:
            samples[names["sampled"]] = self.sampled_tokens
        text = "".join(f"# TYPE {name} gauge\n{name}{labels} {value}\n" for name, value in samples.items())
        if self.started_at is not None:
            text += f"process_start_time_seconds {self.started_at}\n"
        return web.Response(text=text, content_type="text/plain")

    async def _tokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        if not self.can_tokenize:
            return _json({"detail": "Not Found"}, 404)
        tokens = self.tokenizer.encode(str((await _body(request))["prompt"]))
        return _json({"count": len(tokens), "max_model_len": self.max_context, "tokens": tokens})

    async def _tokenizer_list(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.tokenizer_folder is None:
            return _json({"detail": "Not Found"}, 404)
        from rollyard.tokens.files import list_files  # only if requested: most engines serve no files

        return web.Response(body=msgspec.json.encode(list_files(self.tokenizer_folder, self.model)))

    async def _tokenizer_file(self, request: web.BaseRequest) -> web.StreamResponse:
        path = None if self.tokenizer_folder is None else self.tokenizer_folder / request.path.rpartition("/")[2]
        if path is None or not path.is_file():
            return _json({"detail": "Not Found"}, 404)
        return web.Response(body=path.read_bytes())

    async def _control(self, request: web.BaseRequest) -> web.StreamResponse:
        if not self.control.is_there:
            return _json({"detail": "Not Found"}, 404)
        raw = await request.read()
        status, answer = await self.control.handle(request.path, request.query, orjson.loads(raw) if raw else {})
        return _json(answer, status)

    async def _is_paused(self, request: web.BaseRequest) -> web.StreamResponse:
        if not self.control.is_there:
            return _json({"detail": "Not Found"}, 404)
        return _json({"is_paused": self.control.is_paused})

    async def _abort(self, request: web.BaseRequest) -> web.StreamResponse:
        self._end((await _body(request)).get("request_ids") or list(self._work.running))
        return web.Response()

    async def _sglang_abort(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _body(request)
        rid = "" if body.get("abort_all") else body["rid"]
        self._end([name for name in self._work.running if name.startswith(rid)] or [rid])  # by prefix, as in SGLang
        return web.Response()

    def _end(self, request_ids: Sequence[str]) -> None:
        self.aborted.extend(request_ids)
        self._work.abort(request_ids)

    # --- generating, in each dialect

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _body(request)
        params = body["sampling_params"]
        known_as = f"generate-tokens-{_request_id(request, body)}"
        voice = GenerateFormat(known_as, self.model, _has_usage(body), is_old=self.has_old_logprobs)
        limit = params.get("max_tokens", 16)
        return await self._serve(request, body, body["token_ids"], params, limit, known_as, voice)

    async def _completion(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _body(request)
        known_as = f"cmpl-{_request_id(request, body)}"
        voice = CompletionFormat(known_as, self.model, _has_usage(body), tokenizer=self.tokenizer)
        return await self._serve(
            request, body, body["prompt"], body, body.get("max_tokens", 16), f"{known_as}-0", voice
        )

    async def _sglang(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _body(request)
        known_as = str(body.get("rid", ""))
        logprobs = body.get("top_logprobs_num", 0) if body.get("return_logprob") else None
        params = {**body["sampling_params"], "logprobs": logprobs}
        limit = params.get("max_new_tokens", 128)
        voice = SglangFormat(known_as, lambda: self.version, self.tokenizer, is_incremental=self.is_incremental)
        return await self._serve(request, body, body["input_ids"], params, limit, known_as, voice)

    async def _prorl(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _body(request)
        params, limit = {**body, "logprobs": 0}, body.get("max_tokens", 16)
        return await self._serve(
            request, body, body["prompt_ids"], params, limit, _request_id(request, body), ProrlFormat()
        )

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _body(request)
        prompt = self.tokenizer.encode(chat_prompt(body["messages"], START))
        voice = ChatFormat(self.model, self.tokenizer)
        return await self._serve(request, body, prompt, body, body.get("max_tokens", 4096), "", voice)

    # --- sampling, shared by all dialects

    async def _serve(
        self,
        request: web.BaseRequest,
        body: Mapping[str, Any],
        prompt: list[int],
        params: Mapping[str, Any],
        max_tokens: int,
        known_as: str,
        voice: ReplyFormat,
    ) -> web.StreamResponse:
        self._check(body, prompt)
        session_id = request.headers.get("X-Session-ID", "")
        if self.requests.maxlen:
            self.requests.append(Recorded(request.path, body, request.headers, prompt))
        turn = Turn(prompt, self.tokenizer, self._marker, session_id, self._number(session_id))
        reply = self.script(turn)
        if not isinstance(reply, Reply):
            reply = Reply(reply) if isinstance(reply, str) else Reply(token_ids=tuple(reply))
        fault = self._faults.popleft() if self._faults else reply.fault
        ids = turn.rest_of(self._encode(reply), self._newline)
        ids = cut_at_text(ids, params.get("stop") or (), self.tokenizer)
        ids, finish = cut_reply(ids, max_tokens, params.get("stop_token_ids") or ())
        is_stream = bool(body.get("stream"))
        if fault in MIDWAY and not (is_stream and ids):
            fault = "cut" if fault == "cut_midway" else 500
        if isinstance(fault, int):
            raise _Refusal(f"a fault of status {fault} was requested", fault)
        if fault == "cut":
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        piece = self._piece(turn, reply, len(ids), fault)
        salt = str(body.get("cache_salt") or body.get("extra_key") or "")

        plan = Sampled(prompt, ids, finish, 0, piece.versions, params, self.logprobs_mode, fault)

        def end(count: int, how: Finish) -> Sampled:
            self.total += 1
            cached = self._cached(session_id, salt, prompt, ids[:count])
            return replace(plan, ids=ids[:count], finish=how, cached=cached)

        if is_stream and isinstance(voice, StreamFormat):  # a chat is never streamed
            return await stream_out(request, self._work, known_as, piece, plan, end, voice)
        how = await self._work.do(known_as, piece)
        if how == "stopped":
            return web.Response(status=503)
        if fault == "not_json":
            return web.Response(body=b"<html>Bad gateway</html>", content_type="text/html")
        if how == "abort" or fault == "unasked_abort":
            sampled = end(piece.sampled() if how == "abort" else 0, "abort")
        else:
            sampled = end(len(ids), finish)
        return _json(spoil(sampled, voice.whole(sampled)))

    def _check(self, body: Mapping[str, Any], prompt: list[int]) -> None:
        if body.get("model") not in (None, "", self.model):
            raise _Refusal(f"The model `{body['model']}` does not exist.", 404)
        if not prompt or not all(isinstance(i, int) and i >= 0 for i in prompt):
            raise _Refusal("token_ids must be a list of non-negative integers", 400)
        if len(prompt) >= self.max_context:
            raise _Refusal(
                f"The prompt (length {len(prompt)}) is longer than the maximum model length of {self.max_context}.", 400
            )

    def _number(self, session_id: str) -> int:
        """Returns the number of this call in its session, from 0."""
        number = self._numbers.get(session_id, 0)
        _remember(self._numbers, session_id, number + 1)
        return number

    def _cached(self, session_id: str, salt: str, prompt: list[int], sampled: list[int]) -> int:
        """Returns how many prompt tokens the session's last call left in the cache, without the last prompt token."""
        if not session_id:
            return 0
        known = self._prefixes.get((session_id, salt))
        _remember(self._prefixes, (session_id, salt), array("i", [*prompt, *sampled]))
        return 0 if known is None else min(common_prefix(known, array("i", prompt)), len(prompt) - 1)

    def _encode(self, reply: Reply) -> list[int]:
        if reply.token_ids is not None:
            return list(reply.token_ids)
        key = (reply.text, reply.ends)
        ids = self._encoded.get(key)
        if ids is None:
            if len(self._encoded) > 4096:
                self._encoded.clear()
            ids = self._encoded[key] = self.tokenizer.encode(reply.text + (END if reply.ends else ""))
        return ids

    def _piece(self, turn: Turn, reply: Reply, total: int, fault: Fault | None) -> ScriptedGeneration:
        latency_s = self.latency_s if reply.latency_s is None else reply.latency_s
        stall_after = reply.stall_after
        if fault in MIDWAY:
            stall_after = max(1, total // 2 if stall_after is None else stall_after)
        return ScriptedGeneration(
            total=total,
            latency_s=latency_s(turn) if callable(latency_s) else latency_s,
            tokens_per_s=self.tokens_per_s if reply.tokens_per_s is None else reply.tokens_per_s,
            stall_after=stall_after,
            ignores_aborts=fault == "hang",
            versions=[(self.version, 0)],
        )


class _Refusal(Exception):
    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


def _large_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES)


async def _body(request: web.BaseRequest) -> dict[str, Any]:
    return orjson.loads(await request.read())


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _has_usage(body: Mapping[str, Any]) -> bool:
    return bool((body.get("stream_options") or {}).get("include_usage"))


def _request_id(request: web.BaseRequest, body: Mapping[str, Any]) -> str:
    return request.headers.get("X-Request-Id") or str(body.get("request_id", ""))


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > MAX_SESSIONS:
        memory.popitem(last=False)


async def serve(engine: ScriptedEngine) -> None:
    """Serves until SIGTERM or SIGINT. The first line of output is JSON with the url."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with engine:
        sys.stdout.write(orjson.dumps({"url": engine.url, "model": engine.model}).decode() + "\n")
        sys.stdout.flush()
        await stopped.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rollyard.testing.scripted_engine", description="A scripted engine."
    )
    parser.add_argument("--port", type=int, default=0, help="Port to listen on; 0 takes any free one.")
    parser.add_argument("--script", type=Path, help="JSON file with rules and default.")
    parser.add_argument(
        "--tokenizer", type=Path, default=tokenizer_dir(), help="Folder with tokenizer.json. [default: a small one]"
    )
    parser.add_argument("--model", default="scripted")
    parser.add_argument("--dialect", choices=["vllm", "sglang", "prorl"], default="vllm")
    parser.add_argument("--max-context", type=int, default=32_768)
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--tokens-per-s", type=float)
    parser.add_argument("--record", type=int, default=0, help="How many requests to keep for inspection.")
    args = parser.parse_args()
    engine = ScriptedEngine(
        Rules.load(args.script) if args.script else None,
        tokenizer=FolderTokenizer(args.tokenizer),
        dialect=args.dialect,
        model=args.model,
        root=str(args.tokenizer.resolve()),
        max_context=args.max_context,
        latency_s=args.latency_s,
        tokens_per_s=args.tokens_per_s,
        record=args.record,
        port=args.port,
    )
    engine.tokenizer_folder = args.tokenizer
    import uvloop

    uvloop.run(serve(engine))


if __name__ == "__main__":
    main()
