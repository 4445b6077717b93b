"""Runs the demo's rollouts: an engine and a service, each a process on loopback, and held-out tasks of yardwork.

Both processes end with the demo, also by Ctrl-C. Tasks, ids and seeds are fixed, so that the samples are the same on
the same machine. Sizes are for two cores: all rollouts run at once, because a step of the engine costs little more for
twelve sequences than for one.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from rollyard.cli._console import CommandError, plain
from rollyard.cli._exporting import write_kept_page
from rollyard.cli.demo.following import RUN, follow
from rollyard.cli.demo.result import DemoModel, DemoResult
from rollyard.cli.demo.view import show_best, show_results, waiting
from rollyard.cli.rig import service, stop
from rollyard.client import AsyncClient, Record
from rollyard.envs.yardwork import YardworkEnvironment

SEED = 3
"""Seed of the held-out tasks. The reference trainer selects by seed 1 and reports seed 2."""

LEVELS = (1, 2)

TRAINED = (
    "find_content",
    "find_size",
    "find_name",
    "chain",
    "count_lines",
    "count_matches",
    "count_files",
    "total",
    "extremum",
)
"""The families that the adapter in the package was trained on (docs/results/learning.md)."""

DEFAULTS: dict[str, Any] = {
    "sampling": {"max_tokens": 80},
    "limits": {"max_turns": 8, "max_tokens": 320, "max_context": 1024, "run_s": 900.0},
    "agent": {"name": "native", "options": {"schemas": False}},
}
"""As in training, except for `run_s`: a slow machine takes longer, which is not the model's fault."""

AT_ONCE = 12
START_S = 120.0
WITHIN_S = 1800.0


def demo_tasks(count: int) -> list[dict[str, Any]]:
    """Returns held-out tasks, spread over families and levels. A larger count begins with the same tasks."""
    size = len(LEVELS) * len(TRAINED)
    rounds = -(-count // size)
    chosen = {"split": "held_out", "seed": str(SEED), "levels": f"{LEVELS[0]}-{LEVELS[-1]}", "rules": "trained"}
    chosen["families"] = ",".join(TRAINED)
    pool = [dict(task) for task in YardworkEnvironment().generate({**chosen, "count": str(rounds * size)})]
    # A step of about 0.4 of the size, coprime to it, visits every task once and alternates between families.
    step = next(step for step in range(int(0.41 * size), size) if math.gcd(step, size) == 1)
    return [pool[place // size * size + place % size * step % size] for place in range(count)]


async def play(console: Console, player: DemoModel, count: int, *, is_quiet: bool = False) -> DemoResult:
    """Runs the tasks and shows their progress; with `is_quiet`, no results."""
    end_gently()
    tasks = demo_tasks(count)
    heat = "greedily" if player.temperature == 0 else f"at temperature {player.temperature:g}"
    what = "1 held-out task" if count == 1 else f"{count} held-out tasks"
    console.print(f"[bold]Rollyard[/]: {plain(player.name)}, sampled {heat}, on {what} of yardwork.")
    console.print("A service on loopback, a bubblewrap sandbox per rollout, the model on this machine's CPU.\n")
    with tempfile.TemporaryDirectory(prefix="rollyard-demo-") as name:
        async with AsyncExitStack() as stack:
            with waiting(console, "Starting the engine and the service (seconds; longer the first time)"):
                # The service starts while the engine loads its model: each takes seconds.
                engine = await stack.enter_async_context(engine_process(player))
                client = await stack.enter_async_context(_service(Path(name)))
                url = await engine.ready()
                await client.add_engine(url=url, kind="vllm", tokenizer=str(player.folder), capacity=AT_ONCE)
                await _warm_up(client, tasks[0])
            started = time.monotonic()
            records = await run_tasks(console, client, player, tasks)
            took_s = time.monotonic() - started
            played = DemoResult(player, records, took_s, await write_kept_page(client, records, "demo"))
            if not is_quiet:
                show_results(console, played)
                await show_best(console, client, played)
    return played


def end_gently() -> None:
    """Treats SIGTERM and SIGHUP as Ctrl-C, so that the two processes are not left behind."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, signal.raise_signal, signal.SIGINT)


async def _warm_up(client: AsyncClient, task: dict[str, Any]) -> None:
    """Samples one token of one task before time is measured. Raises `CommandError` if the engine or sandbox fails."""
    one = {"sampling": {"max_tokens": 1}, "limits": {**DEFAULTS["limits"], "max_turns": 1}}
    await client.create_run("warm-up", defaults={**DEFAULTS, **one})
    (submitted,) = await client.submit([task], run="warm-up")
    failure = (await client.wait(submitted.id, timeout_s=START_S)).failure
    if failure and failure["blame"] != "policy":
        raise CommandError(f"a first rollout failed: {failure['code']}: {failure['detail']}", "rollyard doctor")


async def run_tasks(
    console: Console, client: AsyncClient, player: DemoModel, tasks: list[dict[str, Any]]
) -> list[Record]:
    """Runs the tasks, shows them on the board, and returns their records."""
    sampling = {**DEFAULTS["sampling"], "temperature": player.temperature}
    await client.create_run(RUN, seed=SEED, defaults={**DEFAULTS, "sampling": sampling})
    return await follow(console, client, tasks, WITHIN_S)


# --- the two processes


@asynccontextmanager
async def _service(folder: Path) -> AsyncGenerator[AsyncClient, None]:
    slots = {"run_slots": AT_ONCE, "ready_slots": AT_ONCE, "init_slots": 2, "eval_slots": 2}
    async with AsyncExitStack() as stack:
        try:
            served = await stack.enter_async_context(service(folder, slots))
        except RuntimeError as error:
            raise CommandError(
                _last(str(error).splitlines()) or "the service did not start", "rollyard doctor"
            ) from error
        yield await stack.enter_async_context(AsyncClient(served.url, served.token))


class EngineProcess:
    """A `rollyard engine` process. Keeps its last output, to explain why it did not become ready."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._stderr_lines: deque[str] = deque(maxlen=50)
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        """Reads all of stderr, so that its pipe does not fill up."""
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._stderr_lines.append(line.decode(errors="replace"))

    async def ready(self) -> str:
        """Returns its URL. Raises `CommandError` with its last line if it ends instead."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), START_S)
        if line:
            return json.loads(line)["url"]
        await self._reading
        raise CommandError(
            _last(list(self._stderr_lines)) or "the engine ended before it was ready", "rollyard engine --help"
        )

    async def end(self) -> None:
        await stop(self._process)
        await self._reading


@asynccontextmanager
async def engine_process(player: DemoModel, at_once: int = AT_ONCE) -> AsyncGenerator[EngineProcess, None]:
    """Starts the engine, which may not be ready yet, and stops it at the end."""
    arguments = ["--model", str(player.folder), "--name", player.folder.name, "--port", "0", "--json"]
    arguments += ["--device", "cpu", "--max-context", "2048", "--max-running", str(at_once), "--cache-gib", "1"]
    if player.adapter is not None:
        arguments += ["--adapter", str(player.adapter)]
    process = await asyncio.create_subprocess_exec(
        player.python or sys.executable, "-m", "rollyard", "engine", *arguments,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    engine = EngineProcess(process)
    try:
        yield engine
    finally:
        await engine.end()


def _last(lines: list[str]) -> str:
    """Returns the last line that is not empty, without the prefix `rollyard:`."""
    return next((line.strip().removeprefix("rollyard: ") for line in reversed(lines) if line.strip()), "")
