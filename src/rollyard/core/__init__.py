"""Plain data and rules, and the lock files and atomic writes that several packages need. Imports no other package."""

from rollyard.core.deadline import Deadline, DeadlineExpired
from rollyard.core.draw import Batch, Draw, DrawConfig
from rollyard.core.engine import EngineSpec
from rollyard.core.failure import CODES, Blame, Failure, Outcome, RollyardError
from rollyard.core.group import Group, GroupState
from rollyard.core.ids import DEFAULT_RUN, check_id, id_of, key_of, new_id, sampling_seed
from rollyard.core.json import Json, canonical, digest
from rollyard.core.overlong import OverlongPenalty
from rollyard.core.rollout import Ending, LostAttempt, Rollout, Summary, Timings
from rollyard.core.score import Score, TurnReward
from rollyard.core.state import LIVE, MOVES, IllegalMove, Position, State
from rollyard.core.task import AgentSpec, DataField, Limits, Mode, Run, Sampling, SandboxOptions, Task
from rollyard.core.trace import Artifact, Message, Span, Trace, Trajectory, ids_array, logprobs_array
from rollyard.core.workclock import WorkClock

__all__ = [
    "CODES",
    "DEFAULT_RUN",
    "LIVE",
    "MOVES",
    "AgentSpec",
    "Artifact",
    "Batch",
    "Blame",
    "DataField",
    "Deadline",
    "DeadlineExpired",
    "Draw",
    "DrawConfig",
    "Ending",
    "EngineSpec",
    "Failure",
    "Group",
    "GroupState",
    "IllegalMove",
    "Json",
    "Limits",
    "LostAttempt",
    "Message",
    "Mode",
    "Outcome",
    "OverlongPenalty",
    "Position",
    "Rollout",
    "RollyardError",
    "Run",
    "Sampling",
    "SandboxOptions",
    "Score",
    "Span",
    "State",
    "Summary",
    "Task",
    "Timings",
    "Trace",
    "Trajectory",
    "TurnReward",
    "WorkClock",
    "canonical",
    "check_id",
    "digest",
    "id_of",
    "ids_array",
    "key_of",
    "logprobs_array",
    "new_id",
    "sampling_seed",
]
