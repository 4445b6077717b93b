"""Request bodies of groups and draws, and their conversion to core types."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from rollyard.core import DrawConfig, Json, Run
from rollyard.core.draw import Budget, KeepSpec, OnStale, SourceKind, SourceSpec, Surplus
from rollyard.core.failure import InvalidRequest
from rollyard.service.schemas.body import (
    Body,
    Count,
    Name,
    Number,
    Object,
    Priority,
    RawTask,
    Seconds,
    Text,
    Whole,
    few_fields,
)
from rollyard.service.schemas.requests import MOST_ROLLOUTS

GroupSize = Annotated[int, Field(ge=1, le=4096)]
Spares = Annotated[int, Field(ge=0, le=4096)]
Few = Annotated[int, Field(ge=0, le=1_000_000)]
Options = Annotated[dict[str, str], BeforeValidator(few_fields)]

DRAW_ID_LENGTH = 80  # the ids of its groups and rollouts are derived from it


class GroupBody(Body):
    """n rollouts of one task. Without an id, one is generated; a group with an id can be sent again safely."""

    id: str | None = None
    task: RawTask
    size: GroupSize
    spares: Spares = Field(default=1, description="Rollouts that may replace members lost to infrastructure failures.")
    min_members: GroupSize | None = Field(default=None, description="Fewest members of a complete group; unset: all.")
    priority: Priority | None = None

    def identity(self) -> dict[str, Json]:
        return {name: getattr(self, name) for name in sorted(self.model_fields_set - {"id", "run"})}

    @model_validator(mode="after")
    def _fits(self) -> GroupBody:
        if self.min_members is not None and self.min_members > self.size:
            raise ValueError("min_members: must not be larger than size")
        return self


class SingleGroupBody(GroupBody):
    run: str = "default"


class GroupsBody(Body):
    """One or many groups of a run, stored atomically."""

    run: str = "default"
    groups: Annotated[list[GroupBody], Field(fail_fast=True, min_length=1, max_length=MOST_ROLLOUTS)]


class SourceBody(Body):
    """The source of tasks: exactly one of tasks, file, environment alone, or push."""

    tasks: Annotated[list[Object], Field(fail_fast=True)] | None = Field(
        default=None, description="The tasks themselves."
    )
    file: Text | None = Field(default=None, description="JSON lines or Parquet, below a folder of `task_folders`.")
    environment: Name | None = Field(default=None, description="Imports the file's rows; alone: generates the tasks.")
    options: Options = Field(
        default_factory=dict, description="Options of that environment for importing or generating."
    )
    split: Name | None = None
    push: bool = Field(default=False, description="Tasks are sent with POST /draws/{id}/tasks.")

    @model_validator(mode="after")
    def _is_one(self) -> SourceBody:
        named = [self.tasks is not None, self.file is not None, self.push]
        if sum(named) > 1 or not (any(named) or self.environment):
            raise ValueError("exactly one of tasks, file, environment (alone) or push was expected")
        return self

    def to_spec(self) -> SourceSpec:
        if self.push:
            kind = SourceKind.PUSH
        elif self.tasks is not None:
            kind = SourceKind.TASKS
        else:
            kind = SourceKind.FILE if self.file is not None else SourceKind.ENVIRONMENT
        return SourceSpec(kind, self.file or "", self.environment or "", self.options, self.split)


def identity_of(body: Body, source: SourceBody) -> dict[str, Json]:
    """The fields that were sent, without the id. The tasks are not copied: that takes 1 µs for each of their values."""
    sent = body.model_dump(exclude_unset=True, exclude={"id": True, "source": {"tasks"}})
    if "tasks" in source.model_fields_set:
        sent["source"]["tasks"] = source.tasks
    return sent


class KeepBody(Body):
    """Which groups are delivered: exactly one of all, spread, pass_rate or filter; or the text "spread" or "all"."""

    all: Literal[True] | None = None
    spread: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    pass_rate: tuple[Number, Number] | None = Field(default=None, strict=False)
    threshold: Number = 1.0
    filter: Name | None = None
    options: Object = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_one(self) -> KeepBody:
        if sum(one is not None for one in (self.all, self.spread, self.pass_rate, self.filter)) != 1:
            raise ValueError("exactly one of all, spread, pass_rate or filter was expected")
        if self.pass_rate is not None and not 0 <= self.pass_rate[0] <= self.pass_rate[1] <= 1:
            raise ValueError("pass_rate: [low, high] with 0 ≤ low ≤ high ≤ 1 was expected")
        return self

    def to_spec(self) -> KeepSpec:
        if self.all:
            return KeepSpec("all")
        if self.filter is not None:
            return KeepSpec("filter", name=self.filter, options=self.options)
        if self.pass_rate is not None:
            return KeepSpec("pass_rate", low=self.pass_rate[0], high=self.pass_rate[1], threshold=self.threshold)
        return KeepSpec("spread", above=self.spread or 0.0)


def _keep(raw: object) -> object:
    if not isinstance(raw, str):
        return raw
    known = {"spread": {"spread": 0.0}, "all": {"all": True}}
    if raw not in known:
        raise ValueError(
            f"{raw[:40]!r} is not a filter: use spread, all, or an object with one of spread, pass_rate, filter"
        )
    return known[raw]


class BudgetBody(Body):
    """Limits at which a draw ends; each optional."""

    groups: Count | None = None
    rollouts: Count | None = None
    tokens: Count | None = None
    batches: Count | None = None
    seconds: Seconds | None = None


class DrawBody(Body):
    """A stream of useful groups of a run."""

    id: Annotated[str, Field(max_length=DRAW_ID_LENGTH)] | None = None
    run: str = "default"
    source: SourceBody
    group_size: GroupSize = 8
    spares: Spares = 1
    min_members: GroupSize | None = None
    epochs: Count | None = Field(default=None, description="Passes over the source; unset: unlimited.")
    shuffle: bool = True
    seed: Whole | None = Field(default=None, description="Seed of the order of tasks; unset: the run's.")
    keep: Annotated[KeepBody, BeforeValidator(_keep)] = Field(default_factory=lambda: KeepBody(spread=0.0))
    max_groups_in_flight: Count | None = None
    max_staleness: Few = Field(default=1, description="Versions by which a group may be older than its batch.")
    on_stale: Literal["deliver", "wait", "drop"] = "deliver"
    surplus: Literal["carry", "cancel"] = "carry"
    budget: BudgetBody = Field(default_factory=BudgetBody)
    patience: Count | None = Field(
        default=None, description="Number of consecutive rejected groups that ends the draw."
    )
    priority: Priority | None = None

    @model_validator(mode="after")
    def _fits(self) -> DrawBody:
        if self.min_members is not None and self.min_members > self.group_size:
            raise ValueError("min_members: must not be larger than group_size")
        return self

    def identity(self) -> dict[str, Json]:
        return identity_of(self, self.source)

    def to_config(self, run: Run) -> DrawConfig:
        return DrawConfig(
            source=self.source.to_spec(),
            group_size=self.group_size,
            spares=self.spares,
            min_members=self.min_members,
            epochs=self.epochs,
            shuffle=self.shuffle,
            seed=run.seed if self.seed is None else self.seed,
            keep=self.keep.to_spec(),
            max_groups_in_flight=self.max_groups_in_flight,
            max_staleness=self.max_staleness,
            on_stale=OnStale(self.on_stale),
            surplus=Surplus(self.surplus),
            budget=Budget(**vars(self.budget)),
            patience=self.patience,
            priority=run.priority if self.priority is None else self.priority,
        )


class BatchBody(Body):
    """Requests the next batch. With `number`, the request can be sent again safely."""

    want: Annotated[int, Field(ge=1, le=100_000)]
    number: Count | None = None


class TasksBody(Body):
    """More tasks for a source of kind push. With `ids`, one per task, they can be sent again safely."""

    tasks: Annotated[list[Object], Field(fail_fast=True)] = Field(default_factory=list)
    ids: Annotated[list[str], Field(fail_fast=True)] | None = None
    close: bool = Field(default=False, description="No more tasks follow.")

    @model_validator(mode="after")
    def _fits(self) -> TasksBody:
        if self.ids is not None and len(self.ids) != len(self.tasks):
            raise ValueError("ids: one for each task was expected")
        if not self.tasks and not self.close:
            raise ValueError("tasks: at least one was expected")
        return self


class DrawAckBody(Body):
    batch: Few


class RewindBody(Body):
    """Returns to the end of that batch, with the weights of that version. `policy_version`: the number that these
    weights have in the policy now, if it is a new one."""

    batch: Few
    version: Few
    policy_version: Few | None = None


def parse_place(cursor: str | None) -> int:
    """The number in a cursor such as "d:12"."""
    if cursor is None:
        return 0
    prefix, _, number = cursor.partition(":")
    if prefix != "d" or not (number.isascii() and number.isdigit()) or len(number) > 18:
        raise InvalidRequest(f"{cursor[:40]!r} is not a cursor of a draw's groups")
    return int(number)
