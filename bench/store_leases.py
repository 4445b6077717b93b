"""Measures how fast a store leases many rollouts, in batches that are each durable: the main load of a fleet."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollyard.core import Rollout, Run, State, Task
from rollyard.store.base import Store, Submission

BATCH = 256
"""Rollouts of one lease: about as many as a head sends in one response to a node."""


@dataclass(frozen=True, slots=True)
class LeaseRate:
    count: int
    submit_s: float  # to submit all of them first
    lease_s: float
    slowest_batch_s: float

    @property
    def leases_per_s(self) -> float:
        return self.count / self.lease_s


async def measure_leases(store: Store, count: int, *, batch: int = BATCH, nodes: int = 8) -> LeaseRate:
    """Submits `count` rollouts to a new run and leases them all, one batch after the other, to several nodes."""
    name = f"bench-leases-{store.epoch}-{time.time_ns()}"
    await store.put_run(Run(name), {})
    ids = [f"{name}-{i}" for i in range(count)]
    task = Task("shell", {"instruction": "say hello", "files": {"notes.txt": "x" * 400}})
    started = time.perf_counter()
    for first in range(0, count, 1000):
        few = ids[first : first + 1000]
        await store.submit([Submission(Rollout(rollout_id, name, task), {"id": rollout_id}) for rollout_id in few])
    submitted = time.perf_counter()
    slowest = 0.0
    for number, first in enumerate(range(0, count, batch)):
        requests = [(rollout_id, 1, f"node-{number % nodes}") for rollout_id in ids[first : first + batch]]
        before = time.perf_counter()
        got = await store.lease(requests)
        slowest = max(slowest, time.perf_counter() - before)
        assert len(got) == len(requests), "a queued rollout could not be leased"
    ended = time.perf_counter()
    assert (await store.counts())[State.INIT] >= count
    return LeaseRate(count, submitted - started, ended - submitted, slowest)
