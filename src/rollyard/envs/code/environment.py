"""The `code` environment: a question that is answered with a program, scored by hidden tests.

The solution is the file that the agent writes (`/workspace/solution.py`), else the last code block of its answer, so
that a model without tools can solve the task as well. It runs in a sandbox that contains nothing else from RUN; the
tests are never in RUN's sandbox. `data` defines a task's data, `grading` the scoring, `rows` the importer.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from typing import ClassVar

from rollyard.core import DataField, Json, Message, Score, Task
from rollyard.core.failure import SetupFailed, TaskInvalid
from rollyard.envs.base import ArtifactRule, EnvContext, Environment, Evidence, Plan, Solution, Start
from rollyard.envs.code.answer import last_block
from rollyard.envs.code.data import FIELDS, CodeData
from rollyard.envs.code.grading import graded
from rollyard.envs.code.prompt import prompt
from rollyard.envs.code.rows import body_of
from rollyard.sandbox.base import Sandbox
from rollyard.tools.base import Tool

SOLUTION = "solution"
"""The name of the only artifact."""

SOLUTION_BYTES = 1 << 20
PROBE_S = 60.0

_MISSING_MODULES = """
import sys, ctypes, resource, json, importlib.util
if sys.version_info < (3, 7): sys.exit(1)
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])
"""


class CodeEnvironment(Environment):
    """Runs the solution on the task's hidden tests."""

    name: ClassVar[str] = "code"
    tools: ClassVar[tuple[str, ...]] = ("shell", "finish")
    data_fields: ClassVar[tuple[DataField, ...]] = FIELDS

    def check(self, task: Task) -> None:
        CodeData.read(task)

    def plan(self, task: Task) -> Plan:
        return Plan(artifacts=(ArtifactRule(SOLUTION, CodeData.read(task).path, SOLUTION_BYTES),))

    async def init(self, context: EnvContext) -> Start:
        data = CodeData.read(context.task)
        await _probe(context.box, data)
        user: Message = {"role": "user", "content": prompt(data)}
        if data.system_prompt is None:
            return Start((user,))
        return Start(({"role": "system", "content": data.system_prompt}, user))

    async def solve(self, context: EnvContext, tools: Mapping[str, Tool]) -> Solution:
        data = CodeData.read(context.task)
        if data.solution is None:
            raise TaskInvalid("code: data.solution: this task has no solution, so there is no oracle for it")
        await context.box.write(data.path, data.solution.encode("utf-8", "surrogateescape"))
        return Solution()

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        data = CodeData.read(context.task)
        sandbox = context.box
        total = len(data.tests) + len(data.asserts)
        artifact = evidence.artifacts.get(SOLUTION)
        block = last_block(evidence.answer, data.language.tags) if artifact is None else None
        if block is not None:
            await sandbox.write(data.path, block.encode("utf-8", "replace"))
        has_solution = block is not None or (artifact is not None and artifact.kind == "file")
        verdict_counts = await graded(sandbox, data, context.findings) if has_solution else {}
        counts = {name: float(verdict_counts.get(name, 0)) for name in ("passed", "failed", "timed_out")}
        share = counts["passed"] / total
        reward = share if data.reward == "share" else float(share == 1.0)
        skipped = total - sum(counts.values())
        metrics = {"tests": total, **counts, "skipped": skipped, "has_solution": float(has_solution)}
        return Score(reward, components={"passed": share}, metrics=metrics)

    def from_row(self, row: Mapping[str, Json], options: Mapping[str, str]) -> Mapping[str, Json]:
        return body_of(row, options)


async def _probe(sandbox: Sandbox, data: CodeData) -> None:
    """Raises SetupFailed if the image cannot run solutions: every solution would fail and look wrong."""
    for program in data.language.needs:
        result = await sandbox.exec(f"command -v {program}", timeout_s=PROBE_S)
        if result.status != 0:
            raise SetupFailed(
                f"code: the image has no {program}, which {data.language_name} solutions need: choose another image",
                program=program,
            )
    if data.is_called:
        result = await sandbox.exec(["python3", "-I", "-c", _MISSING_MODULES, *_imported(data)], timeout_s=PROBE_S)
        if result.status != 0:
            raise SetupFailed("code: the image's python3 cannot run the tests: it must be 3.7 or newer, with ctypes")
        if missing := result.stdout.decode("utf-8", "replace").split():
            raise SetupFailed(
                f"code: the image's python3 has no {', '.join(missing)}, which this task's tests import: choose "
                "another image (tests need not import what the solution defines)",
                modules=", ".join(missing),
            )


def _imported(data: CodeData) -> list[str]:
    """The modules that the asserts and the prelude import. Raises TaskInvalid if one of them is not Python."""
    modules: set[str] = set()
    texts = {"prelude": data.prelude, **{f"asserts[{index}]": code for index, code in enumerate(data.asserts)}}
    for where, text in texts.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings about the dataset's code
                body = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise TaskInvalid(f"code: data.{where}: this is not Python: {error}", field=where) from error
        for node in body:
            if isinstance(node, ast.Import):
                modules.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.split(".")[0])
    return sorted(modules)
