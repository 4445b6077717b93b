"""A task's body, and its conversion to a `Task`.

A task is validated after it has been merged over the run's defaults; its errors carry the path in the client's body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field, ValidationError

from rollyard.core import AgentSpec, Json, Limits, Sampling, SandboxOptions, Task
from rollyard.core.egress import READING, EgressOptions
from rollyard.core.failure import InvalidRequest
from rollyard.service.egress import Method
from rollyard.service.schemas.body import INT64, Body, Count, Name, Object, Seconds, Text, invalid

MOST_DEFAULTS_BYTES = 256 << 10
"""Of one run. All runs are in memory, and each task is merged over a copy."""

MOST_MERGED_BYTES = 128 << 20
"""Of the defaults that are merged into the tasks of one call: a small body must not become gigabytes."""


def _about(text: str, default: Any = None) -> Any:
    """A field with a description, for docs/reference/task.md and `rollyard tasks fields`."""
    return Field(default=default, description=text)


class AgentBody(Body):
    name: Annotated[str, Field(max_length=256)] = _about(
        "The agent; empty: the environment's own if it is a Handler, else `native`.", ""
    )
    options: Object = Field(default_factory=dict, description="The agent's options, see below.")


class SamplingBody(Body):
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = _about(
        "0 samples greedily.", Sampling().temperature
    )
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = _about(
        "Samples from the most likely tokens that have this probability together.", Sampling().top_p
    )
    top_k: Annotated[int, Field(ge=-1, le=INT64)] = _about(
        "Samples from this many of the most likely tokens; -1: from all.", Sampling().top_k
    )
    max_tokens: Count = _about("Maximum number of tokens of one model call.", Sampling().max_tokens)
    extra: Object = Field(default_factory=dict, description="Other parameters, as the engine names them.")


class LimitsBody(Body):
    init_s: Seconds = _about("Seconds of INIT: the sandbox's start and the set-up.", Limits().init_s)
    run_s: Seconds = _about("Seconds of RUN, without waiting for a paused policy.", Limits().run_s)
    eval_s: Seconds = _about("Seconds of EVAL.", Limits().eval_s)
    tool_s: Seconds = _about("Seconds of one tool call.", Limits().tool_s)
    model_s: Seconds = _about("Seconds of one model call.", Limits().model_s)
    stall_s: Seconds = _about("Seconds in RUN without any progress.", Limits().stall_s)
    max_turns: Count = _about("Maximum number of turns of the agent.", Limits().max_turns)
    max_tokens: Count | None = _about("Maximum number of sampled tokens of the rollout; null: no limit.")
    max_context: Count | None = _about(
        "Maximum number of tokens of a prompt and its completion; null: the engine's limit."
    )
    output_bytes: Annotated[int, Field(ge=64, le=64 << 20)] = _about(
        "Maximum number of bytes of a tool's output that the model gets.", Limits().output_bytes
    )


Rule = Annotated[str, Field(min_length=1, max_length=300)]


class EgressBody(Body):
    """Hosts that a task's sandboxes may reach: NAME, *.NAME, * or an address, with :PORT if not 80 and 443."""

    hosts: Annotated[list[Rule], Field(max_length=64)] = Field(
        default_factory=list, description="Hosts for INIT and RUN: `NAME`, `*.NAME`, `*` or an address, with `:PORT`."
    )
    eval_hosts: Annotated[list[Rule], Field(max_length=64)] = Field(default_factory=list, description="Hosts for EVAL.")
    methods: Annotated[list[Method], Field(min_length=1, max_length=16)] = Field(
        default_factory=lambda: list[Method](READING), description="Methods of plain HTTP."
    )

    def to_options(self) -> EgressOptions:
        return EgressOptions(tuple(self.hosts), tuple(self.eval_hosts), tuple(self.methods))


class SandboxBody(Body):
    runtime: Name | None = _about("The sandbox runtime; null: the service's default.")
    image: Text | None = _about("The image, by name or path; null: the host's /usr, read-only.")
    memory_bytes: Count | None = _about("Maximum memory; null: the setting `sandbox_memory_bytes`.")
    processes: Count | None = _about("Maximum number of processes and threads; null: the setting `sandbox_processes`.")
    disk_bytes: Count | None = _about("Maximum disk space; null: the setting `sandbox_disk_bytes`.")
    open_files: Count | None = _about(
        "Maximum number of open files of a process; null: the setting `sandbox_open_files`."
    )
    files: Count | None = _about("Maximum number of files and folders created; null: the setting `sandbox_files`.")
    cpus: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] | None = _about(
        "Maximum number of CPUs; null: the setting `sandbox_cpus`."
    )
    egress: EgressBody | None = _about("The hosts that it may reach; null: it is offline.")


class TaskBody(Body):
    environment: Name = Field(description="The name of an installed environment.")
    # Factories, because pydantic deep-copies a default that is a model, at five times the cost of creating it.
    data: Object = Field(default_factory=dict, description="The environment's data, see below.")
    agent: AgentBody = Field(default_factory=AgentBody, description="Which agent does the task.")
    sampling: SamplingBody = Field(default_factory=SamplingBody, description="How the policy samples.")
    limits: LimitsBody = Field(default_factory=LimitsBody, description="Limits of the rollout.")
    sandbox: SandboxBody = Field(default_factory=SandboxBody, description="What its sandboxes have.")


def to_task(raw: Mapping[str, Json], defaults: Mapping[str, Json], path: Sequence[str | int] = ("task",)) -> Task:
    """Converts a task from a client, merged over its run's defaults. `InvalidRequest` contains the field's path."""
    try:
        body = TaskBody.model_validate(merge(defaults, raw) if defaults else raw)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False), path) from error
    return Task(
        environment=body.environment,
        data=body.data,
        agent=AgentSpec(body.agent.name, body.agent.options),
        sampling=Sampling(**_fields(body.sampling)),
        limits=Limits(**_fields(body.limits)),
        sandbox=_sandbox(body.sandbox),
    )


def check_defaults(defaults: Mapping[str, Json]) -> None:
    """Checks a run's defaults as far as a partial task can be."""
    size = len(msgspec.json.encode(defaults))
    if size > MOST_DEFAULTS_BYTES:
        raise InvalidRequest(f"defaults: {size} bytes are more than {MOST_DEFAULTS_BYTES}: send large data with tasks")
    to_task({"environment": "any", **defaults}, {}, ("defaults",))


def check_merged(defaults: Mapping[str, Json], tasks: int) -> None:
    """Raises `InvalidRequest` if that many tasks cannot be merged over the defaults in one call."""
    size = len(msgspec.json.encode(defaults)) if tasks > 1 else 0
    if size * tasks > MOST_MERGED_BYTES:
        most = MOST_MERGED_BYTES // size
        raise InvalidRequest(
            f"the run's defaults have {size} bytes: send at most {most} tasks in one call, not {tasks}"
        )


def _sandbox(body: SandboxBody) -> SandboxOptions:
    fields = {**_fields(body)}
    egress: EgressBody | None = fields.pop("egress")
    return SandboxOptions(**fields, egress=None if egress is None else egress.to_options())


def _fields(body: Body) -> Mapping[str, Any]:
    return vars(body)  # model_dump would copy values that may be large


def merge(under: Mapping[str, Json], over: Mapping[str, Json]) -> dict[str, Json]:
    """Merges `over` into `under`: objects are merged key by key, any other value is replaced."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
