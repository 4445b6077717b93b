"""A service under a steady load, whose resource use must level off. `make soak SOAK=steady` runs an hour.

Rollouts are submitted at a fixed rate, their traces are acknowledged as they end, and retention deletes ended rollouts
after `RETAIN_S`. After the first third of the run all resources have reached their level: from then on memory,
descriptors, threads, processes, control groups and disk must not grow by more than `SLACK`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rollyard.cli._console import note, show, table
from rollyard.cli.rig import engine_process, service
from rollyard.client import AsyncClient
from rollyard.core import Json
from rollyard.sandbox.launcher import kernel
from rollyard.sandbox.limits.limiter import mark_of
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.service.fuzz import resident_bytes

RETAIN_S = 20.0
"""Short, so that a minute of load shows whether the store levels off."""

RUN = "steady"
SLACK = 0.25
SPARE = {"memory_mib": 48, "descriptors": 64, "threads": 16, "processes": 40, "cgroups": 40, "disk_mib": 48}
"""Allowed variation of each, whatever its level: the number of live rollouts differs between samples."""

_SHELL = '<tool_call>\n{"name": "shell", "arguments": {"command": "echo x > out.txt"}}\n</tool_call>'
SCRIPT = {
    "rules": [
        {"if": "write", "turns": [_SHELL + '\n<tool_call>\n{"name": "finish", "arguments": {}}\n</tool_call>']},
        {"if": "say", "turns": ["It is \\boxed{4}."]},
    ],
    "default": ["ok"],
}


@dataclass(frozen=True, slots=True)
class Look:
    """The resource use of the service and its sandboxes at one time."""

    second: int
    ended: int
    memory_mib: int
    descriptors: int
    threads: int
    processes: int
    cgroups: int
    disk_mib: int


def task(number: int) -> dict[str, Json]:
    """One in ten needs a sandbox."""
    if number % 10:
        return {"environment": "math", "data": {"question": f"say {number}", "answer": "4"}}
    return {"environment": "shell", "data": {"instruction": f"write {number}", "checks": ["test -f out.txt"]}}


@asynccontextmanager
async def _service(folder: Path) -> AsyncGenerator[tuple[AsyncClient, int], None]:
    """Yields a client of a new service with the scripted engine and the run `RUN`, and the service's PID."""
    (folder / "script.json").write_text(json.dumps(SCRIPT))
    async with engine_process(folder, 0.0) as (_, engine):
        engines = [{"id": "e1", "url": engine, "tokenizer": str(tokenizer_dir())}]
        settings: dict[str, Json] = {"engines": json.dumps(engines), "retain_s": RETAIN_S}
        async with service(folder, settings) as served, AsyncClient(served.url, served.token) as client:
            await client.create_run(RUN)
            yield client, served.process.pid


async def steady(folder: Path, *, per_s: int, seconds: float, looks: int) -> list[Look]:
    """Returns evenly spaced samples. Raises AssertionError if a rollout fails or the service does not keep up."""
    async with _service(folder) as (client, pid):
        load = _Load(client, per_s, seconds)
        samples: list[Look] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(load.submit())
            group.create_task(load.acknowledge())
            for number in range(1, looks + 1):
                await asyncio.sleep(load.started_at + seconds * number / looks - time.monotonic())
                samples.append(await asyncio.to_thread(_look, pid, folder / "data", round(load.second), load.ended))
        assert load.failed == 0, f"{load.failed} of {load.ended} rollouts failed"
        assert load.ended == load.submitted
        return samples


async def in_lots(folder: Path, *, looks: int, each: int) -> list[Look]:
    """Returns one sample after each lot of rollouts with sandboxes has ended, which is independent of speed."""
    samples: list[Look] = []
    async with _service(folder) as (client, pid):
        for number in range(1, looks + 1):
            records = await client.submit([task(0) for _ in range(each)], run=RUN)
            ended = await client.wait_all([record.id for record in records], run=RUN)
            assert all(record.reward == 1.0 for record in ended), ended
            while (await client.status())["pools"]["live"]["active"]:
                await asyncio.sleep(0.01)
            samples.append(await asyncio.to_thread(_look, pid, folder / "data", number, number * each))
    return samples


