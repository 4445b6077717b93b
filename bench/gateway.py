"""`rollyard bench gateway`: the latency that the gateway adds to a completion, and its throughput.

- Latency: 64 streams, with an engine that takes about a second for each completion, token by token. `added_…` is the
  time of a stream through the gateway minus the median time of the same stream directly from the engine; the engine's
  own jitter counts against us. The gateway (or proxy) has its own core, as if the engine were on another machine. The
  engine alone is timed before and after each round (the speed of a shared machine varies from minute to minute), and
  the result is the median of five rounds. That core is kept awake (by a spinner of the idle class, which yields to any
  other process): a halted virtual core takes time to resume, and then starts with cold caches. `halting_added_…` are
  the figures without the spinner, of three rounds.
- Throughput, measured separately: an engine that answers immediately. Every completion is rendered, spliced onto the
  earlier samples, recorded, and finally verified (`verify` of every trace, in the gateway's process).
- Hostile requests (`_hostile.py`): `hostile_loop_stall_ms` is the longest time that they blocked the gateway's event
  loop.

The peer is a proxy that forwards bytes without parsing them, in the same run with the same client and engine. Client,
engine and gateway are separate processes; all of them share the machine, and the CPU time of each is reported.

The conversations are those of an agent: a system prompt, a tool, eight turns, each a tool call and its result.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from statistics import median

import orjson

from bench._gateway_processes import engine, gateway, proxy
from bench._hostile import CONTEXT, HOSTILE_SESSIONS, hostile
from bench._load import Line
from rollyard.cli._console import note
from rollyard.cli.rig import Meter
from rollyard.core import Json
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens import Tokenizers
from rollyard.tokens.chatml import ChatML

STREAMS = 64
TURNS = 8
ENGINE_S = 1.0
ROUNDS, HALTING_ROUNDS = 5, 3

RESULT = "-rw-r--r-- 1 agent agent 1741 Nov  1 12:00 file.py"
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Runs a command and returns what it printed.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
SYSTEM = "You are an agent that works in a shell. " * 20


def _arguments(turn: int) -> str:
    return json.dumps({"command": f"ls -l --sort=size /workspace/part_{turn} | head -n 1"})


def _reply_text(turn: int) -> str:
    call = f'{{"name": "shell", "arguments": {_arguments(turn)}}}'
    return f"I look at part {turn} next.\n<tool_call>\n{call}\n</tool_call>"


def script(tokens_per_s: float | None) -> dict[str, Json]:
    replies: list[Json] = [{"text": _reply_text(turn), "tokens_per_s": tokens_per_s} for turn in range(TURNS)]
    return {"rules": [], "default": replies}


class Conversation:
    """The requests of an agent, each with the whole history. The replies are known from the script."""

    def __init__(self, number: int, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._turn = 0
        self._messages: list[Json] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Task {number}: find the largest file of each part."},
        ]

    @property
    def is_over(self) -> bool:
        return self._turn >= TURNS

    def next(self) -> bytes:
        body = {"model": "policy", "messages": self._messages, "tools": TOOLS, "stream": self._is_stream}
        return orjson.dumps(body)

    def answered(self) -> None:
        call = {"id": f"c{self._turn}", "type": "function"}
        function = {"name": "shell", "arguments": _arguments(self._turn)}
        content = f"I look at part {self._turn} next."
        self._messages.append({"role": "assistant", "content": content, "tool_calls": [{**call, "function": function}]})
        self._messages.append({"role": "tool", "tool_call_id": f"c{self._turn}", "content": RESULT})
        self._turn += 1


class Asking:
    """One worker's requests: conversations for the gateway, rendered prompts for the engine (or a proxy of it)."""

    def __init__(self, worker: int, path: str, *, is_stream: bool) -> None:
        self.path = path
        self._worker = worker
        self._is_stream = is_stream
        self._numbers = 0
        self._conversation = Conversation(worker, is_stream=is_stream)
        self._raw: list[bytes] = []
        if path == ENGINE_PATH:
            params = {"max_tokens": 2048, "temperature": 1.0, "logprobs": 0}
            shared = {"sampling_params": params, "stream": is_stream}
            self._raw = [orjson.dumps({"token_ids": ids, **shared}) for ids in prompts()]

    def next(self) -> bytes:
        if self._raw:
            self._numbers += 1
            return self._raw[self._numbers % TURNS]
        if self._conversation.is_over:
            self._numbers += 1
            self._conversation = Conversation(self._worker + 1000 * self._numbers, is_stream=self._is_stream)
        return self._conversation.next()

    def answered(self) -> None:
        if not self._raw:
            self._conversation.answered()


