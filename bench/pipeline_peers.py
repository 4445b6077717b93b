"""Measures the peers of `rollyard bench pipeline` under its service-bound load: an immediate engine, the same turns.

A driver (bench/peers) runs rollouts continuously while it is measured from here, in the same way as our service: turns
are counted by the engine, CPU time is read from /proc. Each peer does less in a turn: mini-swe-agent runs a real `echo`
in a new shell, directly on this machine (its CPU time is that of the children); verifiers calls a Python function.
Neither has a sandbox, a durable record or token ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from bench.peer_drivers import TAIL, PeerError, driver_argv
from rollyard.cli.rig import Meter, engine_process, machine_busy_s, stop
from rollyard.core import Json

TURNS = 5
"""Turns of a rollout in the latency-bound load, and in the peers' figures."""

CONCURRENCY = 64
STEADY_S = 120.0  # to import a peer, and to finish its first rollouts


def _bash(command: str) -> str:
    return f"I run a command.\n\n```mswea_bash_command\n{command}\n```"


def _echo(text: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": "echo", "arguments": {"text": text}}) + "\n</tool_call>"


def _script(peer: str, turns: int) -> dict[str, Json]:
    """Returns the script of the engine for this peer: a tool call in every turn, and the end in the last."""
    texts = [f"turn {turn}" for turn in range(1, turns + 1)]
    if peer == "mini_swe_agent":
        replies = [_bash(f"echo {text}") for text in texts[:-1]]
        return {"default": [*replies, _bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 4")]}
    replies = [_echo(text) for text in texts]
    return {"default": [*replies[:-1], replies[-1] + "\nANSWER: 4"]}


async def run_peers(*, quick: bool, turns: int = TURNS) -> dict[str, Json]:
    """Returns each peer's figures, under Rollyard's names, or {"error": reason} if it cannot be measured."""
    figures: dict[str, Json] = {}
    for name, peer in (("mini-swe-agent", "mini_swe_agent"), ("verifiers", "verifiers")):
        try:
            figures[name] = await measure_peer(peer, _script(peer, turns), turns=turns, window_s=5.0 if quick else 18.0)
        except PeerError as error:
            figures[name] = {"error": str(error)}
    return figures


async def measure_peer(
    peer: str, script: Mapping[str, Json], *, turns: int = TURNS, window_s: float
) -> dict[str, Json]:
    """Returns the figures of one driver in its steady state. Raises PeerError if it cannot be measured."""
    argv = await asyncio.to_thread(driver_argv, peer)
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "script.json").write_text(json.dumps(script))
        async with (
            engine_process(folder, 0.0) as (engine_pid, url),
            _driver([*argv, url, str(turns), str(CONCURRENCY)], folder) as (process, about),
            aiohttp.ClientSession() as http,
        ):
            driver, engine = Meter(process.pid), Meter(engine_pid)

            async def look() -> tuple[float, ...]:
                answered, now = await _turns(http, url), time.monotonic()
                return answered, now, driver.cpu_s(), driver.children_cpu_s(), engine.cpu_s(), machine_busy_s()

            before = await look()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), window_s)
                raise _DriverEnded
            after = await look()
    completed, took_s, *cpus = (b - a for a, b in zip(before, after, strict=True))
    if not completed:
        raise PeerError(f"it made no turn in {took_s:.1f} s")
    own, children, engines, machine = (round(1000 * cpu_s / completed, 3) for cpu_s in cpus)
    return {
        **about,
        "peak_turns_per_s": round(completed / took_s, 1),
        "peak_run_slots": CONCURRENCY,
        "cpu_ms_per_turn": own,
        "child_cpu_ms_per_turn": children,
        "engine_cpu_ms_per_turn": engines,
        "machine_cpu_ms_per_turn": machine,
    }


@asynccontextmanager
async def _driver(
    argv: list[str], folder: Path
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, dict[str, Json]], None]:
    """Starts a driver and waits for its steady state; also yields the object that it prints about its rollouts."""
    home = folder / "home"  # peers' caches and settings are deleted with the folder
    home.mkdir()
    # Nothing else of our environment: no keys, no proxies.
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "LANG": "C.UTF-8"}
    with (folder / "stderr").open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,  # a driver ends when this pipe closes, also if we are killed
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environment,
            cwd=home,
        )
    try:
        yield process, await _steady(process)
    except (_DriverEnded, OSError):  # OSError: it is no longer in /proc
        text = (folder / "stderr").read_text(errors="replace").strip()
        raise PeerError(f"its driver ended with {process.returncode}: {text[-TAIL:]}") from None
    finally:
        await stop(process)


async def _steady(process: asyncio.subprocess.Process) -> dict[str, Json]:
    """Waits for the one object that a driver prints, after the output of the peer's import."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(STEADY_S):
            while not (line := await process.stdout.readline()).startswith(b"{"):
                if not line:
                    await process.wait()
                    raise _DriverEnded
    except TimeoutError:
        raise PeerError(f"its first rollouts did not end within {STEADY_S:.0f} s") from None
    return json.loads(line)


class _DriverEnded(Exception):
    pass


async def _turns(http: aiohttp.ClientSession, url: str) -> int:
    """Returns how many completions the engine has answered."""
    async with http.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("vllm:request_success_total"))
