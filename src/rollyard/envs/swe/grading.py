"""Runs the tests of a task in EVAL's sandbox and parses their output with swebench.

The launcher reports the status of the tests' process. Their output is cut at two marks, which are random each time and
must each occur exactly once. So a patch that prints marks, or swebench's own marks, gains nothing. As in every harness,
the code under test runs in the same process as its tests: code that is written to deceive its test runner can do so.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from rollyard.core import Json
from rollyard.core.failure import EvalDeadline, TaskInvalid
from rollyard.envs.children import Children
from rollyard.envs.findings import Findings
from rollyard.envs.swe.data import END, START, SweData
from rollyard.envs.swe.repository import FOLDER
from rollyard.sandbox.base import Sandbox

OUTPUT_BYTES = 8 << 20
"""The limit of the tests' output. It exceeds every known suite; beyond it, the end is missing, and so the verdict."""

ANSWER_S = 120.0
"""The time swebench has to parse 8 MiB: its parsers are regular expressions over lines, some of them slow."""

_SCRIPT = f"{FOLDER}/tests.sh"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`shares` are the passed shares of named sets of tests, from 0 to 1."""

    is_resolved: bool
    shares: dict[str, float]
    tests: int  # the number of outcomes found in the output


class Grader:
    """Runs swebench in child processes: it has many imports, and it parses what a model's code printed."""

    def __init__(self) -> None:
        self.children = Children("swebench", "rollyard.envs.swe._swebench_child")

    async def verdict(self, data: SweData, output: str, status: int, *, wait_s: float, owner: str = "") -> Verdict:
        question: dict[str, Json] = {
            "log": output,
            "status": status,
            "instance_id": data.instance_id,
            "repo": data.repo,
            "version": data.version,
            "log_parser": data.log_parser,
            "eval_type": data.eval_type,
            "fail_to_pass": list(data.fail_to_pass),
            "pass_to_pass": list(data.pass_to_pass),
            "expected": dict(data.expected) if data.expected is not None else None,
        }
        reply = await self.children.ask(question, answer_s=ANSWER_S, wait_s=wait_s, owner=owner)
        unknown = reply.get("unknown_parser")
        if unknown:
            raise TaskInvalid(f"swe: data.log_parser: swebench has no parser {unknown!r}", field="data.log_parser")
        shares = reply["shares"]
        assert isinstance(shares, dict)
        numbers = {name: float(str(share)) for name, share in shares.items()}
        return Verdict(reply["resolved"] is True, numbers, int(str(reply["tests"])))

    async def close(self) -> None:
        await self.children.close()


async def tested(
    sandbox: Sandbox, data: SweData, *, timeout_s: float, findings: Findings | None = None
) -> tuple[str, int] | None:
    """Returns what the tests printed, and their status. None if they did not run to completion: `findings` has their
    output then."""
    nonce = secrets.token_hex(16)
    await sandbox.write(_SCRIPT, script(data, nonce).encode())
    result = await sandbox.exec(["bash", _SCRIPT], timeout_s=timeout_s, cwd=data.workdir, output_bytes=OUTPUT_BYTES)
    output = None if result.is_timed_out else cut(result.stdout.decode("utf-8", "replace"), nonce)
    if output is None and findings is not None:
        findings.ran("tests", "tests", result, passed=False)
    if result.is_timed_out:
        raise EvalDeadline(f"the tests did not end within {timeout_s:g} s")
    return None if output is None else (output, result.status)


def script(data: SweData, nonce: str) -> str:
    """The row's own script up to the end of its tests, or the test command, with marks around the tests."""
    before: list[str] = []
    tests = [data.tests_to_run()]
    if data.has_own_script:
        lines = data.eval_script.splitlines()
        start, end = (next(at for at, line in enumerate(lines) if mark in line) for mark in (START, END))
        before, tests = lines[:start], lines[start + 1 : end]
    # in two parts, so that a trace of the shell's commands (`set -x`) does not contain the mark
    mark = f"printf '\\n%s-%s\\n' {nonce}"
    return "\n".join(
        [
            "exec 2>&1",
            *before,
            f"{mark} begins",
            *tests,
            "rollyard_status=${SWEBENCH_TEST_EXIT_CODE:-$?}",  # some scripts store it there in their last line
            f"{mark} ends",
            "exit $rollyard_status",
            "",
        ]
    )


def cut(output: str, nonce: str) -> str | None:
    """The output between the marks. None unless each occurs exactly once and nothing follows the second."""
    _, *rest = output.split(f"\n{nonce}-begins\n")
    if len(rest) != 1:
        return None
    body, *rest = rest[0].split(f"\n{nonce}-ends\n")
    # the shell may trace its own exit
    return body if len(rest) == 1 and "\n" not in rest[0].strip() else None
