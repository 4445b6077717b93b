"""What to do (Task), for which trainer (Run), and within which limits (Limits)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rollyard.core.egress import EgressOptions
from rollyard.core.json import Json
from rollyard.core.overlong import OverlongPenalty

REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class DataField:
    """Describes one field of a task's `data`, or of its agent's `options`, for readers (`rollyard tasks fields`)."""

    name: str
    kind: str  # as JSON: "string", "list of strings"…
    about: str  # one sentence
    default: str = REQUIRED  # as JSON, or in words


class Mode(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the policy samples. Sent with every model call and stored in every trace."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    max_tokens: int = 2048  # per model call
    extra: Mapping[str, Json] = field(default_factory=dict[str, Json])  # as the engine names them


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one rollout. Times are in seconds; None means no separate limit."""

    init_s: float = 300.0
    run_s: float = 1800.0
    eval_s: float = 600.0
    tool_s: float = 120.0  # one tool call
    model_s: float = 600.0  # one model call
    stall_s: float = 900.0  # without any progress in RUN while its clock runs
    max_turns: int = 50
    max_tokens: int | None = None  # sampled tokens in all
    max_context: int | None = None  # prompt + sampled; None: the engine's limit
    output_bytes: int = 16_384  # of one tool call, as the model gets it


@dataclass(frozen=True, slots=True)
class SandboxOptions:
    """What a task may request for its sandbox; runtimes and images only if the operator allows them."""

    runtime: str | None = None  # None: the service's default
    image: str | None = None
    memory_bytes: int | None = None
    processes: int | None = None
    disk_bytes: int | None = None
    open_files: int | None = None
    cpus: float | None = None
    files: int | None = None
    egress: EgressOptions | None = None  # None: offline


@dataclass(frozen=True, slots=True)
class AgentSpec:
    name: str = ""  # empty: the environment's own if it is a Handler, else native
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True)
class Task:
    """An environment's name and data, an agent, sampling and limits: everything that an attempt needs."""

    environment: str
    data: Mapping[str, Json] = field(default_factory=dict[str, Json])
    agent: AgentSpec = field(default_factory=AgentSpec)
    sampling: Sampling = field(default_factory=Sampling)
    limits: Limits = field(default_factory=Limits)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)


@dataclass(frozen=True, slots=True)
class Run:
    """One trainer's job. Everything belongs to a run."""

    id: str
    mode: Mode = Mode.TRAIN
    policy: str = "default"
    defaults: Mapping[str, Json] = field(default_factory=dict[str, Json])  # defaults for each task's body
    seed: int = 0
    priority: int = 0  # higher goes first
    max_live: int | None = None  # quota: rollouts beyond QUEUED at once
    max_queued: int | None = None  # quota: rollouts in QUEUED at once
    trainable_on_deadline: bool = False
    mask_truncated: bool = False  # do not train on rollouts cut off by turns, tokens, context or run_s
    overlong_penalty: OverlongPenalty | None = None
    created_at: float = 0.0
    owner: str = ""  # id of the token that created it (not a secret); empty: the service itself


NAME_CHARACTERS = 120

_NAMED_BY = ("name", "instance_id", "id", "instruction", "question", "problem_statement", "prompt")
"""Fields of a task's data that distinguish it from others, the shortest first."""


def name_of(task: Task) -> str:
    """Returns the task's own name, or the start of what it asks for, in at most `NAME_CHARACTERS`; "" without one."""
    for field_name in _NAMED_BY:
        value = task.data.get(field_name)
        if isinstance(value, str) and (text := " ".join(value[: 4 * NAME_CHARACTERS].split())):
            return text if len(text) <= NAME_CHARACTERS else text[: NAME_CHARACTERS - 1] + "…"
    return ""
