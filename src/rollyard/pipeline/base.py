"""The interfaces between the pipeline, its executor and its attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollyard.core import (
    Deadline,
    Ending,
    Failure,
    Json,
    Message,
    Rollout,
    RollyardError,
    Run,
    State,
    Timings,
    Trajectory,
    WorkClock,
)
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import Tracer
from rollyard.pipeline.resources import StageResources
from rollyard.pipeline.settings import PipelineSettings
from rollyard.pipeline.worker_pool import WorkerPool
from rollyard.store.base import Stale, Store


class Shutdown(Exception):
    """The service is shutting down: the rollout is given back, without a failure."""


Verdict = Ending | Failure | Shutdown | Stale
"""How an attempt left its stages."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The conversation of an attempt so far. Some messages may not be storable (`attempts/storable.py`)."""

    attempt: int
    messages: Sequence[Message] = ()
    turns: int = 0
    sampled_tokens: int = 0  # of the calls that have returned
    conversation: int = 0  # another one of an agent program that has several
    message_turns: Mapping[int, int] | None = None  # of those that were sampled, by number; None: not known

    @classmethod
    def of(cls, trajectory: Trajectory, conversation: int = 0) -> Snapshot:
        """The conversation of an attempt whose RUN is over."""
        stored = trajectory.info.get("message_turns")
        turns: dict[int, int] | None = None
        if isinstance(stored, Sequence) and not isinstance(stored, str):
            turns = {number: turn for number, turn in enumerate(stored) if isinstance(turn, int)}
        return cls(
            trajectory.attempt,
            trajectory.messages,
            trajectory.turns,
            trajectory.sampled_tokens,
            conversation,
            turns,
        )


@dataclass(frozen=True, slots=True)
class MessagePage:
    """A part of a conversation, encoded."""

    attempt: int
    turns: int = 0
    sampled_tokens: int = 0
    messages: bytes = b"[]"  # a JSON list
    end: int = 0  # the number after its last message; 0: the conversation has no messages
    conversation: int = 0  # messages of pages with another number do not belong before or after these
    message_turns: Sequence[int | None] = ()  # of each message, None if it was not sampled here; empty: not known


class LiveRollout(Protocol):
    """A rollout that has left the queue and not ended: an attempt in this process, or a lease of a node."""

    clock: Deadline  # of the current stage

    @property
    def rollout(self) -> Rollout:
        """The rollout, with its current attempt."""
        ...

    @property
    def run(self) -> Run:
        """The run that it belongs to."""
        ...

    @property
    def state(self) -> State:
        """The stage that it is in, or READY."""
        ...

    def stop(self, reason: RollyardError | Shutdown | Stale) -> None:
        """Ends the work for this reason, after clean-up. The first reason counts."""
        ...

    def tick(self, now: float) -> float | None:
        """Renews what it holds. Returns the seconds since the last progress in RUN, if this process can observe it."""
        ...

    async def page(self, after: int) -> MessagePage | None:
        """Returns its conversation from message number `after` on; None if it runs in another process, which does not
        answer."""
        ...

    def timings(self) -> Timings:
        """Returns the seconds in each stage so far; those of the current one count up to now."""
        ...

    async def calls(self) -> Mapping[str, Json]:
        """Returns the calls of RUN so far, as `CallLog.info` does; empty if it runs in another process, which does not
        answer."""
        ...

    async def requests(self) -> bytes:
        """Returns the requests of an agent program so far, as JSON; empty if there are none, or if they are elsewhere
        and not available now."""
        ...


class AttemptHost(Protocol):
    """What an attempt uses of the pipeline that started it."""

    store: Store
    resources: StageResources
    settings: PipelineSettings
    init_pool: WorkerPool
    run_pool: WorkerPool
    eval_pool: WorkerPool
    ready: int
    unseated: int
    metrics: Metrics
    tracer: Tracer
    clock: WorkClock

    def publish(self, rollout: Rollout) -> None:
        """Publishes the rollout's new state to readers of events."""
        ...

    def requeued(self, rollout: Rollout, delay_s: float) -> None:
        """Called when an attempt was lost; the rollout starts again after `delay_s` at the earliest."""
        ...

    def wake(self) -> None:
        """Starts queued rollouts, because room may have become free."""
        ...

    def seated(self, policy: str) -> None:
        """Called when an admitted rollout has its seat, or needs none."""
        ...


class Executor(Protocol):
    """Starts queued rollouts: in this process, or on the nodes of a fleet."""

    fixed_pools: str
    """Why pools cannot be resized; empty if they can."""

    async def open(self) -> Sequence[asyncio.Task[None]]:
        """Called when the pipeline is entered and its queue is loaded. Returns its background tasks."""
        ...

    def start_queued(self) -> None:
        """Starts queued rollouts while there is room."""
        ...

    def queued(self, rollout: Rollout) -> None:
        """Called before a rollout is queued."""
        ...

    def cancelled(self, rollout_id: str, detail: str) -> None:
        """Called when a rollout is cancelled that has left the queue and is not live yet."""
        ...

    @property
    def remote(self) -> int:
        """The number of live rollouts that run in other processes."""
        ...

    def add_pools(self, pools: dict[str, dict[str, int]]) -> None:
        """Adds the pools of other processes to those of this one."""
        ...
