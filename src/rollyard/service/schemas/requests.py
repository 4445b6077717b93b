"""Request bodies: pydantic models at the edge, core's dataclasses inside.

A body is read as strict JSON (no NaN, no lone surrogates, integers of any size), validated here, and converted to core
types. Code behind this module gets no unknown fields and no numbers out of range.

A task is validated after it has been merged over the run's defaults; its errors carry the path in the client's body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

import msgspec
from fastapi import Query
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from starlette.requests import Request

from rollyard.core import AgentSpec, Json, Limits, Mode, Run, Sampling, SandboxOptions, Task, check_id, new_id
from rollyard.core.egress import READING, EgressOptions
from rollyard.core.engine import Admission
from rollyard.core.failure import InvalidRequest
from rollyard.core.overlong import COMPONENT, OverlongPenalty
from rollyard.core.score import MOST, MOST_REWARD
from rollyard.engines.base import EngineSpec, Kind, Role
from rollyard.service.egress import Method
from rollyard.service.json_body import is_too_deep, read_json
from rollyard.service.problems import invalid

M = TypeVar("M", bound=BaseModel)

_INT64 = 2**63 - 1
_DAY_S = 86_400.0

SESSION = "session"  # environment and agent name of sessions

Seconds = Annotated[float, Field(gt=0, le=30 * _DAY_S, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=_INT64)]
Whole = Annotated[int, Field(ge=-_INT64, le=_INT64)]
Priority = Annotated[int, Field(ge=-1_000_000, le=1_000_000)]
WaitS = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(max_length=4096)]


def _not_too_deep(value: dict[str, Any]) -> dict[str, Any]:
    if is_too_deep(value):
        raise ValueError("this is nested too deeply")
    return value


# Values of a body are JSON already: pydantic's JsonValue would check and copy each of them, at 2 µs.
Object = Annotated[dict[str, Any], AfterValidator(_not_too_deep)]
RawTask = dict[str, Any]
"""A task before it is merged over its run's defaults: `to_task` checks it."""
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


MOST_KEYS = 200
"""Of a body, and of an object of numbers in it. Each unknown field is an error of its own, which takes 5 µs."""

MOST_ROLLOUTS = 10_000
"""Of one call; the client sends 500 at once."""

MOST_DEFAULTS_BYTES = 256 << 10
"""Of one run. All runs are in memory, and each task is merged over a copy."""

MOST_MERGED_BYTES = 128 << 20
"""Of the defaults that are merged into the tasks of one call: a small body must not become gigabytes."""


def few_fields(value: object) -> object:
    if isinstance(value, dict) and len(value) > MOST_KEYS:  # type: ignore[arg-type]
        raise ValueError(f"an object of at most {MOST_KEYS} fields was expected")
    return value  # type: ignore[return-value]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _is_small(cls, value: object) -> object:
        return few_fields(value)


# --- tasks --------------------------------------------------------------------------------------------


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
    top_k: Annotated[int, Field(ge=-1, le=_INT64)] = _about(
        "Samples from this many of the most likely tokens; -1: from all.", Sampling().top_k
    )
    max_tokens: Count = _about("Most tokens of one model call.", Sampling().max_tokens)
    extra: Object = Field(default_factory=dict, description="Other parameters, as the engine names them.")


