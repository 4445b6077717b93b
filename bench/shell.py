"""`rollyard bench shell`: latency and throughput of commands in a sandbox's shell, compared with other shells.

Ours runs inside a sandbox (of the kind `--runtime`); the peers run directly on this machine, which is easier. SWE-ReX
is installed on first use into its own virtual environment below ~/.cache/rollyard/bench.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from bench._parts import AnyRuntime, Missing, forget_image, make_images, make_runtime
from bench.peer_drivers import measure
from rollyard.cli._console import CommandError
from rollyard.core import Json
from rollyard.sandbox import Sandbox, SandboxSpec
from rollyard.tools.shell import Shell, ShellOutcome

SHELLS = 200


async def bench_shell(*, quick: bool = False, runtime: str = "bubblewrap", peers: bool = True) -> dict[str, Json]:
    """Returns `metrics` and `versus`; a peer that cannot be measured is {"error": reason}."""
    calls = 100 if quick else 500
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as name:
        images = await asyncio.to_thread(make_images, Path(name)) if runtime == "oci" else None
        try:
            created = make_runtime(runtime, Path(name, "root"), images=images)
        except Missing as error:
            raise CommandError("this runtime cannot be measured here", str(error)) from None
        async with created as opened:
            metrics = await _starts(opened, 15 if quick else 50)
            metrics |= await _echoes(opened, calls)
            metrics |= await _many(opened, 20 if quick else 100)
            await forget_image(opened, images)
    versus: dict[str, Json] = {}
    if peers:
        versus["swe-rex"] = await asyncio.to_thread(measure, "swe_rex", 100 if quick else 300)
        versus["tmux"] = await asyncio.to_thread(measure, "tmux", 10 if quick else 40)
        versus["bash -lc"] = await asyncio.to_thread(measure, "bash_lc", calls)
    return {"metrics": metrics, "versus": versus}


async def _starts(runtime: AnyRuntime, count: int) -> dict[str, Json]:
    times: list[float] = []
    for _ in range(count + 1):  # the first one also starts the launcher
        started_at = time.perf_counter()
        sandbox = await runtime.start(SandboxSpec(owner="bench"), lease_s=600.0)
        times.append((time.perf_counter() - started_at) * 1000)
        await sandbox.kill()
    return {"start_p50_ms": round(statistics.median(times[1:]), 2)}


async def _echoes(runtime: AnyRuntime, count: int) -> dict[str, Json]:
    sandbox = await runtime.start(SandboxSpec(owner="bench"), lease_s=600.0)
    shell = await Shell.open(sandbox)
    times: list[float] = []
    for number in range(count + 20):
        started_at = time.perf_counter()
        await _echo(shell, number)
        times.append((time.perf_counter() - started_at) * 1000)
    await shell.close()
    await sandbox.kill()
    ordered = sorted(times[20:])
    p99 = ordered[int(count * 0.99)]
    return {"echo_p50_ms": round(statistics.median(ordered), 4), "echo_p99_ms": round(p99, 4), "echo_calls": count}


async def _many(runtime: AnyRuntime, each: int) -> dict[str, Json]:
    async def open_one() -> tuple[Sandbox, Shell]:
        sandbox = await runtime.start(SandboxSpec(owner="bench"), lease_s=600.0)
        return sandbox, await Shell.open(sandbox, output_bytes=16_384)

    async def work(shell: Shell) -> None:
        for number in range(each):
            await _echo(shell, number)

    pairs = await asyncio.gather(*[open_one() for _ in range(SHELLS)])
    await asyncio.gather(*[_echo(shell, 0) for _, shell in pairs])
    started_at = time.perf_counter()
    await asyncio.gather(*[work(shell) for _, shell in pairs])
    duration_s = time.perf_counter() - started_at
    await asyncio.gather(*[shell.close() for _, shell in pairs])
    await asyncio.gather(*[sandbox.kill() for sandbox, _ in pairs])
    return {"commands_per_s_200": round(SHELLS * each / duration_s, 1)}


async def _echo(shell: Shell, number: int) -> None:
    result = await shell.run(f"echo hello {number}", 60.0)
    if result.outcome is not ShellOutcome.COMPLETED or result.output != f"hello {number}\n":
        raise RuntimeError(f"echo returned {result}")
