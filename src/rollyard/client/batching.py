"""Converts groups to arrays: advantages, padded batches, importance weights. Needs only numpy, imported on first use.

    batch = await draw.batch(want=32)
    arrays = collate(batch.groups, advantages=advantages(batch.groups, "rloo"), pad_id=tokenizer.pad_token_id)
    weights = importance_weights(trainer_logprobs, arrays["logprobs"], arrays["loss_mask"])

Invariants. An untrainable member is in neither loss nor baseline. Each sampled token is in the loss exactly once: the
loss mask is that of the traces. Each rollout has weight one, however many traces its history forked into. A trace
without logprobs is never collated: zeros in their place would mean that the policy was certain.

This module is optional: every trainer has its own loss, and these are the parts that they have in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rollyard.client.groups import Group, GroupRollout
from rollyard.client.records import Trace
from rollyard.core.group import mean_of, spread_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

Kind = Literal["grpo", "rloo", "none"]
Level = Literal["token", "sequence"]


def advantages(groups: Iterable[Group], kind: Kind = "grpo", *, epsilon: float = 1e-6) -> dict[str, float]:
    """The advantage of each trainable member, by its rollout's id.

    - "grpo": (reward − mean) / (spread + epsilon). The spread is the group's population standard deviation (divided by
      n), as in `group.stats`.
    - "rloo": reward − mean of the other members' rewards.
    - "none": the reward itself.

    A group whose rewards are equal, including a group of one, has nothing to compare: its advantages are 0 ("grpo" and
    "rloo").
    """
    if kind not in ("grpo", "rloo", "none"):
        raise ValueError(f"there is no kind {kind!r} of advantages: grpo, rloo, none")
    result: dict[str, float] = {}
    for group in groups:
        rewards = {r.id: r.reward for r in group.rollouts if r.trainable and r.reward is not None}
        values = [*rewards.values()]
        mean, spread = mean_of(values) or 0.0, spread_of(values) or 0.0
        for id, reward in rewards.items():
            if kind == "none":
                result[id] = reward
            elif not spread:
                result[id] = 0.0
            elif kind == "grpo":
                result[id] = (reward - mean) / (spread + epsilon)
            else:  # n / (n − 1) times the distance to the mean of all is the distance to the others' mean
                result[id] = (reward - mean) * len(values) / (len(values) - 1)
    return result


def collate(
    groups: Iterable[Group],
    *,
    advantages: Mapping[str, float] | Kind | None = None,
    pad_id: int = 0,
    max_tokens: int | None = None,
    drop_untrainable: bool = True,
) -> dict[str, NDArray[Any]]:
    """Arrays of N traces, padded on the right to the length T of the longest.

    [N, T]: `input_ids` int32, `attention_mask` uint8, `loss_mask` uint8, `logprobs` float32 (of the sampled tokens; 0.0
    elsewhere), `versions` int32 (−1 elsewhere). [N]: `advantages` float32, `rewards` float32, `rollout` and `group`
    int32 (the rollout's index among all rollouts of all groups, and its group's index), `trace_weight` float32: 1 / n
    for each of the n traces of one rollout, so that they sum to one.

    `advantages`: the result of `advantages()`, or the name of a kind; None is "grpo".
    `drop_untrainable` False keeps the rows of untrainable members, and of traces without sampled tokens, with loss
    mask, advantage and weight 0 (and reward NaN if there is none). Traces without logprobs are always left out.
    `max_tokens`: a longer trace is a ValueError. It is not cut (a part of a trajectory with the reward of the whole),
    nor left out (the rest would be biased against long ones): bound `limits.max_context` of the tasks instead.
    """
    import numpy as np

    groups = tuple(groups)
    if advantages is None or isinstance(advantages, str):
        advantages = _advantages(groups, advantages or "grpo")
    rows = _rows(groups, drop_untrainable)
    longest = max(rows, key=lambda row: len(row.trace), default=None)
    width = len(longest.trace) if longest else 0
    if longest and max_tokens is not None and width > max_tokens:
        raise ValueError(
            f"trace {longest.trace.index} of rollout {longest.rollout.id} has {width} tokens, more than {max_tokens}: "
            "set limits.max_context of the tasks to what you can train on"
        )
    arrays: dict[str, NDArray[Any]] = {
        "input_ids": np.full((len(rows), width), pad_id, dtype=np.int32),
        "attention_mask": np.zeros((len(rows), width), dtype=np.uint8),
        "loss_mask": np.zeros((len(rows), width), dtype=np.uint8),
        "logprobs": np.zeros((len(rows), width), dtype=np.float32),
        "versions": np.full((len(rows), width), -1, dtype=np.int32),
        "advantages": np.zeros(len(rows), dtype=np.float32),
        "rewards": np.full(len(rows), np.nan, dtype=np.float32),
        "rollout": np.array([row.rollout_place for row in rows], dtype=np.int32),
        "group": np.array([row.group_place for row in rows], dtype=np.int32),
        "trace_weight": np.array([row.weight for row in rows], dtype=np.float32),
    }
    for number, row in enumerate(rows):
        size = len(row.trace)
        arrays["input_ids"][number, :size] = row.trace.token_ids
        arrays["attention_mask"][number, :size] = 1
        arrays["logprobs"][number, :size] = row.trace.logprobs
        arrays["versions"][number, :size] = row.trace.versions
        if row.rollout.reward is not None:
            arrays["rewards"][number] = row.rollout.reward
        if row.weight:
            if row.rollout.id not in advantages:
                raise ValueError(f"rollout {row.rollout.id} is trainable and has no advantage")
            arrays["loss_mask"][number, :size] = row.trace.mask
            arrays["advantages"][number] = advantages[row.rollout.id]
    return arrays


_advantages = advantages  # `collate` has a parameter of that name


@dataclass(frozen=True, slots=True)
class _Row:
    """A trace in the arrays. `weight` 0: it is not trained on."""

    group_place: int
    rollout_place: int
    rollout: GroupRollout
    trace: Trace
    weight: float


def _rows(groups: Sequence[Group], drop_untrainable: bool) -> list[_Row]:
    rows: list[_Row] = []
    rollouts = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    for place, (number, rollout) in enumerate(rollouts):
        if rollout.trainable and not rollout.traces:
            raise ValueError(f"rollout {rollout.id} has no traces here: it was read without them, or they were deleted")
        is_scored = rollout.trainable and rollout.reward is not None
        with_logprobs = [trace for trace in rollout.traces if trace.logprobs is not None]
        learned = [bool(is_scored and trace.trainable and trace.mask.any()) for trace in with_logprobs]
        for trace, is_learned in zip(with_logprobs, learned, strict=True):
            if is_learned or not drop_untrainable:
                rows.append(_Row(number, place, rollout, trace, 1.0 / sum(learned) if is_learned else 0.0))
    return rows


def importance_weights(
    logprobs: ArrayLike, old_logprobs: ArrayLike, mask: ArrayLike, *, cap: float = 2.0, level: Level = "token"
) -> NDArray[np.float32]:
    """The ratio of the trainer's probability of each sampled token to that of the sampling policy, at most `cap`.

    `logprobs` are the trainer's, under the weights that it trains; `old_logprobs` are those of the traces. All three
    have the same shape, [N, T]. "token": one ratio per token. "sequence": the product over a row's masked tokens, on
    each of them. Where the mask is 0, the weight is 0. Multiply the loss by it, as a constant: it corrects for older
    weights and for small numerical differences of the engine, and the cap bounds its variance.
    """
    import numpy as np

    if level not in ("token", "sequence"):
        raise ValueError(f"there is no level {level!r}: token, sequence")
    if not cap > 0:
        raise ValueError(f"cap must be more than 0, not {cap}")
    is_sampled = np.asarray(mask) != 0
    new, old = np.asarray(logprobs, dtype=np.float64), np.asarray(old_logprobs, dtype=np.float64)
    if not new.shape == old.shape == is_sampled.shape:
        raise ValueError(f"logprobs {new.shape}, old_logprobs {old.shape} and mask {is_sampled.shape} differ in shape")
    if not (new[is_sampled] < np.inf).all() or not np.isfinite(old[is_sampled]).all():  # false for NaN too
        raise ValueError("under the mask, a logprob is NaN or +inf, or an old one is not finite")
    ratios = np.zeros(new.shape, dtype=np.float64)
    np.subtract(new, old, out=ratios, where=is_sampled)  # values in the padding are ignored
    if level == "sequence":
        ratios = np.broadcast_to(ratios.sum(axis=-1, keepdims=True), ratios.shape)
    weights = np.minimum(np.exp(np.minimum(ratios, np.log(cap))), cap)  # the inner minimum avoids overflow in exp
    return np.where(is_sampled, weights, 0.0).astype(np.float32)
