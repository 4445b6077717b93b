"""The `session` environment: the client runs and scores the task elsewhere, and posts the score.

    {"metadata": {"task": "django-1234", "anything": ["of", "yours"]}}

It has no sandbox and no instruction: the agent is the client's own and sends its first message through the gateway.
`metadata` is stored in the record unchanged.

Invariant: the reward is the one that the client posted. It is read from RUN's trajectory, so it survives a restart;
without one, the session has no score.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rollyard.core import DataField, Json, Score, Task
from rollyard.core.failure import SessionAbandoned, TaskInvalid
from rollyard.envs.base import EnvContext, Environment, Evidence, Plan, Start
from rollyard.envs.fields import Fields

AGENT = "session"

POSTED = "score"  # in `Trajectory.info`: the agent `session` stores here what the client posted


class SessionEnvironment(Environment):
    """Scores with the reward that the client posted. `POST /v1/sessions` creates its tasks; its agent is `session`."""

    name: ClassVar[str] = "session"
    data_fields: ClassVar[tuple[DataField, ...]] = (
        DataField("metadata", "object", "The client's own data, returned in the record.", "{}"),
    )

    def check(self, task: Task) -> None:
        if task.agent.name != AGENT:
            raise TaskInvalid(f"session: agent.name: {AGENT!r} was expected; only that agent receives the reward")
        fields = Fields(task)
        metadata = fields.get("metadata")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise fields.wrong("metadata", "an object")
        fields.done()

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        return Start(())

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        posted = evidence.trajectory.info.get(POSTED)
        if not isinstance(posted, Mapping):
            raise SessionAbandoned("this session ended without a reward")
        return Score(_number(posted.get("reward")), _numbers(posted.get("components")), _numbers(posted.get("metrics")))


def _number(value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a posted number is a {type(value).__name__}")
    return float(value)


def _numbers(value: Json) -> dict[str, float]:
    return {name: _number(number) for name, number in value.items()} if isinstance(value, Mapping) else {}
