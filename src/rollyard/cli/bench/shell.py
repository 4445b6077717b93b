"""`rollyard bench shell`: how fast commands go through a sandbox's shell, beside other people's shells.

Ours runs inside a sandbox; the peers run bare on this machine, which is the easier thing. SWE-ReX is installed on first
use into a virtual environment of its own below ~/.cache/rollyard/bench.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from hashlib import blake2b
from pathlib import Path

import rollyard
from rollyard.core import Json
from rollyard.sandbox import BubblewrapRuntime, LocalRuntime, Sandbox, SandboxSpec
from rollyard.tools.shell import Shell, ShellOutcome

PEERS = Path(rollyard.__file__).parents[2] / "bench" / "peers"
CACHE = Path.home() / ".cache" / "rollyard" / "bench"
SHELLS = 200
INSTALL_S = 300.0
PEER_S = 180.0

_RUNTIMES = {"bubblewrap": BubblewrapRuntime, "local": LocalRuntime}


async def bench_shell(*, quick: bool = False, runtime: str = "bubblewrap", peers: bool = True) -> dict[str, Json]:
    """`metrics` and `versus`; a peer that cannot be measured is {"error": why}."""
    calls = 100 if quick else 500
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as folder:
        async with _RUNTIMES[runtime](root=Path(folder)) as opened:
            metrics = await _starts(opened, 15 if quick else 50)
            metrics |= await _echoes(opened, calls)
            metrics |= await _many(opened, 20 if quick else 100)
    versus: dict[str, Json] = {}
    if peers:
        versus["swe-rex"] = await asyncio.to_thread(_measure, "swe_rex", 100 if quick else 300)
        versus["tmux"] = await asyncio.to_thread(_measure, "tmux", 10 if quick else 40)
        versus["bash -lc"] = await asyncio.to_thread(_measure, "bash_lc", calls)
    return {"metrics": metrics, "versus": versus}


# --- ours ---------------------------------------------------------------------------------------------


async def _starts(runtime: BubblewrapRuntime | LocalRuntime, count: int) -> dict[str, Json]:
    times: list[float] = []
    for _ in range(count + 1):  # the first one starts the launcher, too
        began = time.perf_counter()
        sandbox = await runtime.start(SandboxSpec(owner="bench"), lease_s=600.0)
        times.append((time.perf_counter() - began) * 1000)
        await sandbox.kill()
    return {"start_p50_ms": round(statistics.median(times[1:]), 2)}


async def _echoes(runtime: BubblewrapRuntime | LocalRuntime, count: int) -> dict[str, Json]:
    sandbox = await runtime.start(SandboxSpec(owner="bench"), lease_s=600.0)
    shell = await Shell.open(sandbox)
    times: list[float] = []
    for number in range(count + 20):
        began = time.perf_counter()
        await _echo(shell, number)
        times.append((time.perf_counter() - began) * 1000)
    await shell.close()
    await sandbox.kill()
    ordered = sorted(times[20:])
    p99 = ordered[int(count * 0.99)]
    return {"echo_p50_ms": round(statistics.median(ordered), 4), "echo_p99_ms": round(p99, 4), "echo_calls": count}


async def _many(runtime: BubblewrapRuntime | LocalRuntime, each: int) -> dict[str, Json]:
    async def open_one() -> tuple[Sandbox, Shell]:
        sandbox = await runtime.start(SandboxSpec(owner="bench"), lease_s=600.0)
        return sandbox, await Shell.open(sandbox, output_bytes=16_384)

    async def work(shell: Shell) -> None:
        for number in range(each):
            await _echo(shell, number)

    pairs = await asyncio.gather(*[open_one() for _ in range(SHELLS)])
    await asyncio.gather(*[_echo(shell, 0) for _, shell in pairs])
    began = time.perf_counter()
    await asyncio.gather(*[work(shell) for _, shell in pairs])
    duration_s = time.perf_counter() - began
    await asyncio.gather(*[shell.close() for _, shell in pairs])
    await asyncio.gather(*[sandbox.kill() for sandbox, _ in pairs])
    return {"commands_per_s_200": round(SHELLS * each / duration_s, 1)}


async def _echo(shell: Shell, number: int) -> None:
    result = await shell.run(f"echo hello {number}", 60.0)
    if result.outcome is not ShellOutcome.COMPLETED or result.output != f"hello {number}\n":
        raise RuntimeError(f"echo gave {result}")


# --- the peers ----------------------------------------------------------------------------------------


def _measure(peer: str, count: int) -> Json:
    driver, requirements = PEERS / f"{peer}.py", PEERS / f"{peer}.txt"
    if not driver.is_file():
        return {"error": "the peers' drivers are in the repository's bench folder, not in the installed package"}
    try:
        python = _environment(peer, requirements) if requirements.is_file() else Path(sys.executable)
        argv = [str(python), str(driver), str(count)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PEER_S, check=True)
        figures = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        return {name: round(value, 3) for name, value in figures.items()}
    except subprocess.CalledProcessError as error:
        return {"error": f"{error.cmd[0]} ended with {error.returncode}: {error.stderr.strip()[-500:]}"}
    except (OSError, subprocess.TimeoutExpired, ValueError, StopIteration) as error:
        return {"error": str(error)[-500:]}


def _environment(peer: str, requirements: Path) -> Path:
    """The Python of the peer's own virtual environment, made on first use; another pin is another environment."""
    pins = requirements.read_bytes() + sys.version.encode()
    folder = CACHE / f"{peer}-{blake2b(pins, digest_size=6).hexdigest()}"
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    try:
        for argv in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(requirements)],
        ):
            subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S, check=True)
        (folder / "ready").touch()
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
        raise
    return python
