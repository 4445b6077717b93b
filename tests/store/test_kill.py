"""kill -9 at random times: every acknowledged write is stored, and no rollout ends twice.

Each victim continues where the previous one stopped, and another process does the last opening: with PostgreSQL, as on
another machine."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from random import Random

import pytest

from rollyard.core import State
from rollyard.store import open_store
from tests.store.conftest import AnyOpener, PostgresOpener
from tests.store.listing import all_rollouts

pytestmark = pytest.mark.slow

VICTIM = Path(__file__).with_name("victim.py")


async def _run_and_kill(name: str, lines: int) -> list[dict[str, object]]:
    """Returns what a victim had acknowledged when it was killed, after that many lines."""
    process = await asyncio.create_subprocess_exec(sys.executable, VICTIM, name, stdout=PIPE)
    assert process.stdout is not None
    output = [await process.stdout.readline() for _ in range(lines)]
    process.kill()
    output += (await process.stdout.read()).splitlines(keepends=True)  # it continued until the signal arrived
    await process.wait()
    return [json.loads(line) for line in output if line.endswith(b"\n")]


async def test_no_acknowledged_write_is_lost_and_no_rollout_ends_twice(open_any: AnyOpener) -> None:
    await (await open_any()).close()
    name, random = open_any.url if isinstance(open_any, PostgresOpener) else str(open_any.path), Random()
    submitted: set[str] = set()
    ended: dict[str, tuple[object, object]] = {}
    for _ in range(10):
        for line in await _run_and_kill(name, random.randint(1, 120)):
            if "submitted" in line:
                submitted.add(str(line["submitted"]))
            elif "ended" in line:
                rollout_id = str(line["ended"])
                assert rollout_id not in ended
                ended[rollout_id] = (line["seq"], line["attempt"])
    assert ended
    async with await open_store(name, max_attempts=1000) as store:
        stored = {rollout.id: rollout for rollout in await all_rollouts(store)}
        assert submitted <= set(stored)
        for rollout_id, acknowledged in ended.items():
            assert (stored[rollout_id].ended_seq, stored[rollout_id].attempt) == acknowledged
        terminal = [rollout for rollout in stored.values() if rollout.state is State.ENDED]
        assert len({rollout.ended_seq for rollout in terminal}) == len(terminal) >= len(ended)
        for rollout in terminal:
            assert rollout.ending is not None and rollout.ending.score is not None
            assert rollout.ending.score.reward == int(rollout.id.rsplit("-", 1)[1]) % 7
            trajectory = await store.trajectory(rollout.id)
            assert trajectory is not None and trajectory.attempt == rollout.attempt