class _Load:
    def __init__(self, client: AsyncClient, per_s: int, seconds: float) -> None:
        self._client, self._per_s, self._seconds = client, per_s, seconds
        self.started_at = time.monotonic()
        self.submitted = self.ended = self.failed = 0
        self._is_over = False

    @property
    def second(self) -> float:
        return time.monotonic() - self.started_at

    async def submit(self) -> None:
        """Submits each second the rollouts that are due."""
        while self.second < self._seconds:
            due = min(int(self.second * self._per_s) - self.submitted, 1000)
            if due > 0:
                await self._client.submit([task(self.submitted + n) for n in range(due)], run=RUN)
                self.submitted += due
            assert self.submitted - self.ended < 60 * self._per_s, "the service does not keep up with this rate"
            await asyncio.sleep(1.0)
        self._is_over = True

    async def acknowledge(self) -> None:
        after: str | None = None
        while not (self._is_over and self.ended == self.submitted):
            page = await self._client.list(run=RUN, state="ended", after=after, limit=1000, wait_s=1)
            self.ended += len(page.rollouts)
            self.failed += sum(record.outcome != "completed" for record in page.rollouts)
            if page.rollouts and page.next is not None:
                after = page.next
                await self._client.acknowledge(RUN, after)


def _look(pid: int, data: Path, second: int, ended: int) -> Look:
    below = kernel.descendants({pid}, kernel.running_processes())
    own = f"/rollyard-{mark_of(data / 'sandboxes' / 'bubblewrap')}"  # test workers beside this have sandboxes, too
    return Look(
        second=second,
        ended=ended,
        memory_mib=resident_bytes(pid) >> 20,
        descriptors=len([*Path(f"/proc/{pid}/fd").iterdir()]),
        threads=len([*Path(f"/proc/{pid}/task").iterdir()]),
        processes=len(below),
        cgroups=sum(
            name.startswith("sbx_") for at, names, _ in os.walk("/sys/fs/cgroup") if at.endswith(own) for name in names
        ),
        disk_mib=_size_bytes(data) >> 20,
    )


def _size_bytes(folder: Path) -> int:
    total = 0
    for here, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # deleted meanwhile
                total += Path(here, name).lstat().st_blocks * 512
    return total


def print_looks(looks: list[Look]) -> None:
    names = [field.name for field in fields(Look)]
    looks_table = table(*names, right=tuple(names))
    for look in looks:
        looks_table.add_row(*(str(value) for value in asdict(look).values()))
    show(looks_table)


def grown(looks: list[Look]) -> Mapping[str, str]:
    """Returns what has not levelled off: compares the mean of the last third with that of the middle third."""
    third = len(looks) // 3
    middle, last = looks[third : 2 * third], looks[2 * third :]
    growing: dict[str, str] = {}
    for name, spare in SPARE.items():
        before, after = (sum(getattr(look, name) for look in part) / len(part) for part in (middle, last))
        if after > before * (1 + SLACK) and after > before + spare:
            growing[name] = f"{before:.0f} in the middle third, {after:.0f} in the last"
    return growing


async def hour(folder: Path) -> Mapping[str, Json]:
    """Runs the full-size load. `SOAK_S` and `SOAK_PER_S` set the length and the rate."""
    seconds, per_s = float(os.environ.get("SOAK_S", "3600")), int(os.environ.get("SOAK_PER_S", "50"))
    note(f"steady: {per_s} rollouts/s for {seconds:.0f} s")
    looks = await steady(folder, per_s=per_s, seconds=seconds, looks=30)
    print_looks(looks)
    assert not (growing := grown(looks)), f"still growing: {growing}"
    last = looks[-1]
    return {"rollouts": last.ended, "memory_mib": last.memory_mib, "disk_mib": last.disk_mib}
