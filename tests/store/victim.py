"""Ends rollouts and reports them, until it is killed. `victim.py STORE`; see test_kill.py.

It continues what an earlier one left: queued rollouts and evaluations. Each line on stdout is a write that the store
has acknowledged: {"submitted": id} or {"ended": id, "seq": n, "attempt": n}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from rollyard.core import Ending, Outcome, Position, Run, Score, State
from rollyard.store import open_store
from rollyard.testing.store_conformance import advance, submission, trajectory


def report(**what: object) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")  # one write: a line is complete or missing


def reward(rollout_id: str) -> float:
    return int(rollout_id.rsplit("-", 1)[1]) % 7


async def main(name: str) -> None:
    async with await open_store(name, max_attempts=1000) as store:
        await store.put_run(Run("run"), {})
        report(opened=store.epoch)

        async def evaluate(rollout_id: str, at: Position) -> None:
            ending = Ending(Outcome.COMPLETED, Score(reward(rollout_id)), is_trainable=True)
            ended = await store.end(rollout_id, at, ending)
            report(ended=rollout_id, seq=ended.ended_seq, attempt=ended.attempt)

        async def work(rollout_id: str, attempt: int) -> None:
            at = await advance(store, rollout_id, State.RUN, attempt)
            info = {"is_reevaluable": rollout_id.endswith("1")}
            await store.save_run(rollout_id, at, trajectory(rollout_id, attempt), info)
            await evaluate(rollout_id, at.to(State.EVAL))

        async def worker(number: int) -> None:
            for i in range(1_000_000):
                rollout_id = f"e{store.epoch}-w{number}-{i}"
                await store.submit([submission(rollout_id)])
                report(submitted=rollout_id)
                await work(rollout_id, 1)

        async with asyncio.TaskGroup() as group:
            for rollout_id in store.recovered.evals:
                group.create_task(evaluate(rollout_id, (await store.get(rollout_id)).position))
            for row in await store.queued():
                group.create_task(work(row.id, row.attempt))
            for number in range(8):
                group.create_task(worker(number))


asyncio.run(main(sys.argv[1]))
