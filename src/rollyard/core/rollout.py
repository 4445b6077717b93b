"""The record of one rollout: its task, its position, and its ending."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollyard.core.failure import Failure, Outcome
from rollyard.core.json import Json
from rollyard.core.score import Score
from rollyard.core.state import Position, State
from rollyard.core.task import Task


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds in each state, of the last attempt; time in queues is separate from work."""

    queued_s: float = 0.0
    init_s: float = 0.0
    prepare_s: float = 0.0  # of init_s: the set-up, if this rollout made it for its group
    ready_s: float = 0.0
    run_s: float = 0.0
    model_s: float = 0.0  # of run_s
    tool_s: float = 0.0  # of run_s
    eval_wait_s: float = 0.0
    eval_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """An attempt that ended without a terminal record, and its cost."""

    attempt: int
    code: str
    detail: str
    stage: str | None = None
    tokens_lost: int = 0
    engine: str = ""  # of its session; after an engine's failure the next attempt uses another one, if possible
    node: str = ""  # of a fleet, which ran it; the next attempt goes to another one, if possible
    timings: Timings = field(default_factory=Timings)  # up to its loss; zeros if the process that measured them ended


@dataclass(frozen=True, slots=True)
class Summary:
    """What the terminal record contains beside score and failure."""

    turns: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    traces: int = 0
    ended_by: str = ""
    engine: str = ""
    node: str = ""
    layer: str = ""  # its set-up layer was "made" by it, "found" (another made it), or (empty) not shared
    limits_in_force: Mapping[str, str] = field(default_factory=dict[str, str])
    oldest_version: int = -1  # of the weights that sampled its tokens; −1: no token was sampled
    newest_version: int = -1
    egress: Mapping[str, Json] = field(default_factory=dict[str, Json])  # what it reached; empty: it was offline
    notes: tuple[str, ...] = ()  # forks, retried stages, limits that could not be enforced


@dataclass(frozen=True, slots=True)
class Ending:
    """The terminal part of a record. Written once, never changed.

    Invariants: an infra or task failure has no score; completed has no failure, every other outcome has one.
    """

    outcome: Outcome
    score: Score | None = None
    failure: Failure | None = None
    is_trainable: bool = False
    summary: Summary = field(default_factory=Summary)
    timings: Timings = field(default_factory=Timings)
    untrainable: str = ""  # why it is not trained on, if failure and mode do not explain it

    def __post_init__(self) -> None:
        if (self.outcome is Outcome.COMPLETED) is not (self.failure is None):
            raise ValueError("completed has no failure; every other outcome has one")
        if self.failure is not None and self.failure.blame != "policy" and self.score is not None:
            raise ValueError(f"a failure with blame {self.failure.blame} has no reward")
        if self.is_trainable and self.score is None:
            raise ValueError("without a score nothing is trainable")


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout, from its submission to its one terminal record."""

    id: str
    run: str
    task: Task
    position: Position = field(default_factory=Position)
    group: str | None = None
    index: int = 0  # position in its group
    priority: int = 0
    seq: int = 0  # order of submission
    ended_seq: int | None = None  # order of ending
    is_cancel_requested: bool = False
    excused: int = 0  # attempts that do not count, such as one that a drain ended
    lost: tuple[LostAttempt, ...] = ()
    ending: Ending | None = None
    scores: tuple[Mapping[str, Json], ...] = ()  # of later rescorings; the terminal one stays
    created_at: float = 0.0
    updated_at: float = 0.0

    @property
    def state(self) -> State:
        return self.position.state

    @property
    def attempt(self) -> int:
        return self.position.attempt
