"""The gateway alone, in a separate process: many sessions, each on its own loopback port, and one engine.

It prints one line of JSON with its `urls` when it is ready, and one with `stall_ms` for each SIGUSR1 (the longest time
that its event loop was blocked since the last one). On SIGTERM it verifies every trace and prints what it recorded.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack

import uvloop

from rollyard.core import Deadline, Limits, Run, Task, Trajectory
from rollyard.engines import EngineSpec, Kind, Router
from rollyard.gateway import GatewayApp, GatewaySession, open_gateway
from rollyard.pipeline import Renderers
from rollyard.sandbox.doorway import Doorway
from rollyard.service.server import settle_memory
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens import verify

TICK_S = 0.001


async def main(engine_url: str, count: int) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    task = Task("shell", limits=Limits(max_turns=1 << 30, run_s=1e9))
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(Router())
        await router.add(EngineSpec("e", engine_url, Kind.VLLM, tokenizer=str(tokenizer_dir()), capacity=4096))
        renderers = Renderers()
        sessions: list[GatewaySession] = []
        urls: list[str] = []
        for number in range(count):
            engine_session = await stack.enter_async_context(router.session("default", f"s{number}"))
            session = await open_gateway(
                engine_session, renderers.of, task=task, run=Run("bench"), rollout_id=f"s{number}", clock=Deadline(None)
            )
            listener = socket.create_server(("127.0.0.1", 0))
            doorway = Doorway(listener, owner=f"s{number}")
            stack.callback(doorway.close)
            await doorway.serve(GatewayApp(session))
            urls.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
            sessions.append(session)
        settle_memory()
        stalls = _Stalls()
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGUSR1, lambda: _print_json({"stall_ms": stalls.longest_ms()})
        )
        _print_json({"urls": urls})
        await ended.wait()
        stalls.end()
        for session in sessions:
            await session.close()
        _print_json(_proven(sessions))


class _Stalls:
    """The longest time that this process blocked its event loop: the delay of a tick that is due every millisecond. It
    is limited to the CPU time that the process used meanwhile: the rest was taken by other processes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._longest_s = 0.0
        self._used_s = time.process_time()
        self._due = time.monotonic() + TICK_S
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def longest_ms(self) -> float:
        self._tick()
        longest, self._longest_s = self._longest_s, 0.0
        return longest * 1000

    def end(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._timer.cancel()
        now, used_s = time.monotonic(), time.process_time()
        self._longest_s = max(self._longest_s, min(now - self._due, used_s - self._used_s))
        self._due, self._used_s = now + TICK_S, used_s
        self._timer = self._loop.call_later(TICK_S, self._tick)


def _proven(sessions: list[GatewaySession]) -> dict[str, object]:
    forks: dict[str, int] = {}
    turns = traces = 0
    for number, session in enumerate(sessions):
        trajectory = Trajectory(f"s{number}", 1, traces=session.traces(), turns=session.turns)
        verify(trajectory)
        turns += session.turns
        traces += len(trajectory.traces)
        for reason, times in session.forks.items():
            forks[reason] = forks.get(reason, 0) + times
    return {"completions": turns, "traces": traces, "forks": forks}


def _print_json(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], int(sys.argv[2])))
