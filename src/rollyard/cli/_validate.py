"""Finds all problems of tasks: by checks of their text, and optionally by running them with oracle and no-op agents.

A *problem* makes a task useless: it cannot be submitted, its reference solution does not get the highest reward,
doing nothing gets it, or its environment's code raises an exception. A *warning* is a probable mistake. A run that
failed for a reason outside the task (blame infra) proves nothing: it is reported separately, as not tried.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rollyard.cli._console import CommandError
from rollyard.cli._local_play import ResourcesByRuntime, played_body, progress
from rollyard.cli._tasks import TaskLine
from rollyard.core.passk import TOLERANCE

if TYPE_CHECKING:
    from rollyard.core import Task
    from rollyard.pipeline import StageResources
    from rollyard.pipeline.local_rollout import PlayResult

VERIFIER_CRASHED = "verifier_crashed"
"""The one failure with blame infra that is a problem here: nothing but the environment's `eval` ran."""

LITTLE_BYTES = 16 << 20
"""No useful program starts with less memory or disk than this: the value was probably meant in MiB."""


_OF_LINE = re.compile(r"(.+?:\d+): (.*)", re.DOTALL)
_OF_FILE = re.compile(r"(.+?) ((?:cannot be read|is not UTF-8).*)", re.DOTALL)


@dataclass(slots=True)
class Finding:
    """The findings for one line. `not_tried` is why its runs prove nothing."""

    place: str
    environment: str = ""
    problems: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])
    not_tried: str = ""
    oracle: PlayResult | None = None
    noop: PlayResult | None = None

    @property
    def is_good(self) -> bool:
        return not self.problems and not self.not_tried

    def as_body(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "environment": self.environment,
            "ok": self.is_good,
            "problems": self.problems,
            "warnings": self.warnings,
            "not_tried": self.not_tried or None,
            "oracle": self.oracle and played_body(self.oracle),
            "noop": self.noop and played_body(self.noop),
        }


async def validate(
    lines: Sequence[TaskLine | CommandError],
    resource_sets: ResourcesByRuntime,
    *,
    plays: bool,
    jobs: int,
    max_reward: float,
) -> list[Finding]:
    """Returns one finding per line, in order."""
    findings: list[Finding] = []
    seen: dict[str, str] = {}
    to_play: list[tuple[Finding, StageResources, Task]] = []
    for line in lines:
        if isinstance(line, CommandError):
            findings.append(_unreadable(line))
            continue
        finding = Finding(line.place, str(line.task.get("environment", "")))
        findings.append(finding)
        resolved = await _checked(line, resource_sets, finding)
        _warn(line, seen, finding)
        if plays and resolved is not None and not finding.problems:
            to_play.append((finding, *resolved))
    if to_play:
        await resource_sets.add_judges()
        await _play_all(to_play, jobs, max_reward)
    return findings


def _unreadable(trouble: CommandError) -> Finding:
    """The error's text begins with the place: a line, or a whole file."""
    match = _OF_LINE.fullmatch(trouble.what) or _OF_FILE.fullmatch(trouble.what)
    return Finding(match[1], problems=[match[2]]) if match else Finding("", problems=[trouble.what])


# --- checks of the text -------------------------------------------------------------------------------


async def _checked(
    line: TaskLine, resource_sets: ResourcesByRuntime, finding: Finding
) -> tuple[StageResources, Task] | None:
    """Checks everything that a service checks at submit. Returns None if further checks are not possible."""
    from rollyard.core import RollyardError, Run
    from rollyard.core.failure import InvalidRequest
    from rollyard.service.schemas.task import to_task

    try:
        task = resource_sets.placed(to_task(line.task, {}, ()))
        resources = await resource_sets.of(task)
        resolved = resources.resolve(task)
        _ = resolved.environment  # raises if there is none
    except InvalidRequest as error:
        finding.problems += _each_field(error)
        return None
    except RollyardError as error:
        finding.problems.append(error.detail)
        return None
    except CommandError as error:
        finding.problems.append(f"sandbox.runtime: {error.what}; {error.remedy}")
        return None
    parts = (
        resolved.check_data,
        resolved.check_agent,
        lambda: resolved.tools,
        lambda: resolved.image(),
        lambda: resources.check(task, Run("validate")),  # what remains: the agent together with the runtime
    )
    for part in parts:
        try:
            part()
        except RollyardError as error:
            finding.problems.append(error.detail)
        except Exception as error:  # a bug of an environment or agent; the other lines are still checked
            finding.problems.append(f"its check raised {type(error).__name__}: {error}")
    finding.problems[:] = dict.fromkeys(finding.problems)  # an unknown agent is reported by its check and by its tools
    return resources, task


