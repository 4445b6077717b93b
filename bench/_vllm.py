"""Runs the real vLLM on a CPU in a separate process, for `rollyard bench engine`.

`scripts/install-vllm-cpu` installs it. It serves the same weights in float32, with as many threads, and compiles the
model as it does by default. Without chunked prefill: on a CPU, vLLM 0.32 ends with "CPU Generator does not use offset"
when it splits the prompt of a request that has a seed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from rollyard.cli._console import CommandError
from rollyard.cli._deadline import within
from rollyard.cli.rig import stop
from rollyard.engines import Engine, EngineSpec, Kind, make_engine, open_http

START_S = 600.0  # it compiles the model


def vllm_program() -> Path | None:
    """The installed vLLM, or None."""
    folder = os.environ.get("ROLLYARD_VLLM_CPU") or "~/.cache/rollyard/vllm-cpu"
    program = Path(folder).expanduser() / "venv" / "bin" / "vllm"
    return program if program.is_file() else None


@asynccontextmanager
async def served_by_vllm(program: Path, model: str, place: Path, *, context: int) -> AsyncGenerator[Engine, None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", str(context)]
    options += ["--no-enable-chunked-prefill", "--max-num-seqs", "32"]
    options += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    path = f"{program.parent}{os.pathsep}{os.environ.get('PATH', '')}"  # its compiler uses ninja from there
    log = place / "vllm.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(str(program), "serve", model, *options),
            env={**os.environ, **offline, "PATH": path, "OMP_NUM_THREADS": str(os.cpu_count() or 1)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        async with within(START_S, "starting vLLM", f"{url}/health"):
            await _ready(process, url, log)
        async with open_http() as http:
            engine = make_engine(EngineSpec("vllm", url, Kind.VLLM), http)
            await engine.probe()
            try:
                yield engine
            finally:
                await engine.close()
    finally:
        await stop(process)


async def _ready(process: asyncio.subprocess.Process, url: str, log: Path) -> None:
    async with aiohttp.ClientSession() as http:
        while True:
            if process.returncode is not None:
                lines = (await asyncio.to_thread(log.read_text, errors="replace")).splitlines()
                reason = next((line.strip() for line in lines if "Error: " in line), "it ended without an error")
                raise CommandError(f"vLLM did not start: {reason}", "use --no-peers to leave it out")
            try:
                async with http.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
