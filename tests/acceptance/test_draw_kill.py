"""Batches of a draw while the service and its trainer are killed repeatedly.

Every group is delivered once; under `deliver` no group is dropped; under `wait` no group exceeds the staleness bound; a
restarted trainer receives the same batches again; and at the end the engines have no session left.
"""

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from rollyard import AsyncClient
from rollyard.core import Json
from tests.acceptance.test_kill import Service, call, engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TASKS = 60

SCRIPT: dict[str, Json] = {
    "rules": [
        {"if": "write good", "turns": [call("shell", command="echo good > out.txt"), call("finish")]},
    ],
    "default": ["ok"],
}


def task(number: int) -> dict[str, Any]:
    """Its reward is random, so that about half of the groups have different rewards."""
    check = 'test "$(cat out.txt)" = good && test $(( $(od -An -N1 -tu1 /dev/urandom) % 2 )) = 0'
    return {"environment": "shell", "data": {"instruction": f"write good, number {number}", "checks": [check]}}


class Trainer:
    def __init__(self, service: Service, folder: Path, on_stale: str, batches: int) -> None:
        self._batches = batches
        self._service = service
        self._folder = folder
        self._on_stale = on_stale
        self._process: asyncio.subprocess.Process | None = None
        self.journal = folder / "journal"

    async def start(self) -> None:
        script = Path(__file__).with_name("draw_trainer.py")
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(script), self._service.url, self._service.token, str(self.journal)),
            *(self._on_stale, str(self._batches), str(self._folder / "tasks.jsonl")),
            env={**os.environ, "PYTHONPATH": ""},
        )

    async def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def gets(self, more: int) -> None:
        """Waits until it has received that many more batches, or is done."""
        enough = len(self.entries()) + more
        while len(self.entries()) < enough and not self.is_done:
            await asyncio.sleep(0.05)

    async def wait(self) -> None:
        assert self._process is not None
        assert await self._process.wait() == 0

    @property
    def is_done(self) -> bool:
        return self._process is not None and self._process.returncode == 0

    def entries(self) -> list[dict[str, Any]]:
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        parsed: list[dict[str, Any]] = []
        for line in lines:
            try:
                parsed.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # an incomplete line: it was killed while writing
        return parsed


@pytest.mark.parametrize("on_stale", ["deliver", "wait"])
async def test_batches_survive_kills_of_service_and_trainer(tmp_path: Path, on_stale: str) -> None:
    await deaths_on_both_sides(tmp_path, on_stale, batches=8, kills=2)


async def deaths_on_both_sides(folder: Path, on_stale: str, *, batches: int, kills: int) -> dict[str, int]:
    """Kills the service and the trainer `kills` times each. Raises AssertionError if a group was lost or delivered
    twice."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task(number)) + "\n" for number in range(TASKS)))
    async with engine(folder, SCRIPT) as engine_url:
        service = Service(folder, engine_url)
        await service.start()
        trainer = Trainer(service, folder, on_stale, batches)
        await trainer.start()
        deaths = ["service", "trainer"] * kills
        chance.shuffle(deaths)
        try:
            for victim in deaths:
                await trainer.gets(chance.randint(1, 2))
                await asyncio.sleep(chance.uniform(0.0, 0.2))
                if trainer.is_done:
                    break
                if victim == "service":
                    await service.kill()
                    await service.start()
                else:
                    await trainer.kill()
                    await trainer.start()
            await trainer.wait()
            async with AsyncClient(service.url, service.token) as client:
                draw = await client.get_draw("d")
                facts = await draw.status()
                await draw.close()
                async with asyncio.timeout(90):
                    while any(one["sessions"] or one["in_flight"] for one in await client.engines()):
                        await asyncio.sleep(0.1)
                async with asyncio.timeout(90):
                    while (await draw.status())["figures"]["open"]:
                        await asyncio.sleep(0.1)
                assert (await draw.status())["figures"]["complete"] == 0, "the service has lost groups"
        finally:
            await trainer.kill()
            await service.stop()
    entries = trainer.entries()
    got: dict[int, dict[str, Any]] = {}
    for entry in entries:
        assert got.setdefault(entry["number"], entry) == entry, "a repeated batch is the same"
    assert sorted(got) == list(range(1, batches + 1))
    groups = [group for number in sorted(got) for group in got[number]["groups"]]
    names = [group["id"] for group in groups]
    assert len(names) == len(set(names)) == 4 * batches, "every group once"
    assert all(sorted(group["rewards"]) == [0.0, 1.0] for group in groups), "only groups with signal"
    assert all(tokens for group in groups for tokens in group["tokens"])
    figures = facts["figures"]
    assert figures["dropped"] == figures["cancelled"] == figures["void"] == 0
    assert figures["delivered"] == 4 * batches
    ends = ("open", "complete", "delivered", "filtered", "failed")
    assert figures["admitted"] == sum(figures[name] for name in ends)
    assert len(entries) > len(got), "the kills hit something"
    if on_stale == "wait":
        for number, batch in got.items():
            for group in batch["groups"]:
                assert batch["version"] - group["admitted"] <= 1, (number, group["id"])
    return {"batches": len(got), "batches_got": len(entries), "kills": 2 * kills, "groups": len(groups)}