def _each_field(error: Any) -> list[str]:
    fields = error.data.get("fields")
    if not isinstance(fields, list) or not fields:
        return [error.detail]
    return [f"{item['path']}: {item['problem']}" if item["path"] else str(item["problem"]) for item in fields]


def _warn(line: TaskLine, seen: dict[str, str], finding: Finding) -> None:
    """Checks only the values that the task itself sets: a default that does not fit a short task is no mistake."""
    from rollyard.core.json import digest

    first = seen.setdefault(digest(line.task), line.place)
    if first != line.place:
        finding.warnings.append(f"the same task as {first}")
    limits, sampling, sandbox = (_object(line.task, name) for name in ("limits", "sampling", "sandbox"))
    run_s = limits.get("run_s")
    for name in ("tool_s", "model_s", "stall_s"):
        if _is_above(limits.get(name), run_s):
            finding.warnings.append(f"limits.{name} {limits[name]:g} is more than limits.run_s {run_s:g}")
    max_tokens = sampling.get("max_tokens")
    for name in ("max_tokens", "max_context"):
        if _is_above(max_tokens, limits.get(name)):
            finding.warnings.append(f"sampling.max_tokens {max_tokens} is more than limits.{name} {limits[name]}")
    for name in ("memory_bytes", "disk_bytes"):
        if _is_above(LITTLE_BYTES, sandbox.get(name)):
            finding.warnings.append(f"sandbox.{name} {sandbox[name]} is very little: the unit is bytes")


def _object(task: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = task.get(name)
    return value if isinstance(value, Mapping) else {}


def _is_above(value: object, bound: object) -> bool:
    return isinstance(value, int | float) and isinstance(bound, int | float) and value > bound


# --- runs ---------------------------------------------------------------------------------------------


async def _play_all(to_play: Sequence[tuple[Finding, StageResources, Task]], jobs: int, max_reward: float) -> None:
    free = asyncio.Semaphore(jobs)
    with progress("plays", 2 * len(to_play)) as advance:

        async def one(number: int, finding: Finding, resources: StageResources, task: Task) -> None:
            async with free:
                finding.oracle = await _played(resources, task, "oracle", number)
                advance()
                finding.noop = await _played(resources, task, "noop", number)
                advance()
            _judge(finding, max_reward)

        async with asyncio.TaskGroup() as group:
            for number, (finding, resources, task) in enumerate(to_play):
                group.create_task(one(number, finding, resources, task))


async def _played(resources: StageResources, task: Task, agent: str, number: int) -> PlayResult:
    from rollyard.core import AgentSpec, RollyardError
    from rollyard.pipeline.local_rollout import PlayResult, play

    try:
        # The options of the task's own agent do not apply.
        return await play(resources, replace(task, agent=AgentSpec(agent)), rollout_id=f"{agent}-{number}")
    except RollyardError as error:  # refused by the oracle's own check
        return PlayResult(None, error.failure("submit"), None)


def _judge(finding: Finding, max_reward: float) -> None:
    oracle, noop = finding.oracle, finding.noop
    assert oracle is not None and noop is not None
    has_oracle = not _is_without_solution(oracle)
    if not has_oracle:
        finding.warnings.append("no oracle: the task does not contain its solution")
    for name, played in (("oracle", oracle), ("no-op", noop)):
        failure = played.failure
        if failure is None or played.score is not None or (played is oracle and not has_oracle):
            continue
        problem = f"{name}: {failure.code} in {failure.stage}: {failure.detail}"
        if failure.blame == "infra" and failure.code != VERIFIER_CRASHED:
            finding.not_tried = finding.not_tried or problem
        elif problem not in finding.problems:
            finding.problems.append(problem)
    highest = max_reward
    if oracle.score is not None:
        highest = oracle.score.reward
        if highest < max_reward - TOLERANCE:
            why = f" ({oracle.failure.code}: {oracle.failure.detail})" if oracle.failure is not None else ""
            finding.problems.append(f"the oracle scores {highest:g}, not {max_reward:g}{why}")
    if noop.score is not None and noop.score.reward >= highest - TOLERANCE:
        than = "" if oracle.score is None else f", and the oracle {highest:g}"
        finding.problems.append(f"doing nothing scores {noop.score.reward:g}{than}")


def _is_without_solution(oracle: PlayResult) -> bool:
    """`Environment.solve` raises TaskInvalid in that case; other errors of the task were found before."""
    failure = oracle.failure
    return oracle.score is None and failure is not None and (failure.code, failure.stage) == ("task_invalid", "run")
