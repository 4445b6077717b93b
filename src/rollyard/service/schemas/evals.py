"""The request body of an evaluation, and an evaluation as a JSON object."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollyard.core import Json, check_id, id_of, key_of, new_id
from rollyard.sampling.evals import EvalPlan
from rollyard.service.schemas.body import Body, Name, Number, Object, Priority, Whole
from rollyard.service.schemas.draws import DRAW_ID_LENGTH, GroupSize, SourceBody, identity_of
from rollyard.service.schemas.records import JsonObject
from rollyard.service.schemas.task import check_defaults
from rollyard.service.security.access import Caller
from rollyard.store.base import EvalRecord

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


PRIORITY = 10
"""Above training, whose batches are larger."""


class EvalBody(Body):
    """k or more samples of each task, by one weight version of a policy."""

    id: Annotated[str, Field(max_length=DRAW_ID_LENGTH)] | None = None
    run: str | None = Field(default=None, description="Name of the run created for it; unset: derived from its id.")
    policy: Name = "default"
    source: SourceBody
    k: GroupSize = Field(default=1, description="pass@1 to pass@k are reported.")
    samples: GroupSize | None = Field(default=None, description="Samples of each task, k or more; unset: k.")
    threshold: Number = Field(default=1.0, description="Lowest reward of a sample that counts as correct.")
    priority: Priority = Field(default=PRIORITY, description="Higher runs first.")
    pool_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        default=0.25, description="Largest share of the RUN slots that it uses at once."
    )
    max_missing: Share = Field(default=0.05, description="It fails if a larger share of samples has no score.")
    on_update: Literal["hold", "fail"] = Field(
        default="hold", description="Whether a change of the policy's weights waits for its end or fails it."
    )
    seed: Whole = Field(default=0, description="Seed of sampling and of the confidence intervals.")
    by: Name | None = Field(default=None, description="A key of the tasks' data; results are also reported per value.")
    defaults: Object = Field(default_factory=dict, description="A partial task with defaults for each task.")

    @model_validator(mode="after")
    def _fits(self) -> EvalBody:
        if self.samples is not None and self.samples < self.k:
            raise ValueError(f"samples: pass@{self.k} cannot be computed from {self.samples} samples of a task")
        if self.source.push:
            raise ValueError("source: tasks cannot be pushed to an evaluation")
        return self

    def identity(self) -> dict[str, Json]:
        return identity_of(self, self.source)

    def to_plan(self, caller: Caller) -> EvalPlan:
        """Converts the body. The defaults are checked as far as a partial task can be."""
        check_defaults(self.defaults)
        name = new_id("ev") if self.id is None else check_id(self.id, "evaluation id")
        if self.run is not None:
            run = check_id(self.run, "run")
        else:
            run = name if caller.is_admin or caller.runs else f"{name}.{caller.name}"
        return EvalPlan(
            id=key_of(run, name),
            run=run,
            owner=caller.name,
            policy=self.policy,
            source=self.source.to_spec(),
            k=self.k,
            samples=self.samples or self.k,
            threshold=self.threshold,
            priority=self.priority if "priority" in self.model_fields_set else _usual(caller),
            pool_share=self.pool_share,
            max_missing=self.max_missing,
            on_update=self.on_update,
            seed=self.seed,
            by=self.by,
            defaults=self.defaults,
        )


def _usual(caller: Caller) -> int:
    most = caller.quota.priority
    return PRIORITY if most is None else min(PRIORITY, most)


def eval_object(record: EvalRecord, done_samples: int) -> JsonObject:
    return {
        "id": id_of(record.id),
        "run": record.run,
        "policy": record.policy,
        "state": record.state,
        "reason": record.reason,
        "detail": record.data.get("detail"),
        "version": record.version if record.version >= 0 else None,
        "tasks": record.tasks,
        "k": record.k,
        "samples": record.samples,
        "threshold": record.threshold,
        "priority": record.data.get("priority"),
        "pool_share": record.data.get("pool_share"),
        "max_missing": record.max_missing,
        "on_update": record.on_update,
        "seed": record.seed,
        "by": record.data.get("by"),
        "done": done_samples,
        "total": record.tasks * record.samples,
        "result": record.result,
        "created_at": record.created_at,
        "ended_at": record.ended_at,
    }
