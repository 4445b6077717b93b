"""A draw: a run's stream of useful groups. What was asked for, how it stands, and its numbered batches.

All of it is plain data that the store keeps; the rules are in `rollyard.sampling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rollyard.core.json import Json


class OnStale(StrEnum):
    """What becomes of a group that got older than `max_staleness`."""

    DELIVER = "deliver"  # oldest first; the trainer corrects by version
    WAIT = "wait"  # batches wait for the oldest, so that none gets too old
    DROP = "drop"  # biased against what takes long; counted


class Surplus(StrEnum):
    """What becomes of unfinished groups when a batch is full."""

    CARRY = "carry"  # they go on, for the next one
    CANCEL = "cancel"  # ended at once; biased against what takes long


class SourceKind(StrEnum):
    TASKS = "tasks"  # a list that came with the draw
    FILE = "file"
    ENVIRONMENT = "environment"  # what an environment generates
    PUSH = "push"  # the client adds tasks as it goes


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Where tasks come from. They are copied when the draw is made (`size` of them): what becomes of a file later
    changes nothing."""

    kind: SourceKind
    file: str = ""
    environment: str = ""
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    split: str | None = None
    size: int | None = None  # None: it grows


@dataclass(frozen=True, slots=True)
class KeepSpec:
    """Which groups are useful: `kind` is all, spread, pass_rate or filter."""

    kind: str = "spread"
    above: float = 0.0  # spread
    low: float = 0.0  # pass_rate, inclusive
    high: float = 1.0
    threshold: float = 1.0
    name: str = ""  # of an installed filter
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True)
class Budget:
    """When a draw has done enough. None: no bound."""

    groups: int | None = None  # delivered
    rollouts: int | None = None  # started
    tokens: int | None = None  # sampled
    batches: int | None = None
    seconds: float | None = None  # since it was made


@dataclass(frozen=True, slots=True)
class DrawConfig:
    """What a trainer asked for."""

    source: SourceSpec
    group_size: int = 8
    spares: int = 1
    min_members: int | None = None
    epochs: int | None = None  # None: for ever
    shuffle: bool = True
    seed: int = 0
    keep: KeepSpec = field(default_factory=KeepSpec)
    max_groups_in_flight: int | None = None
    max_staleness: int = 1
    on_stale: OnStale = OnStale.DELIVER
    surplus: Surplus = Surplus.CARRY
    budget: Budget = field(default_factory=Budget)
    patience: int | None = None  # groups rejected in a row that end it; None: an epoch of them
    priority: int = 0


@dataclass(frozen=True, slots=True)
class DrawItem:
    """One task of the source in one epoch. `tries`: infrastructure failed it so often; `turn`: begun so often."""

    epoch: int
    index: int
    tries: int = 0
    turn: int = 0


@dataclass(slots=True)
class DrawCounts:
    """Counts since the draw began. Groups: admitted = open + complete + all the ends."""

    admitted: int = 0
    delivered: int = 0
    filtered: int = 0
    failed: int = 0
    cancelled: int = 0
    dropped: int = 0
    void: int = 0
    rejected_early: int = 0  # of the filtered: before all members had ended
    returned: int = 0  # tasks that infrastructure failed and that are tried again
    rollouts: int = 0  # started
    infra_rollouts: int = 0  # ended without a reward by infrastructure's fault
    tokens_sampled: int = 0  # of groups that have ended
    tokens_delivered: int = 0
    tokens_filtered: int = 0
    tokens_lost: int = 0  # of failed, cancelled, dropped and void groups
    dropped_tokens: int = 0  # of the dropped alone: how long what was dropped was
    judged: int = 0  # groups that had all their members: what "before filtering" is over
    rewards: int = 0  # scored members of those
    reward_sum: float = 0.0
    passes: int = 0
    all_zero: int = 0  # judged groups in which every scored member got 0 or less
    all_one: int = 0
    stale: int = 0  # delivered with more than max_staleness


@dataclass(slots=True)
class DrawProgress:
    """How far a draw is: all that a restarted service needs beside its open groups."""

    order: int = 0  # groups admitted
    epoch: int = 0
    position: int = 0  # in this epoch
    returned: list[DrawItem] = field(default_factory=list[DrawItem])  # go first
    version: int = 0  # the policy's
    want: int = 0  # of the last batch
    handed: int = 0  # groups delivered since the last batch was opened or the version changed
    batch: int = 0  # the last one opened
    acked: int = 0
    place: int = 0  # groups delivered, in all
    recent: str = ""  # "1" kept, "0" not: the last judged groups, oldest first
    rejected_in_a_row: int = 0
    is_source_closed: bool = False  # a pushed source: nothing more will come
    figures: DrawCounts = field(default_factory=DrawCounts)
    figures_then: DrawCounts = field(default_factory=DrawCounts)  # when the last batch closed


@dataclass(frozen=True, slots=True)
class Draw:
    id: str
    run: str
    config: DrawConfig
    is_active: bool = True
    reason: str | None = None  # exhausted, nothing_kept, budget, closed, unusable, internal_error
    detail: str | None = None
    progress: DrawProgress = field(default_factory=DrawProgress)
    created_at: float = 0.0
    updated_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups `after + 1 … after + delivered` of the order of delivery."""

    draw: str
    number: int
    want: int
    version: int  # the policy's when it was opened: staleness counts from there
    after: int  # place of the last group before it
    delivered: int = 0
    is_open: bool = True
    reason: str | None = None  # why it closed short
    is_last: bool = False  # the draw has ended with it
    figures: Mapping[str, Json] = field(default_factory=dict[str, Json])  # since the batch before, once it is closed
    created_at: float = 0.0
