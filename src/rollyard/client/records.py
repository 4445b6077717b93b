"""The service's responses: frozen dataclasses that mirror the JSON.

Nested parts (score, failure, summary, timings) stay JSON objects, with the names of the API reference. Unknown fields
are accepted and stay in `raw`; missing fields have their defaults. A body that is not a record is an `UnexpectedReply`,
never an incomplete record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rollyard.client._errors import UnexpectedReply
from rollyard.core import Message, Sampling, Span
from rollyard.core.trace import LogprobsKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")

JsonObject = dict[str, Any]
"""A JSON object as received. The API reference describes its contents."""


@dataclass(frozen=True, slots=True)
class Record:
    """One rollout, at the time of the request.

    `state` is queued, init, ready, run, eval or ended; `outcome` (completed, truncated, failed, cancelled) and the
    fields after it are set when it has ended. `reward` None: it has no reward, which is not 0. `cursor` is its position
    in the terminal order.
    """

    id: str
    run: str = ""
    state: str = "queued"
    group: str | None = None
    index: int = 0
    attempt: int = 1
    priority: int = 0
    outcome: str | None = None
    reward: float | None = None
    trainable: bool = False
    score: JsonObject | None = None  # reward, components, metrics, turn_rewards
    failure: JsonObject | None = None  # code, blame, detail, retryable, trainable, stage, data
    summary: JsonObject | None = None  # turns, sampled_tokens, prompt_tokens, ended_by, engine…
    timings: JsonObject | None = None  # queued_s, init_s, ready_s, run_s, model_s, tool_s, eval_s…
    lost: tuple[JsonObject, ...] = ()  # attempts that ended without a terminal record
    scores: tuple[JsonObject, ...] = ()  # of later rescoring
    cursor: str | None = None
    created_at: float = 0.0
    updated_at: float = 0.0
    task: JsonObject = field(default_factory=dict[str, Any])
    raw: JsonObject = field(default_factory=dict[str, Any], repr=False, compare=False)

    @property
    def is_ended(self) -> bool:
        return self.state == "ended"


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing. `next` is the cursor of the next page; None: there are no more.

    `unfinished`, of a listing of ended rollouts: whether a rollout of these runs and this group has not ended.
    """

    rollouts: tuple[Record, ...]
    next: str | None = None
    unfinished: bool | None = None


@dataclass(frozen=True, slots=True)
class TaskProblem:
    """A task that a submit would refuse: its index among the checked tasks, and what is wrong, one text per mistake."""

    index: int
    code: str = ""
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """The result of checking tasks. `bad` of them would be refused; `problems` has the first of those."""

    checked: int = 0
    bad: int = 0
    problems: tuple[TaskProblem, ...] = ()

    def plus(self, later: TaskCheck, start: int) -> TaskCheck:
        """Returns this check and that of the tasks from index `start`."""
        moved = tuple(replace(problem, index=problem.index + start) for problem in later.problems)
        return TaskCheck(self.checked + later.checked, self.bad + later.bad, (*self.problems, *moved))


@dataclass(frozen=True, slots=True)
class Event:
    """A change of state. Kind "gap": some events were missed; list what you follow, then continue."""

    id: str
    kind: str = "state"
    rollout: str = ""
    run: str = ""
    state: str | None = None
    attempt: int = 0
    outcome: str | None = None
    code: str | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """k samples of each task by one weight version of a policy. `state` is running, done, failed or cancelled.

    `result` (pass@k, means, missing samples: see the API reference) is set when it is done.
    """

    id: str
    run: str = ""
    state: str = "running"
    reason: str | None = None  # why it failed
    detail: str | None = None
    policy: str = ""
    version: int | None = None  # of the weights
    done: int = 0  # samples
    total: int = 0
    result: JsonObject | None = None
    raw: JsonObject = field(default_factory=dict[str, Any], repr=False, compare=False)

    @property
    def is_ended(self) -> bool:
        return self.state != "running"


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One training sequence. Its token columns are numpy arrays of the same length; those of `traces()` are read-only
    views of the response's bytes.

    `mask` is 1 exactly on the sampled tokens that this trace owns; elsewhere the logprob is 0.0 and the version −1. In
    a demonstration it is 1 on the given tokens, and there are no logprobs.
    """

    token_ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32] | None
    versions: NDArray[np.int32]
    spans: tuple[Span, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    policy: str = ""
    model: str = ""
    logprobs_kind: LogprobsKind = "unknown"
    trainable: bool = False
    reason: str | None = None  # why it is not trainable
    fork_reason: str | None = None  # why it is not the continuation of an earlier trace
    reward: float | None = None  # its rollout's
    columns: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  # opaque, from the engine
    rollout_id: str = ""
    attempt: int = 1
    index: int = 0
    siblings: int = 1  # how many traces the rollout has, this one included
    tokenizer_verified: bool = True  # False: the engine's tokenizer could not be verified

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The complete result of a rollout, with its record."""

    record: Record
    traces: tuple[Trace, ...] = ()
    messages: tuple[Message, ...] = ()
    tools: tuple[JsonObject, ...] = ()
    artifacts: tuple[JsonObject, ...] = ()
    turns: int = 0
    ended_by: str = ""
    info: JsonObject = field(default_factory=dict[str, Any])


def read(body: object, kind: type[T]) -> T:
    """Converts a JSON object to one of these types."""
    if not isinstance(body, dict):
        raise UnexpectedReply(f"a {kind.__name__} was expected, not {type(body).__name__}")
    # A null means the default; unknown fields of a newer service stay in `raw`.
    values = {key: value for key, value in body.items() if value is not None}
    try:
        return msgspec.convert({**values, "raw": body}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UnexpectedReply(f"a {kind.__name__} in the reply cannot be read: {error}") from error


def read_object(body: object) -> JsonObject:
    if not isinstance(body, dict):
        raise UnexpectedReply(f"a JSON object was expected, not {type(body).__name__}")
    return body


def read_page(body: object) -> Page:
    if not isinstance(body, dict) or not isinstance(body.get("rollouts"), list):
        raise UnexpectedReply("a listing of rollouts was expected")
    return Page(tuple(read(item, Record) for item in body["rollouts"]), body.get("next"), body.get("unfinished"))