class LimitsBody(Body):
    init_s: Seconds = _about("Seconds of INIT: the sandbox's start and the set-up.", Limits().init_s)
    run_s: Seconds = _about("Seconds of RUN, without waiting for a paused policy.", Limits().run_s)
    eval_s: Seconds = _about("Seconds of EVAL.", Limits().eval_s)
    tool_s: Seconds = _about("Seconds of one tool call.", Limits().tool_s)
    model_s: Seconds = _about("Seconds of one model call.", Limits().model_s)
    stall_s: Seconds = _about("Seconds in RUN without any progress.", Limits().stall_s)
    max_turns: Count = _about("Most turns of the agent.", Limits().max_turns)
    max_tokens: Count | None = _about("Most sampled tokens of the rollout; null: no limit.")
    max_context: Count | None = _about("Most tokens of a prompt and its completion; null: the engine's limit.")
    output_bytes: Annotated[int, Field(ge=64, le=64 << 20)] = _about(
        "Most bytes of a tool's output that the model gets.", Limits().output_bytes
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
    memory_bytes: Count | None = _about("Most memory; null: the setting `sandbox_memory_bytes`.")
    processes: Count | None = _about("Most processes and threads; null: the setting `sandbox_processes`.")
    disk_bytes: Count | None = _about("Most disk space; null: the setting `sandbox_disk_bytes`.")
    open_files: Count | None = _about("Most open files of a process; null: the setting `sandbox_open_files`.")
    files: Count | None = _about("Most files and folders created; null: the setting `sandbox_files`.")
    cpus: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] | None = _about(
        "Most CPUs; null: the setting `sandbox_cpus`."
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


# --- rollouts -----------------------------------------------------------------------------------------


class RolloutBody(Body):
    """One rollout of a submit. Without an id, one is generated; a rollout with an id can be sent again safely."""

    id: str | None = None
    task: RawTask
    priority: Priority | None = None
    group: str | None = None
    index: Annotated[int, Field(ge=0, le=_INT64)] = 0

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


# --- sessions -----------------------------------------------------------------------------------------


Number = Annotated[float, Field(allow_inf_nan=False, ge=-MOST, le=MOST)]
Numbers = Annotated[dict[str, Number], BeforeValidator(few_fields)]
Reward = Annotated[float, Field(allow_inf_nan=False, ge=-MOST_REWARD, le=MOST_REWARD)]


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
    index: Annotated[int, Field(ge=0, le=_INT64)] = 0

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


# --- the rest -----------------------------------------------------------------------------------------


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


class EngineBody(Body):
    id: str | None = None
    url: Annotated[str, Field(max_length=2048, json_schema_extra={"pattern": r"^https?://[^/\s]+"})]
    kind: Literal["vllm", "sglang", "openai", "prorl"] = "vllm"
    policy: Name = "default"
    model: Text = ""
    role: Literal["policy", "judge"] = "policy"
    tokenizer: Text = ""
    renderer: Text = ""
    capacity: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    admission: Literal["adaptive", "fixed"] = "adaptive"
    api_key: Text = ""
    trust_tokenizer: bool = False

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        check_url(url)
        return url

    @field_validator("api_key")
    @classmethod
    def _fits_into_a_header(cls, key: str) -> str:
        if not key.isascii() or not (key.isprintable() or not key):
            raise ValueError("it is sent in a header: only printable ASCII characters are allowed")
        return key

    def to_spec(self) -> EngineSpec:
        return EngineSpec(
            id=engine_id(self.url) if self.id is None else check_id(self.id, "engine id"),
            url=self.url.rstrip("/"),
            kind=Kind(self.kind),
            policy=self.policy,
            model=self.model,
            role=Role(self.role),
            tokenizer=self.tokenizer,
            renderer=self.renderer,
            capacity=self.capacity,
            admission=Admission(self.admission),
            api_key=self.api_key,
            trust_tokenizer=self.trust_tokenizer,
        )


def check_url(url: str) -> None:
    """Raises ValueError for an address that can never be connected to."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("a URL starts with http:// or https://")
    if any(character.isspace() or not character.isprintable() for character in url):
        raise ValueError("it contains blanks or control characters")
    parts = urlsplit(url)  # ValueError for unmatched brackets
    if "[" in parts.netloc and not re.fullmatch(r"(?:[^@]*@)?\[[0-9A-Fa-f:.]+\](?::\d+)?", parts.netloc):
        raise ValueError("the text in brackets is not an address")
    if not parts.hostname:
        raise ValueError("it has no host")
    if parts.port == 0:  # ValueError unless it is a number up to 65535
        raise ValueError("port 0 cannot be connected to")
    try:
        host = parts.hostname.encode("idna")
    except UnicodeError:
        raise ValueError("its host has a part that is empty or longer than 63 characters") from None
    if len(host) > 253:
        raise ValueError("its host is longer than 253 characters")


def engine_id(url: str) -> str:
    """An id from the address, for engines without one: adding the same engine twice by accident is refused."""
    name = re.sub(r"[^A-Za-z0-9._:-]+", "-", re.sub(r"^https?://(?:[^@/]*@)?", "", url)).strip("-.:_")
    return check_id(name[:128], "engine id")


# --- reading ------------------------------------------------------------------------------------------


def check_body(raw: object, model: type[M]) -> M:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False)) from error


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