@cache
def prompts() -> list[list[int]]:
    """Returns the prompts that the gateway sends to the engine in a conversation, for requests without the gateway."""
    renderer = ChatML(Tokenizers().load(str(tokenizer_dir())))
    conversation = Conversation(0, is_stream=False)
    rendered: list[list[int]] = []
    for _ in range(TURNS):
        body = orjson.loads(conversation.next())
        rendered.append(renderer.render(body["messages"], body["tools"]))
        conversation.answered()
    return rendered


ENGINE_PATH = "/inference/v1/generate"
GATEWAY_PATH = "/v1/chat/completions"


async def bench_gateway(*, quick: bool = False, peers: bool = True) -> dict[str, Json]:
    versus: dict[str, Json] = {}
    metrics = await _latency(each=2 if quick else 8, versus=versus if peers else None)
    metrics |= await _throughput(window_s=4.0 if quick else 15.0, versus=versus if peers else None)
    metrics |= await _hostile()
    return {"metrics": metrics, "versus": versus}


async def _hostile() -> dict[str, Json]:
    def honest(text: str) -> bytes:
        return orjson.dumps({"model": "policy", "messages": [{"role": "user", "content": text}], "tools": TOOLS})

    async with (
        engine(script(None), max_context=CONTEXT) as (_, engine_url),
        gateway(engine_url, HOSTILE_SESSIONS + 1) as server,
    ):
        return await hostile(server, GATEWAY_PATH, honest)


# --- latency


async def _latency(*, each: int, versus: dict[str, Json] | None) -> dict[str, Json]:
    """Runs rounds of all of them in turn, and takes medians: another process on the machine may disturb one round."""
    rate = 60 / ENGINE_S  # the replies have about 60 tokens
    gateway_rounds, proxy_rounds, halting = _Rounds(), _Rounds(), _Rounds()
    base: list[tuple[float, float]] = []
    with _reserved_core() as own:
        async with (
            engine(script(rate)) as (_, engine_url),
            gateway(engine_url, STREAMS) as server,
            proxy(engine_url) as (proxy_meter, proxy_url),
        ):
            for middle in (server.meter, proxy_meter):
                os.sched_setaffinity(middle.pid, own)

            async def through(name: str, rounds: int, *ways: tuple[_Rounds, Sequence[str], str]) -> None:
                before = await _timed([engine_url] * STREAMS, ENGINE_PATH, each)
                for number in range(rounds):
                    note(f"latency, {name}: round {number + 1} of {rounds}")
                    times = [await _timed(targets, path, each) for _, targets, path in ways]
                    after = await _timed([engine_url] * STREAMS, ENGINE_PATH, each)
                    direct, before = before + after, after
                    base.append((_at(direct, 0.5, 0), _at(direct, 0.99, 0)))
                    for (into, _, _), taken in zip(ways, times, strict=True):
                        into.append(_added(taken, direct))

            gateway_target = (server.urls, GATEWAY_PATH)
            proxied = [(proxy_rounds, [proxy_url] * STREAMS, ENGINE_PATH)] if versus is not None else []
            async with _awake(own):
                await through("core awake", ROUNDS, (gateway_rounds, *gateway_target), *proxied)
            await through("core may halt", HALTING_ROUNDS, (halting, *gateway_target))
    if versus is not None:
        versus["pass-through proxy"] = _median(proxy_rounds)
    return {
        "streams": STREAMS,
        "engine_ms": round(median(it[0] for it in base), 2),
        "engine_p99_ms": round(median(it[1] for it in base), 2),
        **_median(gateway_rounds),
        **{f"halting_{name}": value for name, value in _median(halting).items()},
    }


Added = tuple[float, float, float]
_Rounds = list[Added]


def _added(times: Sequence[tuple[float, float]], direct: Sequence[tuple[float, float]]) -> Added:
    base_ms, first_ms = _at(direct, 0.5, 0), _at(direct, 0.5, 1)
    return _at(times, 0.5, 0) - base_ms, _at(times, 0.99, 0) - base_ms, _at(times, 0.5, 1) - first_ms


def _median(rounds: Sequence[Added]) -> dict[str, Json]:
    names = ("added_p50_ms", "added_p99_ms", "first_token_added_p50_ms")
    return {name: round(median(values), 2) for name, values in zip(names, zip(*rounds, strict=True), strict=True)}


@contextmanager
def _reserved_core() -> Generator[set[int], None, None]:
    """Yields the last core, for the gateway or proxy. This process and its other children share the remaining cores, so
    that the gateway is measured and not how three processes share two cores. With one core, all use it."""
    cores = os.sched_getaffinity(0)
    own = {max(cores)}
    os.sched_setaffinity(0, cores - own or cores)
    try:
        yield own
    finally:
        os.sched_setaffinity(0, cores)


