"""The `swe` environment: a repository in an image, an issue, and hidden tests.

The data is a row of SWE-bench, SWE-Gym or R2E-Gym, with Rollyard's options beside its fields (`data`). The agent works
in the repository; its changes are one artifact, a patch (`repository`). EVAL is `fresh`: it applies the patch to the
image's files, then the test patch, runs the tests, and swebench parses their output (`grading`). The reward is 1 if all
of FAIL_TO_PASS and PASS_TO_PASS pass (R2E-Gym: if all outcomes are the expected ones), else 0.

Invariants. The test patch, the gold patch and R2E-Gym's hidden tests are never in RUN's sandbox. Changes to test files,
or to files that decide how tests run, do not reach EVAL. A patch that is empty, is missing, or does not apply scores 0.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar

from rollyard.core import Artifact, DataField, Json, Message, Score, Task
from rollyard.core.failure import SetupFailed, TaskInvalid
from rollyard.envs.base import COLLECT_S, ArtifactRule, EnvContext, Environment, Evidence, Plan, Solution, Start
from rollyard.envs.swe import repository
from rollyard.envs.swe.data import FIELDS, R2E_ANSWERS, R2E_TESTS, SweData
from rollyard.envs.swe.grading import Grader, tested
from rollyard.envs.swe.rows import task_of
from rollyard.tools.base import Tool

SOLUTION = "patch"
SHOWN_BYTES = 256 << 10
"""A longer patch is not among the findings, which would cut it anyway."""
"""The name of the only artifact."""

TEST_GRACE_S = 60.0
"""Added to the EVAL deadline for the tests' own timeout, so that the deadline ends tests that hang."""


