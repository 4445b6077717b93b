"""Shows an evaluation: the service's numbers, and the samples of each task.

`sampling.evaluation` decides which samples count and which are missing, as in the service.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollyard.cli._console import note, number, plain, seconds, table
from rollyard.core import Blame
from rollyard.sampling.evaluation import Sample, TaskSamples, placed
from rollyard.sampling.membership import fate_of

if TYPE_CHECKING:
    from rich.table import Table

    from rollyard.client import Evaluation, Record

ALL = "all"
SHOWN = 10  # maximum of tasks with too few samples that are listed
ALL_ROWS = 8  # up to this k the table has every pass@j, beyond it powers of two; the JSON always has all


@dataclass(frozen=True, slots=True)
class EvalReport:
    """An ended evaluation. `tasks` holds the place and the samples of each task."""

    evaluation: Evaluation
    result: Mapping[str, Any]
    tasks: tuple[tuple[str, TaskSamples], ...]
    took_s: float

    @property
    def state(self) -> str:
        return self.evaluation.state

    @property
    def detail(self) -> str:
        return str(self.evaluation.raw.get("detail") or self.evaluation.reason)

    @property
    def k(self) -> int:
        return int(self.result["k"])

    @property
    def too_few(self) -> list[tuple[str, int]]:
        """Tasks with fewer than k scored samples: the place and the number of scored samples."""
        return [(place, len(task.rewards)) for place, task in self.tasks if len(task.rewards) < self.k]

    def parts(self) -> dict[str, Mapping[str, Any]]:
        """The numbers of each environment; if there are several, also of all together."""
        environments = dict(self.result["environments"])
        return environments if len(environments) == 1 else {**environments, ALL: self.result[ALL]}

    def as_body(self) -> dict[str, Any]:
        return {
            "run": self.evaluation.run,
            "policy": self.evaluation.policy,
            "version": self.evaluation.version,
            "state": self.state,
            "reason": self.evaluation.reason,
            "took_s": round(self.took_s, 3),
            **self.result,
            "tasks": [self._task_body(place, task) for place, task in self.tasks],
        }

    def _task_body(self, place: str, task: TaskSamples) -> dict[str, Any]:
        return {
            "place": place,
            "environment": task.environment,
            "rollouts": [*(sample.rollout for sample in task.samples), *[""] * task.absent],
            "rewards": [*(sample.reward for sample in task.samples), *[None] * task.absent],
            "correct": task.correct(float(self.result["threshold"])),
            "missing": dict(task.missing),
        }


def read_evaluation(
    evaluation: Evaluation, places: Sequence[str], records: Sequence[Record], took_s: float
) -> EvalReport:
    """`records` are all rollouts of the evaluation."""
    result = evaluation.result or {}
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.group or "", []).append(record)
    size, version = int(result["samples_per_task"]), -1 if evaluation.version is None else evaluation.version
    tasks: list[tuple[str, TaskSamples]] = []
    for at, place in enumerate(places):
        group = groups.get(f"{evaluation.id}.{at}", [])
        environment = str(group[0].task.get("environment", "")) if group else ""
        tasks.append((place, placed(map(_sample, group), size, version, environment=environment)))
    return EvalReport(evaluation, result, tuple(tasks), took_s)


def _sample(record: Record) -> Sample:
    failure, summary = record.failure or {}, record.summary or {}
    blame = failure.get("blame")
    return Sample(
        index=record.index,
        rollout=record.id,
        reward=record.reward,
        code=str(failure.get("code", record.outcome)),
        fate=fate_of(record.reward is not None, None if blame is None else Blame(blame)),
        oldest_version=int(summary.get("oldest_version", -1)),
        newest_version=int(summary.get("newest_version", -1)),
    )


# --- output -------------------------------------------------------------------------------------------


def evaluation_table(evaluation: EvalReport) -> Table:
    """One column for each environment, one row for each number."""
    parts = evaluation.parts()
    grid = table("", *map(plain, parts), right=tuple(map(plain, parts)))
    for name in ("tasks", "samples", "missing"):
        grid.add_row(name, *(number(part[name]) for part in parts.values()))
    grid.add_row("mean reward", *(_estimate(part["reward"]) for part in parts.values()))
    for k in shown_ks(evaluation.k):
        grid.add_row(f"pass@{k}", *(_estimate(part["pass_at"][str(k)]) for part in parts.values()))
    grid.add_row("turns", *(_average(part["turns"]) for part in parts.values()))
    grid.add_row("tokens", *(_average(part["sampled_tokens"]) for part in parts.values()))
    grid.add_row("RUN", *(seconds(part["run_s"]) for part in parts.values()))
    grid.caption = "means over tasks, with 95 % intervals; turns, tokens and RUN per sample"
    return grid


def shown_ks(k: int) -> list[int]:
    if k <= ALL_ROWS:
        return list(range(1, k + 1))
    return sorted({k, *(1 << power for power in range(k.bit_length()))})


def _estimate(body: Mapping[str, Any] | None) -> str:
    if body is None:
        return "–"
    interval = "" if body["low"] is None else f"  {body['low']:.3f} … {body['high']:.3f}"
    return f"{body['mean']:.3f}{interval}"


def _average(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def by_table(evaluation: EvalReport, by: str) -> Table:
    """One row for each value of the key."""
    k = evaluation.k
    columns = ("tasks", "missing", "mean reward", *dict.fromkeys(("pass@1", f"pass@{k}")))
    grid = table(plain(by), *columns, right=columns)
    for label, part in evaluation.result["by"].items():
        passes = (_estimate(part["pass_at"][str(j)]) for j in dict.fromkeys((1, k)))
        counts = number(part["tasks"]), number(part["missing"])
        grid.add_row(plain(label or "–"), *counts, _estimate(part["reward"]), *passes)
    return grid


def report_missing(evaluation: EvalReport) -> None:
    """Reports on stderr the samples that are not in the numbers."""
    missing: Counter[str] = Counter(evaluation.result["missing"])
    if not missing:
        return
    causes = ", ".join(f"{count} {code}" for code, count in missing.most_common())
    note(f"{missing.total()} samples have no score and are not counted: {causes}")
    for place, count in evaluation.too_few[:SHOWN]:
        note(f"{place}: {count} scored samples; it is not counted in pass@k beyond {count}" if count else
             f"{place}: no scored sample; it is not counted")  # fmt: skip
    if len(evaluation.too_few) > SHOWN:
        note(f"… and {len(evaluation.too_few) - SHOWN} more tasks have fewer than {evaluation.k} scored samples")
