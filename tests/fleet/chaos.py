"""A fleet of processes that is broken on purpose: a head, nodes and an engine, killed and frozen while rollouts run.

The number of ended rollouts triggers each event, not the clock: on a slow machine as on a fast one, everything happens
while rollouts run. Processes are counted by descent: while we are `adopting`, a process that outlives its parent
becomes our child, so a remaining sandbox cannot hide.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from rollyard.client import AsyncClient, Record, ServiceUnreachable
from rollyard.core import Json
from rollyard.sandbox.launcher import kernel
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.fleet.fleet_site import ProcessNode
from tests.worker import free_port

MAX_ATTEMPTS = 8
GROUP_SIZE = 4
LOT = 250
START_S = 60.0
SETTLE_S = 60.0
SIZES = {"init_slots": 3, "run_slots": 8, "eval_slots": 4, "ready_slots": 4}

FAIRLY_LOST = {"node_lost", "server_restarted", "lost_to_restarts", "engine_unavailable", "engine_timeout", "drained"}
"""What killing and freezing may do to an attempt. Any other code is a bug."""


def call(name: str, **arguments: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


SCRIPT: dict[str, Json] = {
    "rules": [
        {"if": "write good", "turns": [call("shell", command="echo good > out.txt") + "\n" + call("finish")]},
        {"if": "write bad", "turns": [call("shell", command="echo bad > out.txt"), call("finish")]},
        {"if": "say good", "turns": ["It is \\boxed{4}."]},
        {"if": "say bad", "turns": ["It is \\boxed{5}."]},
    ],
    "default": ["ok"],
}


def task(number: int) -> dict[str, Json]:
    """Its reward is known beforehand. Of eight, one is isolated, one runs as a local process, and six need no sandbox:
    the six give the numbers, the others cost the time."""
    word = "good" if reward(number) else "bad"
    if number % 8 > 1:
        return {"environment": "math", "data": {"question": f"say {word}", "answer": "4"}}
    data: dict[str, Json] = {"instruction": f"write {word}", "checks": ['test "$(cat out.txt)" = good']}
    return {"environment": "shell", "data": data, "sandbox": {"runtime": "bubblewrap" if number % 8 else "local"}}


def reward(number: int) -> float:
    return 1.0 if number % 3 else 0.0


def number_of(rollout_id: str) -> int:
    """Returns the task's number: `r7` and `g7-2` are of task 7."""
    return int(rollout_id[1:].partition("-")[0])