class SweEnvironment(Environment):
    """Scores a patch to a repository by its hidden tests."""

    name: ClassVar[str] = "swe"
    tools: ClassVar[tuple[str, ...]] = ("shell", "editor", "finish")
    data_fields: ClassVar[tuple[DataField, ...]] = FIELDS

    def __init__(self) -> None:
        self._grader = Grader()

    def check(self, task: Task) -> None:
        SweData.read(task)
        if task.sandbox.image is None:
            raise TaskInvalid("swe: sandbox.image: the image that holds the repository was expected")
        if importlib.util.find_spec("swebench") is None:
            raise TaskInvalid("swe: swebench grades these tasks and is not installed: pip install 'rollyard[swe]'")

    def plan(self, task: Task) -> Plan:
        data = SweData.read(task)
        return Plan(
            workdir=data.workdir,
            env={**repository.SAFE, **data.env},
            artifacts=(ArtifactRule(SOLUTION, repository.PATCH, repository.PATCH_BYTES),),
        )

    def layer_key(self, task: Task) -> str | None:
        """All tasks of one image and repository folder share a set-up."""
        data = SweData.read(task)
        hidden = [*R2E_TESTS, *R2E_ANSWERS] if data.is_r2e else []
        return self.key_of(inspect.getsource(repository), data.workdir, hidden, dict(self.plan(task).env))

    async def prepare(self, context: EnvContext) -> None:
        data, sandbox, limit_s = SweData.read(context.task), context.box, context.task.limits.init_s
        if data.is_r2e:
            paths = " ".join([*R2E_TESTS, *R2E_ANSWERS])
            result = await context.run(f"rm -rf {paths} /{R2E_TESTS[0]}", timeout_s=limit_s)
            if result.status != 0:
                raise SetupFailed(f"the hidden tests could not be removed: {result.stderr[-500:]!r}")
        await repository.base(sandbox, data.workdir, timeout_s=limit_s)
        await repository.remove_later_history(sandbox, data.workdir, timeout_s=limit_s)

    async def init(self, context: EnvContext) -> Start:
        data = SweData.read(context.task)
        messages: list[Message] = []
        if data.system_prompt is not None:
            messages.append({"role": "system", "content": data.system_prompt})
        messages.append({"role": "user", "content": data.first_message()})
        return Start(tuple(messages))

    async def collect(self, context: EnvContext) -> None:
        data = SweData.read(context.task)
        await repository.diff(context.box, data.workdir, timeout_s=COLLECT_S)

    async def solve(self, context: EnvContext, tools: Mapping[str, Tool]) -> Solution:
        data, limits = SweData.read(context.task), context.task.limits
        if not data.patch.strip():
            raise TaskInvalid("swe: data.patch: this row has no solution, so there is no oracle for it")
        gold = data.patch.encode("utf-8", "surrogateescape")
        refused = await repository.apply(context.box, data.workdir, gold, timeout_s=limits.run_s)
        if refused is not None:
            raise TaskInvalid(f"swe: data.patch does not apply to the image: {refused}")
        return Solution(answer="The patch is applied.")

    def from_row(self, row: Mapping[str, Json], options: Mapping[str, str]) -> Mapping[str, Json]:
        return task_of(row, options)

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        data, sandbox = SweData.read(context.task), context.box
        eval_s = context.task.limits.eval_s
        limit_s = eval_s + TEST_GRACE_S
        zero = {"expected": 0.0} if data.is_r2e else {"fail_to_pass": 0.0, "pass_to_pass": 0.0}
        patch = evidence.artifacts.get(SOLUTION)
        if patch is None or patch.kind != "file":
            return Score(0.0, zero, {"patch_kept": 0.0})
        metrics = {"patch_kept": 1.0, "patch_bytes": float(patch.bytes), "patch_applied": 0.0}
        await _show_patch(context, patch)
        if not patch.bytes or not await self._is_applied(context, data, metrics, limit_s):
            return Score(0.0, zero, metrics)
        ran = await tested(sandbox, data, timeout_s=limit_s, findings=context.findings)
        metrics["tests_ended"] = float(ran is not None)
        if ran is None:
            return Score(0.0, zero, metrics)
        output, status = ran
        # Wait for half of EVAL's time at most; else other rollouts' logs could use up this one's time.
        verdict = await self._grader.verdict(data, output, status, wait_s=eval_s / 2, owner=context.owner)
        metrics["tests"] = float(verdict.tests)
        context.findings.add("tests", "tests", output, passed=verdict.is_resolved)
        return Score(float(verdict.is_resolved), verdict.shares, metrics)

    async def _is_applied(self, context: EnvContext, data: SweData, metrics: dict[str, float], limit_s: float) -> bool:
        """Applies the solution to the image's files, then the test patch. Adds the results to `metrics`."""
        sandbox, workdir = context.box, data.workdir
        tests = b"" if data.has_own_script else data.test_patch.encode("utf-8", "surrogateescape")
        await repository.make(sandbox, workdir, timeout_s=limit_s)
        if tests:
            refused = await repository.apply(sandbox, workdir, tests, is_only_tried=True, timeout_s=limit_s)
            if refused is not None:
                raise TaskInvalid(f"swe: data.test_patch does not apply to the image: {refused}")
        without = data.excluded_patterns
        changed = await repository.files(sandbox, workdir, timeout_s=limit_s)
        counted = await repository.files(sandbox, workdir, without=without, timeout_s=limit_s)
        metrics |= {"patch_files": float(counted), "patch_files_left_out": float(changed - counted)}
        if not counted:
            return False
        refused: str | None = "it renames or copies files"
        if not await repository.has_renames(sandbox, workdir, without=without, timeout_s=limit_s):
            refused = await repository.apply(sandbox, workdir, repository.PATCH, without=without, timeout_s=limit_s)
        metrics["patch_applied"] = float(refused is None)
        if refused is not None:
            context.findings.add("check", "git apply", refused, passed=False)
            return False
        # It applied before. If it does not now, the solution's changes to folders of the tests conflict with it.
        return not tests or await repository.apply(sandbox, workdir, tests, timeout_s=limit_s) is None

    async def close(self) -> None:
        await self._grader.close()


async def _show_patch(context: EnvContext, patch: Artifact) -> None:
    text: bytes | str = f"(it has {patch.bytes} bytes: see the artifact {patch.name})"
    if patch.bytes <= SHOWN_BYTES:
        with suppress(OSError, ValueError):
            text = await context.box.read(patch.path, limit_bytes=SHOWN_BYTES)
    context.findings.add("patch", patch.name, text)
