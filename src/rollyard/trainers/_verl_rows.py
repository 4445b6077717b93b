"""Converts groups to verl's rows, in numpy: the trainable part of a group, and the padded arrays of verl's DataProto.

verl divides a sequence into prompt and response. A trace's prompt is everything before the first token that it owns,
its response everything from there to the last one. A tool's output after that trains nothing, and estimators that use
the mask would lose a reward on a masked token.

Invariants. A training row has a reward, logprobs, and at least one sampled token. A rollout that infrastructure failed
has no row. An untrainable member has no row. Where verl requires one (its DataProto), it is a `BlankRow`: no response,
no mask, and as its score the mean of the members that count, which keeps the group's baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollyard.client.groups import Group, GroupRollout
from rollyard.client.records import Trace
from rollyard.core.group import mean_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class VerlRow:
    """One trace, divided into prompt and response. The last four arrays have the response's length."""

    rollout: GroupRollout
    reward: float
    prompt_ids: NDArray[np.int64]
    response_ids: NDArray[np.int64]
    mask: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]  # −1 where nothing was sampled

    @property
    def sampled_tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def oldest_version(self) -> int:
        return int(self.versions[self.mask == 1].min())

    @property
    def newest_version(self) -> int:
        return int(self.versions[self.mask == 1].max())

    @property
    def turns(self) -> int:
        return int((self.rollout.record.summary or {}).get("turns") or 0)

    @property
    def components(self) -> dict[str, float]:
        """Components of the reward, by name, except two names of verl: "reward" is the whole, and with "acc" verl would
        count a validation sample that infrastructure failed as wrong."""
        components = (self.rollout.record.score or {}).get("components") or {}
        return {str(name): float(value) for name, value in components.items() if name not in ("reward", "acc")}

    @property
    def seconds(self) -> dict[str, float]:
        """Durations, under verl's names."""
        timings = self.rollout.record.timings or {}
        names = {"generate_sequences": "model_s", "tool_calls": "tool_s", "compute_score": "eval_s"}
        return {name: float(timings.get(timing_name) or 0.0) for name, timing_name in names.items()}


@dataclass(frozen=True, slots=True, eq=False)
class BlankRow:
    """A row that trains nothing and keeps the baseline, where verl requires one. `prompt_ids` is never empty."""

    prompt_ids: NDArray[np.int64]
    reward: float


@dataclass(frozen=True, slots=True, eq=False)
class GroupRows:
    """The rows of a group for verl: those of each member that counts, by index; and how many members do not count."""

    members: tuple[tuple[VerlRow, ...], ...]
    size: int  # as requested
    lost: int  # members that infrastructure failed, beyond the spares
    untrainable: int  # members in neither loss nor baseline
    reason: str | None = None  # why the group is short, if it is

    @property
    def mean(self) -> float | None:
        """The mean reward of the members that count; None if there is no such member."""
        return mean_of([each[0].reward for each in self.members])

    @property
    def rows(self) -> list[tuple[int, VerlRow]]:
        return [(member, row) for member, rows in enumerate(self.members) for row in rows]


def group_rows_of(group: Group, size: int, *, is_training: bool, temperature: float | None = None) -> GroupRows:
    """In training, takes only trainable members; else all with a score (nothing in a run of mode eval is trainable).

    `temperature` is that of the trainer's logprobs. Raises ValueError for a trace that was sampled with another one.
    """
    members: list[tuple[VerlRow, ...]] = []
    for rollout in group.rollouts:
        rows = _rows(rollout, is_training=is_training, temperature=temperature)
        if rows:
            members.append(rows)
    missing = max(0, size - len(group.rollouts))
    return GroupRows(
        tuple(members), size, missing, len(group.rollouts) - len(members), group.reason if missing else None
    )


