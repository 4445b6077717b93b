"""The result of an evaluation: pass@k and rewards per environment and overall, and what is missing from them.

A sample without a reward is neither right nor wrong: it is left out and counted by its cause. So is a task with fewer
than k remaining samples, a sample in which weights other than the evaluated ones took part, and every sample of a task
that cannot be done as given: which of those were scored before that was known depends on how long they took.

Pure: the same samples and rules give the same numbers. Thousands of tasks take about a second: call it in a thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollyard.core import Json, Rollout, id_of
from rollyard.core.passk import is_correct
from rollyard.sampling.estimates import Estimate, pass_curve, reward_over_tasks
from rollyard.sampling.membership import MemberFate, end_of

VERSION_CHANGED = "version_changed"
NOT_STARTED = "not_begun"


@dataclass(frozen=True, slots=True)
class Rules:
    """How samples are evaluated. `seed` is that of the bootstrap."""

    k: int
    samples: int  # per task
    threshold: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout of a task."""

    index: int
    rollout: str
    reward: float | None = None
    code: str = ""  # why it has no reward
    fate: MemberFate = MemberFate.STOOD
    oldest_version: int = -1
    newest_version: int = -1
    turns: int = 0
    sampled_tokens: int = 0
    run_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TaskSamples:
    """A task's samples: those with a reward are in the figures, the others are missing. Places without a rollout are
    only counted: an evaluation that fails early may have millions."""

    environment: str
    samples: tuple[Sample, ...]
    label: str = ""  # the task's value of `by`
    absent: int = 0  # places without a rollout
    absent_code: str = ""  # why they have none

    @property
    def size(self) -> int:
        return len(self.samples) + self.absent

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(sample.reward for sample in self.samples if sample.reward is not None)

    @property
    def missing(self) -> Counter[str]:
        missing = Counter(sample.code for sample in self.samples if sample.reward is None)
        if self.absent:
            missing[self.absent_code] += self.absent
        return missing

    def correct(self, threshold: float) -> int:
        return sum(is_correct(reward, threshold) for reward in self.rewards)


def sample_of(rollout: Rollout, otherwise: str) -> Sample:
    """Returns the sample of a rollout. One that has not ended gets the code `otherwise`."""
    ending = rollout.ending
    if ending is None:
        return Sample(rollout.index, id_of(rollout.id), code=otherwise, fate=MemberFate.CANCELLED)
    end, summary = end_of(rollout), ending.summary
    return Sample(
        index=rollout.index,
        rollout=id_of(rollout.id),
        reward=end.reward,
        code=end.code or str(ending.outcome),
        fate=end.fate,
        oldest_version=end.oldest_version,
        newest_version=end.newest_version,
        turns=summary.turns,
        sampled_tokens=summary.sampled_tokens,
        run_s=ending.timings.run_s,
    )


def placed(
    samples: Iterable[Sample],
    size: int,
    version: int,
    otherwise: str = NOT_STARTED,
    *,
    environment: str = "",
    label: str = "",
) -> TaskSamples:
    """Returns a task's `size` places, filled from all its rollouts. A rollout that infrastructure lost leaves its place
    to a spare; if no spare is left, the sample is missing. `otherwise` is the code of places without a rollout."""
    ordered = sorted(samples, key=lambda sample: sample.index)
    hopeless = next((sample for sample in ordered if sample.fate is MemberFate.HOPELESS), None)
    if hopeless is not None:
        first = [one for one in ordered if one.index < size]
        chosen = [replace(sample, reward=None, code=hopeless.code) for sample in first]
        return TaskSamples(environment, tuple(chosen), label, size - len(chosen), hopeless.code)
    stood = [sample for sample in ordered if sample.fate is not MemberFate.LOST][:size]
    lost = [sample for sample in ordered if sample.fate is MemberFate.LOST]
    short = min(size - len(stood), len(lost))
    chosen = sorted([*stood, *lost[len(lost) - short :]], key=lambda sample: sample.index)
    pinned = tuple(_pinned(sample, version) for sample in chosen)
    return TaskSamples(environment, pinned, label, size - len(pinned), otherwise)


def _pinned(sample: Sample, version: int) -> Sample:
    if sample.reward is None or {sample.oldest_version, sample.newest_version} <= {-1, version}:
        return sample
    return replace(sample, reward=None, code=VERSION_CHANGED)


def evaluated(tasks: Sequence[TaskSamples], rules: Rules, *, has_labels: bool = False) -> dict[str, Json]:
    """Returns the result of an evaluation as it is stored and returned to clients."""
    missing = Counter[str]()
    for task in tasks:
        missing.update(task.missing)
    environments = _parts(tasks, lambda task: task.environment)
    parts = {name: measured(part, rules) for name, part in environments.items()}
    result: dict[str, Json] = {
        "k": rules.k,
        "samples_per_task": rules.samples,
        "threshold": rules.threshold,
        "seed": rules.seed,
        "missing": dict(missing.most_common()),
        "missing_share": missing.total() / max(1, len(tasks) * rules.samples),
        "all": next(iter(parts.values())) if len(parts) == 1 else measured(tasks, rules),
        "environments": parts,
    }
    if has_labels:
        labels = sorted(_parts(tasks, lambda task: task.label).items())
        result["by"] = {label: measured(part, rules) for label, part in labels}
    return result


def _parts(tasks: Iterable[TaskSamples], key: Callable[[TaskSamples], str]) -> dict[str, list[TaskSamples]]:
    parts: dict[str, list[TaskSamples]] = {}
    for task in tasks:
        parts.setdefault(key(task), []).append(task)
    return parts


def measured(tasks: Sequence[TaskSamples], rules: Rules) -> dict[str, Json]:
    """Returns the figures of some tasks. An estimate is null if no task has enough samples."""
    scored = [sample for task in tasks for sample in task.samples if sample.reward is not None]
    counts = [(len(task.rewards), task.correct(rules.threshold)) for task in tasks]
    curve = pass_curve(counts, range(1, rules.k + 1), seed=rules.seed)
    return {
        "tasks": len(tasks),
        "samples": len(scored),
        "missing": sum(task.size for task in tasks) - len(scored),
        "reward": _estimate_json(reward_over_tasks([task.rewards for task in tasks], seed=rules.seed)),
        "pass_at": {str(k): _estimate_json(estimate) for k, estimate in curve.items()},
        "turns": _mean([sample.turns for sample in scored]),
        "sampled_tokens": _mean([sample.sampled_tokens for sample in scored]),
        "run_s": _mean([sample.run_s for sample in scored]),
    }


def _estimate_json(estimate: Estimate | None) -> Json:
    if estimate is None:
        return None
    low, high = estimate.interval or (None, None)
    return {"mean": estimate.mean, "low": low, "high": high, "tasks": estimate.tasks, "missing": estimate.missing}


def _mean(values: Sequence[float]) -> float | None:
    """Returns the mean per sample."""
    return sum(values) / len(values) if values else None


def label_of(data: Mapping[str, Json], by: str) -> str:
    """Returns the task data's value under that key as a string, "" if there is none."""
    value = data.get(by)
    return value if isinstance(value, str) else "" if value is None else str(value)[:256]