@asynccontextmanager
async def _awake(cores: set[int]) -> AsyncGenerator[None, None]:
    """Keeps these cores busy with a process that yields to every other one."""
    argv = [
        sys.executable,
        "-c",
        "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass",
    ]
    spinner = await asyncio.create_subprocess_exec(*argv)
    os.sched_setaffinity(spinner.pid, cores)
    try:
        yield
    finally:
        spinner.kill()
        await spinner.wait()


def _at(times: Sequence[tuple[float, float]], share: float, column: int) -> float:
    ordered = sorted(pair[column] for pair in times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000


async def _timed(urls: Sequence[str], path: str, each: int) -> list[tuple[float, float]]:
    """Returns (total time, time to first byte) in seconds of every completion except each worker's first."""
    times: list[tuple[float, float]] = []

    async def work(worker: int, url: str) -> None:
        asking = Asking(worker, path, is_stream=True)
        await asyncio.sleep(random.Random(worker).random() * ENGINE_S)  # not all at the same time
        line = await Line.open(url)
        for count in range(each + 1):
            body = asking.next()
            started_at = time.perf_counter()
            status, answer = await line.post(asking.path, body)
            took_s = time.perf_counter() - started_at
            _check(status, answer)
            if count:
                times.append((took_s, line.first_at - started_at))
            asking.answered()
        line.close()

    async with asyncio.TaskGroup() as group:
        for worker, url in enumerate(urls):
            group.create_task(work(worker, url))
    return times


# --- throughput


async def _throughput(*, window_s: float, versus: dict[str, Json] | None) -> dict[str, Json]:
    async with engine(script(None)) as (meter, engine_url):
        async with gateway(engine_url, STREAMS) as server:
            note("throughput: through the gateway")
            rate, cpu = await _carried(server.urls, GATEWAY_PATH, window_s, server.meter, meter)
        recorded = server.recorded
        metrics: dict[str, Json] = {
            "completions_per_s": round(rate, 1),
            "gateway_cpu_ms": cpu[0],
            "engine_cpu_ms": cpu[1],
            "client_cpu_ms": cpu[2],
            "verified_completions": recorded["completions"],
            "verified_traces": recorded["traces"],
            "turns_per_trace": round(recorded["completions"] / max(1, recorded["traces"]), 2),
        }
        if versus is not None:
            async with proxy(engine_url) as (middle, url):
                note("throughput: through a pass-through proxy")
                rate, cpu = await _carried([url] * STREAMS, ENGINE_PATH, window_s, middle, meter)
            proxy_figures: dict[str, Json] = {
                "completions_per_s": round(rate, 1),
                "gateway_cpu_ms": cpu[0],
                "engine_cpu_ms": cpu[1],
                "client_cpu_ms": cpu[2],
            }
            figures = versus.setdefault("pass-through proxy", {})
            assert isinstance(figures, dict)
            figures |= proxy_figures
    return metrics


async def _carried(
    urls: Sequence[str], path: str, window_s: float, middle: Meter, engine: Meter
) -> tuple[float, tuple[float, float, float]]:
    """Returns completions per second in the steady state, and CPU ms per completion of middle, engine and client."""
    completed = 0
    is_over = False

    async def work(worker: int, url: str) -> None:
        nonlocal completed
        asking = Asking(worker, path, is_stream=False)
        line = await Line.open(url)
        while not is_over:
            status, answer = await line.post(asking.path, asking.next())
            _check(status, answer)
            asking.answered()
            completed += 1
        line.close()

    async with asyncio.TaskGroup() as group:
        for worker, url in enumerate(urls):
            group.create_task(work(worker, url))
        await asyncio.sleep(min(2.0, window_s / 4))
        before = completed, time.monotonic(), middle.cpu_s(), engine.cpu_s(), time.process_time()
        await asyncio.sleep(window_s)
        after = completed, time.monotonic(), middle.cpu_s(), engine.cpu_s(), time.process_time()
        is_over = True
    count = max(1, after[0] - before[0])
    cpu = [round(1000 * (b - a) / count, 3) for a, b in zip(before[2:], after[2:], strict=True)]
    return count / (after[1] - before[1]), (cpu[0], cpu[1], cpu[2])


def _check(status: int, answer: bytes) -> None:
    if status != 200 or b'"error"' in answer[:40]:
        raise RuntimeError(f"a completion was refused ({status}): {answer[:300].decode(errors='replace')}")
