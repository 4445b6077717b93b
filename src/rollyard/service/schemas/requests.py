"""Request bodies: pydantic models at the edge, core's dataclasses inside.

A body is read as strict JSON (no NaN, no lone surrogates, integers of any size), validated here, and converted to core
types. Code behind this module gets no unknown fields and no numbers out of range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request

from rollyard.core import Json, Mode, Run, Task, check_id, new_id
from rollyard.core.failure import InvalidRequest
from rollyard.core.overlong import COMPONENT, OverlongPenalty
from rollyard.service.json_body import read_json
from rollyard.service.schemas.body import (
    INT64,
    Body,
    Count,
    M,
    Name,
    Numbers,
    Object,
    Priority,
    RawTask,
    Reward,
    Whole,
    check_body,
)
from rollyard.service.schemas.task import check_defaults, to_task

SESSION = "session"  # environment and agent name of sessions

MOST_ROLLOUTS = 10_000
"""Of one call; the client sends 500 at once."""

WaitS = Annotated[float, Field(ge=0, allow_inf_nan=False)]
InRun = Annotated[str | None, Query(description="The run of the object; only needed if two runs use its id.")]


class RunQuery(BaseModel):
    """The query of a call about an object with an id."""

    model_config = ConfigDict(extra="forbid")

    run: str | None = Field(default=None, description="The run of the object; only needed if two runs use its id.")


def parse_number(cursor: str | None, kind: str) -> int | None:
    """Returns the number in a cursor such as "g:123", whose letter is the kind of the listing."""
    if cursor is None:
        return None
    letter, _, number = cursor.partition(":")
    if letter != kind or not (number.isascii() and number.isdigit()) or len(number) > 18:
        raise InvalidRequest(f"after: {cursor[:40]!r} is not a cursor of this listing; use the `next` of its last page")
    return int(number)


# --- rollouts ---


class RolloutBody(Body):
    """One rollout of a submit. Without an id, one is generated; a rollout with an id can be sent again safely."""

    id: str | None = None
    task: RawTask
    priority: Priority | None = None
    group: str | None = None
    index: Annotated[int, Field(ge=0, le=INT64)] = 0

    def identity(self) -> dict[str, Json]:
        """The value that must be equal for an id to mean the same rollout: all fields that were sent, unchanged."""
        return {name: getattr(self, name) for name in sorted(self.model_fields_set - {"id", "run"})}


class SingleBody(RolloutBody):
    run: str = "default"


class SubmitBody(Body):
    """One or many rollouts of a run, stored atomically. The run "default" is created on first use."""

    run: str = "default"
    rollouts: Annotated[list[RolloutBody], Field(fail_fast=True, min_length=1, max_length=MOST_ROLLOUTS)]


class CheckBody(Body):
    """Tasks to check as a submit to that run does. Nothing is stored."""

    run: str = "default"
    tasks: Annotated[list[RawTask], Field(fail_fast=True, min_length=1, max_length=MOST_ROLLOUTS)]


# --- sessions ---


class SessionBody(Body):
    """A session for an agent that runs elsewhere. A session is a rollout: the run's defaults for sampling and limits
    apply to it. `metadata` is returned in its record."""

    id: str | None = None
    run: str = "default"
    sampling: Object = Field(default_factory=dict)
    limits: Object = Field(default_factory=dict)
    reasoning_history: Literal["keep", "as_sent"] = "as_sent"
    strict: bool = False
    structured_output: bool = False
    metadata: Object = Field(default_factory=dict)
    priority: Priority | None = None
    group: str | None = None
    index: Annotated[int, Field(ge=0, le=INT64)] = 0

    def identity(self) -> dict[str, Json]:
        """As a rollout's identity, under a key of its own, so that a rollout and a session never match."""
        return {"session": {name: getattr(self, name) for name in sorted(self.model_fields_set - {"id", "run"})}}

    def _options(self) -> dict[str, Json]:
        flags: dict[str, Json] = {name: True for name in ("strict", "structured_output") if getattr(self, name)}
        return {"reasoning_history": self.reasoning_history, **flags}

    def to_task(self, defaults: Mapping[str, Json]) -> Task:
        raw: dict[str, Json] = {
            "environment": SESSION,
            "data": {"metadata": self.metadata} if self.metadata else {},
            "agent": {"name": SESSION, "options": self._options()},
            "sampling": self.sampling,
            "limits": self.limits,
        }
        return to_task(raw, {name: defaults[name] for name in ("sampling", "limits") if name in defaults}, ())


class RewardBody(Body):
    """The reward of a session. `answer` is the agent's answer, for readers of the trajectory."""

    reward: Reward
    components: Numbers = Field(default_factory=dict)
    metrics: Numbers = Field(default_factory=dict)
    answer: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if COMPONENT in self.components:
            raise ValueError(f"components: the name {COMPONENT!r} is reserved")
        return self


# --- the rest ---


class OverlongPenaltyBody(Body):
    """Reduces the reward linearly from `from_tokens` to `to_tokens` sampled tokens, by at most `most`."""

    from_tokens: Whole
    to_tokens: Count
    most: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0 <= self.from_tokens < self.to_tokens:
            raise ValueError("from_tokens must be 0 or more, and less than to_tokens")
        return self

    def to_penalty(self) -> OverlongPenalty:
        return OverlongPenalty(self.from_tokens, self.to_tokens, self.most)


class RunBody(Body):
    id: str | None = None
    mode: Literal["train", "eval"] = "train"
    policy: Name = "default"
    defaults: Object = Field(default_factory=dict)
    seed: Whole = 0
    priority: Priority = 0
    max_live: Count | None = None
    max_queued: Count | None = None
    trainable_on_deadline: bool = False
    mask_truncated: bool = False
    overlong_penalty: OverlongPenaltyBody | None = None

    def to_run(self, owner: str, at: float) -> Run:
        """Converts the body. The defaults are checked as far as a partial task can be."""
        if self.mask_truncated and self.trainable_on_deadline:
            raise InvalidRequest(
                "mask_truncated excludes what trainable_on_deadline would train on: set only one of them"
            )
        if self.overlong_penalty is not None and self.mode != "train":
            raise InvalidRequest(
                "overlong_penalty changes rewards for training: it cannot be set for a run of mode eval"
            )
        check_defaults(self.defaults)
        return Run(
            id=new_id("run") if self.id is None else check_id(self.id, "run id"),
            mode=Mode(self.mode),
            policy=self.policy,
            defaults=self.defaults,
            seed=self.seed,
            priority=self.priority,
            max_live=self.max_live,
            max_queued=self.max_queued,
            trainable_on_deadline=self.trainable_on_deadline,
            mask_truncated=self.mask_truncated,
            overlong_penalty=None if self.overlong_penalty is None else self.overlong_penalty.to_penalty(),
            created_at=at,
            owner=owner,
        )


class AckBody(Body):
    cursor: str


class PoolsBody(Body):
    """New pool sizes, each optional. 0 stops a stage: rollouts in it continue, no others enter."""

    init: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    run: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    eval: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    ready: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    live: Annotated[int, Field(ge=0, le=1_000_000)] | None = None


# --- reading ---


async def read_body(request: Request, model: type[M]) -> M:
    return check_body(await read_json(request), model)


async def read_submit(request: Request) -> tuple[str, list[RolloutBody]]:
    """The run and the rollouts of a submit, in either of its two formats."""
    raw = await read_json(request)
    if isinstance(raw, dict) and "rollouts" in raw:
        many = check_body(raw, SubmitBody)
        return many.run, many.rollouts
    one = check_body(raw, SingleBody)
    return one.run, [one]
