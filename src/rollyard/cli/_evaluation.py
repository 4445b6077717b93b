"""What an evaluation says: pass@k and rewards of each environment and over all, and what is missing from them.

The numbers are those of `core.passk`: means over tasks, with 95 % intervals. A sample without a reward (blame infra,
task or client) is neither right nor wrong: it is left out, counted and told, and so is a task that is left with fewer
than k samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollyard.cli._console import note, number, plain, seconds, table
from rollyard.core import passk

if TYPE_CHECKING:
    from rich.table import Table

    from rollyard.client import Record

ALL = "all"
TOLD = 10  # tasks with too few samples that are named
ALL_ROWS = 8  # up to this k the table has every pass@j, beyond it powers of two; the JSON always has all


@dataclass(frozen=True, slots=True)
class Rules:
    """By what samples are judged. `seed` is of the bootstrap."""

    k: int
    n: int
    threshold: float
    seed: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """One task and its samples, ended."""

    place: str
    records: tuple[Record, ...]

    @property
    def environment(self) -> str:
        return str(self.records[0].task.get("environment", ""))

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(record.reward for record in self.records if record.reward is not None)

    @property
    def missing(self) -> Counter[str]:
        """By what became of them instead."""
        return Counter(
            str((record.failure or {}).get("code", record.outcome)) for record in self.records if record.reward is None
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All of it."""

    run: str
    policy: str
    rules: Rules
    tasks: tuple[Sampled, ...]
    took_s: float

    @property
    def missing(self) -> Counter[str]:
        return sum((task.missing for task in self.tasks), Counter[str]())

    @property
    def missing_share(self) -> float:
        return self.missing.total() / sum(len(task.records) for task in self.tasks)

    @property
    def too_few(self) -> list[Sampled]:
        return [task for task in self.tasks if len(task.rewards) < self.rules.k]

    def parts(self) -> dict[str, list[Sampled]]:
        """The tasks of each environment; where there are several, all of them, too."""
        found: dict[str, list[Sampled]] = {}
        for task in self.tasks:
            found.setdefault(task.environment, []).append(task)
        return found if len(found) == 1 else {**found, ALL: list(self.tasks)}

    def as_body(self) -> dict[str, Any]:
        rules = self.rules
        parts = {name: measured(part, rules) for name, part in self.parts().items()}
        overall = parts.pop(ALL) if ALL in parts else next(iter(parts.values()))
        return {
            "run": self.run,
            "policy": self.policy,
            "k": rules.k,
            "samples_per_task": rules.n,
            "threshold": rules.threshold,
            "seed": rules.seed,
            "took_s": round(self.took_s, 3),
            "missing": dict(self.missing),
            ALL: overall,
            "environments": parts,
            "tasks": [_task_body(task, rules) for task in self.tasks],
        }


def measured(tasks: Sequence[Sampled], rules: Rules) -> dict[str, Any]:
    """The numbers of some tasks. An estimate is null where no task has enough samples."""
    rewards = [task.rewards for task in tasks]
    scored = [record for task in tasks for record in task.records if record.reward is not None]
    passes = {
        str(k): _estimate_body(passk.pass_over_tasks(rewards, k, threshold=rules.threshold, seed=rules.seed))
        for k in range(1, rules.k + 1)
    }
    return {
        "tasks": len(tasks),
        "samples": len(scored),
        "missing": sum(len(task.records) for task in tasks) - len(scored),
        "reward": _estimate_body(passk.reward_over_tasks(rewards, seed=rules.seed)),
        "pass_at": passes,
        "turns": _mean(scored, "summary", "turns"),
        "sampled_tokens": _mean(scored, "summary", "sampled_tokens"),
        "run_s": _mean(scored, "timings", "run_s"),
    }


def _estimate_body(estimate: passk.Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    low, high = estimate.interval or (None, None)
    return {"mean": estimate.mean, "low": low, "high": high, "tasks": estimate.tasks, "missing": estimate.missing}


def _mean(records: Sequence[Record], group: str, name: str) -> float | None:
    """Per sample."""
    values = [float((getattr(record, group) or {}).get(name) or 0.0) for record in records]
    return sum(values) / len(values) if values else None


def _task_body(task: Sampled, rules: Rules) -> dict[str, Any]:
    return {
        "place": task.place,
        "environment": task.environment,
        "rollouts": [record.id for record in task.records],
        "rewards": [record.reward for record in task.records],
        "correct": sum(passk.is_correct(reward, rules.threshold) for reward in task.rewards),
        "missing": dict(task.missing),
    }


# --- for a person -------------------------------------------------------------------------------------


def evaluation_table(evaluation: Evaluation) -> Table:
    """One column for each environment, one row for each number."""
    parts = {name: measured(part, evaluation.rules) for name, part in evaluation.parts().items()}
    made = table("", *map(plain, parts), right=tuple(map(plain, parts)))
    for name in ("tasks", "samples", "missing"):
        made.add_row(name, *(number(part[name]) for part in parts.values()))
    made.add_row("mean reward", *(_estimate(part["reward"]) for part in parts.values()))
    for k in shown_ks(evaluation.rules.k):
        made.add_row(f"pass@{k}", *(_estimate(part["pass_at"][str(k)]) for part in parts.values()))
    made.add_row("turns", *(_average(part["turns"]) for part in parts.values()))
    made.add_row("tokens", *(_average(part["sampled_tokens"]) for part in parts.values()))
    made.add_row("RUN", *(seconds(part["run_s"]) for part in parts.values()))
    made.caption = "means over tasks, with 95 % intervals; turns, tokens and RUN per sample"
    return made


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


def tell_missing(evaluation: Evaluation) -> None:
    """On stderr: what the numbers do not hold."""
    if not evaluation.missing:
        return
    causes = ", ".join(f"{count} {code}" for code, count in evaluation.missing.most_common())
    note(f"{evaluation.missing.total()} samples have no score and are in no number: {causes}")
    k = evaluation.rules.k
    for task in evaluation.too_few[:TOLD]:
        count = len(task.rewards)
        note(f"{task.place}: {count} scored samples; it is in no pass@k beyond {count}" if count else
             f"{task.place}: no scored sample; it is in no number")  # fmt: skip
    if len(evaluation.too_few) > TOLD:
        note(f"… and {len(evaluation.too_few) - TOLD} more tasks have fewer than {k} scored samples")