class Head:
    """`rollyard serve --fleet …` on one data folder and one port, started as often as it is killed."""

    def __init__(self, folder: Path, engine_url: str, lease_s: float, **more: Json) -> None:
        self.data_dir = folder / "head"
        self.port = free_port()
        self._log = (folder / "head.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None
        settings: dict[str, Json] = {
            "data_dir": str(self.data_dir),
            "port": self.port,
            "runtimes": "local,bubblewrap",
            "fleet": "nodes",
            "node_lease_s": lease_s,
            "node_hold_s": 120,
            "max_attempts": MAX_ATTEMPTS,
            "drain_s": 10,
            "log_level": "info",
            "engines": json.dumps([{"id": "e1", "url": engine_url, "tokenizer": str(tokenizer_dir())}]),
            **SIZES,
            **more,
        }
        self._settings = {f"ROLLYARD_{name.upper()}": str(value) for name, value in settings.items()}

    async def start(self) -> None:
        url_file = self.data_dir / "url"
        url_file.unlink(missing_ok=True)
        env = {key: value for key, value in os.environ.items() if not key.startswith("ROLLYARD_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollyard", "serve"],
            env=env | self._settings,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        async with asyncio.timeout(START_S):
            while not url_file.exists():
                assert self._process.poll() is None, "the head did not start"
                await asyncio.sleep(0.02)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def node_token_file(self) -> Path:
        return self.data_dir / "node-token"

    def client(self) -> AsyncClient:
        return AsyncClient(self.url, (self.data_dir / "token").read_text().strip())

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    async def stop(self) -> int:
        """Ends the head with a signal, without killing it."""
        assert self._process is not None
        self._process.terminate()
        return await _exit_of(self._process)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self._log.close()


@dataclass
class Fleet:
    """A head and its nodes. `did` lists what was done to them, with the number of ended rollouts at that moment."""

    folder: Path
    head: Head
    nodes: dict[str, ProcessNode] = field(default_factory=dict[str, ProcessNode])
    did: list[str] = field(default_factory=list[str])
    _number: int = 0

    @property
    def names(self) -> set[str]:
        """Returns the names of the nodes that should be connected."""
        return set(self.nodes)

    def add_node(self) -> str:
        self._number += 1
        name = f"n{self._number}"
        self.nodes[name] = ProcessNode(self.head.url, self.head.node_token_file, self.folder, name)
        return name

    async def joined(self, *names: str) -> None:
        await self.until(lambda there: set(names) <= there.keys(), f"{names} are there")

    async def until(self, is_so: Callable[[dict[str, Any]], bool], what: str, within_s: float = SETTLE_S) -> None:
        """Waits until the head's nodes are as required."""
        there: dict[str, Any] = {}
        async with self.head.client() as client:
            try:
                async with asyncio.timeout(within_s):
                    while not is_so(there := {str(node["name"]): node for node in await client.nodes()}):
                        await asyncio.sleep(0.05)
            except TimeoutError as error:
                raise AssertionError(f"not within {within_s:g} s: {what}; there is {there}") from error

    # --- faults ---------------------------------------------------------------------------------------

    async def kill_node(self) -> None:
        """Kills the oldest node and starts one with another name."""
        node = self.nodes.pop(next(iter(self.nodes)))
        node.process.kill()
        node.close()
        self.add_node()

    async def freeze_node(self) -> None:
        """Freezes the youngest node that has work until it counts as lost, then resumes it: it must join again by
        itself. (The youngest of all may join so late, on a slow machine, that the others have done everything.)"""
        busy: list[str] = []

        def has_work(there: dict[str, Any]) -> bool:
            busy[:] = [name for name in self.nodes if name in there and there[name]["live"] > 0]
            return bool(busy)

        await self.until(has_work, "a node has work")
        name = busy[-1]
        self.nodes[name].signal(signal.SIGSTOP)
        await self.until(lambda there: name not in there, f"{name} is lost")
        self.nodes[name].signal(signal.SIGCONT)
        await self.joined(name)

    async def kill_head(self) -> None:
        self.head.kill()
        await self.head.start()

    async def stop(self) -> None:
        """Stops everything in order: each process ends by itself with status 0."""
        for node in self.nodes.values():
            node.process.terminate()
        for name, node in self.nodes.items():
            assert await _exit_of(node.process) == 0, f"{name} did not end well"
        assert await self.head.stop() == 0, "the head did not end well"

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
        self.head.close()


async def submit_all(fleet: Fleet, count: int) -> set[str]:
    """Submits in lots, each repeated until it was answered. Half of them are in groups. Returns all ids."""
    half = count // 2
    ids: set[str] = set()
    for first in range(0, half, LOT):
        numbers = range(first, min(first + LOT, half))
        names = [f"r{number}" for number in numbers]
        ids |= set(names)
        await _submit(fleet, [task(number) for number in numbers], names)
    groups = (count - half) // GROUP_SIZE
    for first in range(0, groups, LOT // GROUP_SIZE):
        numbers = range(first, min(first + LOT // GROUP_SIZE, groups))
        names = [f"g{number}" for number in numbers]
        ids |= {f"{name}-{k}" for name in names for k in range(GROUP_SIZE)}
        await _submit(fleet, [task(number) for number in numbers], names, GROUP_SIZE)
    assert len(ids) == count
    return ids


async def _submit(fleet: Fleet, tasks: list[dict[str, Json]], ids: list[str], group_size: int | None = None) -> None:
    while True:
        try:
            async with fleet.head.client() as client:
                await client.submit(tasks, ids=ids, group_size=group_size)
            return
        except ServiceUnreachable:
            await asyncio.sleep(0.1)


async def break_it(fleet: Fleet, count: int, deeds: Sequence[str], within_s: float) -> list[Record]:
    """Applies the faults that `deeds` name, spread over the run; returns the terminal records, in their order."""
    records: list[Record] = []
    after: str | None = None
    remaining = list(deeds)
    started_at = time.monotonic()
    while len(records) < count:
        assert time.monotonic() - started_at < within_s, f"{len(records)} of {count} have ended; done: {fleet.did}"
        async with fleet.head.client() as client:
            page = await client.list(state="ended", after=after, limit=1000, wait_s=1)
        records += page.rollouts
        after = page.next or after
        if remaining and len(records) >= count * (len(deeds) - len(remaining) + 1) / (len(deeds) + 2):
            deed = remaining.pop(0)
            fleet.did.append(f"{deed} at {len(records)} after {time.monotonic() - started_at:.0f} s")
            await getattr(fleet, deed)()
    fleet.did.append(f"all after {time.monotonic() - started_at:.0f} s")
    assert not remaining, remaining
    return records


async def explain(fleet: Fleet, records: Sequence[Record]) -> None:
    """Prints all that is known of the rollouts that did not end as scripted."""
    async with fleet.head.client() as client:
        for record in [record for record in records if not _is_right(record)][:3]:
            print(record)
            print(json.dumps((await client.trajectory(record.id)).messages, indent=1))


def judge(records: Sequence[Record], ids: set[str]) -> str:
    """Checks that nothing is missing, duplicated or invented. Returns a description of what was lost meanwhile."""
    end_counts = Counter(record.id for record in records)
    assert set(end_counts) == ids, (
        f"missing: {sorted(ids - set(end_counts))[:9]}, unknown: {sorted(set(end_counts) - ids)[:9]}"
    )
    assert max(end_counts.values()) == 1, f"ended twice: {[one for one, times in end_counts.items() if times > 1]}"
    lost = Counter(str(lost["code"]) for record in records for lost in record.lost)
    failed = Counter(str(record.failure["code"]) for record in records if record.failure is not None)
    attempts = Counter(record.attempt for record in records)
    summary = f"lost attempts {dict(lost)}, failed {dict(failed)}, attempts {dict(sorted(attempts.items()))}"
    wrong = [record for record in records if not _is_right(record)]
    assert not wrong, f"{[(one.id, one.outcome, one.reward, one.failure, one.lost) for one in wrong[:5]]}; {summary}"
    assert not set(lost) - FAIRLY_LOST, summary
    assert lost["node_lost"] > 0, f"the kills hit nothing: {summary}"
    return summary


def _is_right(record: Record) -> bool:
    excused = sum(lost["code"] == "drained" for lost in record.lost)
    if len(record.lost) != record.attempt - 1 or record.attempt - excused > MAX_ATTEMPTS:
        return False
    if record.outcome == "completed":
        return record.reward == reward(number_of(record.id)) and record.failure is None
    failure = record.failure or {}
    return (
        record.outcome == "failed"
        and record.reward is None
        and failure.get("blame") == "infra"
        and failure.get("code") in FAIRLY_LOST
    )


async def wait_until_idle(fleet: Fleet, engine_url: str) -> None:
    """Waits until no node and no engine has any work, by their own reports."""
    await fleet.until(
        lambda there: (
            set(there) == fleet.names
            and all(node["live"] == 0 for node in there.values())
            and not any(
                use["sessions"] or use["in_flight"] for node in there.values() for use in node["engines"].values()
            )
        ),
        "all nodes are there, and empty",
    )
    async with fleet.head.client() as client:
        states = (await client.status())["states"]
        assert not any(count for state, count in states.items() if state != "ended"), states
        async with asyncio.timeout(SETTLE_S):
            while any(engine["sessions"] or engine["in_flight"] for engine in await client.engines()):
                await asyncio.sleep(0.05)
    async with aiohttp.ClientSession() as http, asyncio.timeout(SETTLE_S):
        while True:
            async with http.get(f"{engine_url}/metrics") as reply:
                metrics_text = await reply.text()
            running = [
                line.split()[-1] for line in metrics_text.splitlines() if line.startswith("vllm:num_requests_running")
            ]
            if [float(value) for value in running] == [0.0]:
                return
            await asyncio.sleep(0.05)


def below_us() -> dict[int, str]:
    """Returns the live processes below this one, with their command lines."""
    command_lines: dict[int, str] = {}
    for pid in kernel.descendants({os.getpid()}, kernel.running_processes()):
        with suppress(OSError):
            command_lines[pid] = (
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
            )
    return command_lines


async def nobody_left(before: dict[int, str]) -> None:
    """Waits until no process is left that was not there before, then reaps those that we adopted."""
    try:
        async with asyncio.timeout(SETTLE_S):
            while set(below_us()) - set(before):
                await asyncio.sleep(0.05)
    except TimeoutError as error:
        remaining = {pid: line for pid, line in below_us().items() if pid not in before}
        raise AssertionError(f"processes are left: {remaining}") from error
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


async def _exit_of(process: subprocess.Popen[bytes]) -> int:
    async with asyncio.timeout(SETTLE_S):
        while (status := process.poll()) is None:
            await asyncio.sleep(0.02)
    return status
