"""Fills a small disk with a store, in its own mount namespace. `full_disk.py FOLDER`; see test_breaks.py.

Prints as JSON what the store acknowledged, how it failed, and what it contained after some space was freed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

from rollyard.core import Position, Run, State
from rollyard.store import SqliteStore, StoreUnusable
from rollyard.testing.store_conformance import completed, submission, trajectory


async def main(folder: Path) -> None:
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(350_000))
    report: dict[str, object] = {}
    acknowledged: list[str] = []
    store = await SqliteStore.open(folder / "rollyard.db")
    await store.put_run(Run("run"), {})

    async def work(number: int) -> None:
        for i in range(1000):
            rollout_id = f"w{number}-{i}"
            await store.submit([submission(rollout_id)])
            big = replace(trajectory(rollout_id), info={"text": "x" * 3000})
            await store.end(rollout_id, Position(), completed(), big)
            acknowledged.append(rollout_id)

    results = await asyncio.gather(*(work(number) for number in range(4)), return_exceptions=True)
    report["failures"] = sorted({f"{type(result).__name__}: {result}" for result in results})
    later = []
    for call in (store.submit([submission("later")]), store.get("w0-0"), store.counts()):
        try:
            await call
        except StoreUnusable as error:
            later.append(str(error))
    report["later"] = later
    await store.close()
    ballast.unlink()
    async with await SqliteStore.open(folder / "rollyard.db") as again:
        ended = (await again.list(state=State.ENDED, limit=1000)).rollouts
        report["ended"] = [rollout.id for rollout in ended]
        report["trajectories"] = sum([await again.trajectory(rollout.id) is not None for rollout in ended])
        (stored,) = await again.submit([submission("later")])
        report["works_again"] = stored.id == "later"
    print(json.dumps(report | {"acknowledged": acknowledged}))


asyncio.run(main(Path(sys.argv[1])))
