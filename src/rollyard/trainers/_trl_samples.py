"""Converts groups to TRL's training data: samples for AsyncGRPOTrainer, rows for GRPOTrainer.

Invariants. The mask, the logprobs and the versions are those of the trace, token for token. An untrainable rollout
becomes no sample; where GRPOTrainer requires a row, it is masked completely and has no reward. No row is invented.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rollyard.client import Group, GroupRollout, Trace
from rollyard.client.batching import Kind, advantages
from rollyard.client.records import JsonObject


class RolloutsMissing(RuntimeError):
    """A prompt has fewer rollouts than GRPOTrainer requested."""


class Decoder(Protocol):
    """The part of a tokenizer that logs need."""

    def decode(self, token_ids: list[int], /) -> Any: ...


def sample_type() -> Callable[..., Any]:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # type: ignore[import-not-found]

    return RolloutSample


@dataclass(frozen=True, slots=True)
class SampleBuilder:
    """Converts traces to `RolloutSample`s. `first` is Rollyard's number of the version that is 0 in TRL."""

    kind: Kind
    temperature: float
    first: int
    tokenizer: Decoder | None = None

    def samples(self, group: Group, number: int) -> list[Any]:
        """Returns one sample for each trace to learn from. `number` is the group's id in TRL."""
        signals = advantages([group], self.kind)
        return [
            self._sample(group, number, rollout, trace, signals[rollout.id])
            for rollout in group.rollouts
            if rollout.id in signals
            for trace in learned(rollout)
        ]

    def _sample(self, group: Group, number: int, rollout: GroupRollout, trace: Trace, advantage: float) -> Any:
        import numpy as np

        if trace.sampling.temperature != self.temperature:
            raise ValueError(
                f"rollout {rollout.id} was sampled at temperature {trace.sampling.temperature:g}, but the trainer "
                f"computes its logprobs at {self.temperature:g}: use the same one in the run's sampling and the trainer"
            )
        prompt, completion = self._texts(trace)
        return sample_type()(
            prompt=prompt,
            completion=completion,
            input_ids=np.asarray(trace.token_ids, dtype=np.int64),
            completion_mask=np.asarray(trace.mask, dtype=np.int64),
            old_log_probs=np.asarray(trace.logprobs, dtype=np.float32),
            advantage=float(advantage),
            # The oldest: for TRL, a sample is as old as the weights that it was started with.
            model_version=int(trace.versions[trace.mask == 1].min()) - self.first,
            group_id=number,
            metrics=metrics_of(group, rollout),
            enqueued_at=time.time(),
        )

    def _texts(self, trace: Trace) -> tuple[list[JsonObject], list[JsonObject]]:
        if self.tokenizer is None:
            return [], []
        start = int(trace.mask.argmax())
        before, after = trace.token_ids[:start].tolist(), trace.token_ids[start:].tolist()
        return (
            [{"role": "user", "content": self.tokenizer.decode(before)}],
            [{"role": "assistant", "content": self.tokenizer.decode(after)}],
        )


def learned(rollout: GroupRollout) -> list[Trace]:
    """Returns the traces of a trainable rollout that can be in a loss."""
    if not rollout.traces:
        raise ValueError(f"rollout {rollout.id} is trainable, but has no traces")
    return [t for t in rollout.traces if t.trainable and t.logprobs is not None and t.mask.any()]


def metrics_of(group: Group, rollout: GroupRollout) -> dict[str, float]:
    """Returns what TRL averages over a step's samples, under TRL's names where they exist."""
    stats, score, summary = group.stats or {}, rollout.record.score or {}, rollout.record.summary or {}
    metrics = {"reward": rollout.reward, "reward_std": stats.get("spread"), "rollyard/turns": summary.get("turns")}
    metrics |= {f"rewards/{name}": value for name, value in (score.get("components") or {}).items()}
    return {name: float(value) for name, value in metrics.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TrlRow:
    """The fields of one rollout for GRPOTrainer."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    reward: float | None
    rollout: str


def row_of(rollout: GroupRollout) -> TrlRow:
    """Converts a rollout to one row. An untrainable one is masked completely and has no reward: TRL leaves it out of
    loss and baseline. Raises ValueError if it forked into several sequences, RolloutsMissing if it has no tokens."""
    traces = learned(rollout) if rollout.trainable and rollout.reward is not None else []
    if len(traces) > 1:
        raise ValueError(
            f"the history of rollout {rollout.id} forked into {len(traces)} sequences, but GRPOTrainer takes one for "
            "each prompt: train with AsyncGRPOTrainer and RollyardRolloutWorker"
        )
    trace = traces[0] if traces else max(rollout.traces, key=len, default=None)
    if trace is None or len(trace) < 2:
        failure = rollout.record.failure or {}
        raise RolloutsMissing(f"rollout {rollout.id} has no tokens at all ({failure.get('code') or 'no reason given'})")
    start = int(trace.mask.argmax()) if trace.mask.any() else len(trace) - 1
    size = len(trace) - start
    logprobs, mask, reward = [0.0] * size, [0] * size, None
    if traces and trace.logprobs is not None:
        logprobs, mask, reward = trace.logprobs[start:].tolist(), trace.mask[start:].tolist(), rollout.reward
    return TrlRow(
        trace.token_ids[:start].tolist(), trace.token_ids[start:].tolist(), logprobs, mask, reward, rollout.id
    )