def _rows(rollout: GroupRollout, *, is_training: bool, temperature: float | None) -> tuple[VerlRow, ...]:
    if rollout.reward is None or (is_training and not rollout.trainable):
        return ()
    rows: list[VerlRow] = []
    for trace in rollout.traces:
        if not trace.mask.any() or (is_training and (not trace.trainable or trace.logprobs is None)):
            continue
        if is_training and temperature is not None and trace.sampling.temperature != temperature:
            raise ValueError(
                f"rollout {rollout.id} was sampled at temperature {trace.sampling.temperature:g}, but verl computes "
                f"its logprobs at {temperature:g} (actor_rollout_ref.rollout.temperature): use the same one"
            )
        rows.append(_row(rollout, rollout.reward, trace))
    return tuple(rows)


def _row(rollout: GroupRollout, reward: float, trace: Trace) -> VerlRow:
    import numpy as np

    owned = np.flatnonzero(trace.mask)
    start, end = int(owned[0]), int(owned[-1]) + 1
    if not start:
        raise ValueError(f"trace {trace.index} of rollout {rollout.id} has no prompt")
    ids = np.asarray(trace.token_ids, dtype=np.int64)
    logprobs = np.zeros(len(ids), np.float32) if trace.logprobs is None else np.asarray(trace.logprobs, np.float32)
    mask, versions = np.asarray(trace.mask, dtype=np.int64), np.asarray(trace.versions, dtype=np.int64)
    cut = slice(start, end)
    return VerlRow(rollout, reward, ids[:start], ids[cut], mask[cut], logprobs[cut], versions[cut])


def fill(group: GroupRows, pad_id: int, otherwise: float = 0.0) -> tuple[list[VerlRow | BlankRow], list[VerlRow]]:
    """Returns one row for each requested member, and the rows that are left out.

    Of a rollout whose history forked, the row is the trace that owns the most tokens. `otherwise` is the score of blank
    rows in a group without other rows: validation takes the mean over all rows, and they must not count as 0.
    """
    import numpy as np

    rows: list[VerlRow | BlankRow] = []
    left_out: list[VerlRow] = []
    for each in group.members[: group.size]:
        best = max(each, key=lambda row: row.sampled_tokens)
        rows.append(best)
        left_out += [row for row in each if row is not best]
    prompt = group.members[0][0].prompt_ids if group.members else np.full(1, pad_id, dtype=np.int64)
    mean = group.mean
    neutral = otherwise if mean is None else mean
    return rows + [BlankRow(prompt, neutral)] * (group.size - len(rows)), left_out


def padded(
    rows: Sequence[VerlRow | BlankRow], prompt_length: int, response_length: int, pad_id: int
) -> dict[str, NDArray[Any]]:
    """Pads prompts on the left and responses on the right, to verl's two lengths, or to the longest row.

    A longer row is never cut, since half a trajectory did not earn the reward of the whole. The tasks'
    `limits.max_context` bounds the length.
    """
    import numpy as np

    width = max([prompt_length, *(len(row.prompt_ids) for row in rows)])
    length = max([response_length, *(len(row.response_ids) for row in rows if isinstance(row, VerlRow))])
    count = len(rows)
    prompts = np.full((count, width), pad_id, dtype=np.int64)
    responses = np.full((count, length), pad_id, dtype=np.int64)
    attention = np.zeros((count, width + length), dtype=np.int64)
    mask = np.zeros((count, length), dtype=np.int64)
    logprobs = np.zeros((count, length), dtype=np.float32)
    scores = np.zeros((count, length), dtype=np.float32)
    for i, row in enumerate(rows):
        prompts[i, width - len(row.prompt_ids) :] = row.prompt_ids
        attention[i, width - len(row.prompt_ids) : width] = 1
        if isinstance(row, BlankRow):
            scores[i, 0] = row.reward
            continue
        size = len(row.response_ids)
        responses[i, :size] = row.response_ids
        attention[i, width : width + size] = 1
        mask[i, :size] = row.mask
        logprobs[i, :size] = row.logprobs
        scores[i, size - 1] = row.reward
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "input_ids": np.concatenate((prompts, responses), axis=1),
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
        "rollout_log_probs": logprobs,
        "rm_scores": scores,
    }
