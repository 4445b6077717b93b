"""Runs a solution on a task's tests, in EVAL's sandbox, and counts the verdicts.

A program runs once for each test, in its own command, and only the test's input enters the sandbox. The same holds for
called functions (`_worker`). The outputs are compared here. Asserts contain the expected values, so inside the sandbox
they are separated from the solution (`_tester`).

If the program exits early or with an error status, prints too much, runs too long, uses too much memory, or ends the
sandbox, only that test fails. After `MOST_LATE` tests that ran too long the rest are skipped: a program that never ends
would otherwise take EVAL's time for every test.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
from collections import Counter
from pathlib import Path
from shlex import quote
from typing import Literal, cast

from rollyard.core import Json
from rollyard.core.failure import EvalDeadline, PolicyFailure, VerifierCrashed
from rollyard.core.json import to_builtins
from rollyard.envs.code import _worker
from rollyard.envs.code.compare import is_same_output, is_same_result
from rollyard.envs.code.data import Case, CodeData
from rollyard.envs.findings import Findings
from rollyard.sandbox.base import WORKDIR, ExecResult, Sandbox

Verdict = Literal["passed", "failed", "timed_out", "skipped"]

MOST_LATE = 3
PROCESSES = 256
"""The process limit of all tests together. The sandbox's own limit is higher, so the next test can always start."""
OUTPUT_BYTES, OUTPUT_FACTOR = 1 << 20, 8
"""The limit of an output is the expected size times the factor (`0.5` with a dozen digits, the worker's form of a
tuple), plus the bytes. A longer output is wrong and is not kept in memory."""
COMPILE_S = 120.0
START_S = 30.0
"""The time the tester itself may take to start on a loaded machine."""

ENV = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"}
"""A BLAS reserves address space for each thread, and a test's address space is limited."""

_HERE = Path(__file__).parent
_TOO_LONG = (-signal.SIGXCPU, 128 + signal.SIGXCPU)


async def graded(sandbox: Sandbox, data: CodeData, findings: Findings | None = None) -> Counter[Verdict]:
    """Returns the number of tests for each verdict. The solution is already in the sandbox. `findings` gets what it
    printed."""
    findings = findings or Findings()
    counts: Counter[Verdict] = Counter()
    try:
        if data.asserts:
            await _run_asserts(sandbox, data, counts, findings)
        elif data.language.compile is None or await _is_compiled(sandbox, data.language.compile, findings):
            await _run_tests(sandbox, data, counts, findings)
    except EvalDeadline:
        raise
    except PolicyFailure:  # the solution ended the sandbox by its use of memory, disk or processes
        counts["failed"] += 1
    return counts


async def _is_compiled(sandbox: Sandbox, command: str, findings: Findings) -> bool:
    result = await sandbox.exec(command, timeout_s=COMPILE_S, cwd=WORKDIR)
    is_compiled = result.status == 0 and not result.is_timed_out
    findings.ran("check", "compile", result, passed=is_compiled)
    return is_compiled


async def _run_tests(sandbox: Sandbox, data: CodeData, counts: Counter[Verdict], findings: Findings) -> None:
    for index, test in enumerate(data.tests):
        if counts["timed_out"] >= MOST_LATE:
            return
        verdict, result = await (_called if data.is_called else _ran)(sandbox, data, test)
        counts[verdict] += 1
        if verdict == "passed":
            findings.add("tests", f"test {index}", "", passed=True)
        else:
            findings.ran("tests", f"test {index}", result, passed=False)


# --- programs -----------------------------------------------------------------------------------------


async def _ran(sandbox: Sandbox, data: CodeData, test: Case) -> tuple[Verdict, ExecResult]:
    cpu_s = max(1, -int(-data.time_s // 1))
    memory = f"ulimit -v {data.memory_bytes >> 10}; " if data.memory_bytes is not None else ""
    stack = "ulimit -S -s $(ulimit -H -s); "  # as in programming contests: a search may recurse a million levels deep
    limits = f"exec 2>/dev/null; {stack}ulimit -S -t {cpu_s}; ulimit -H -t {cpu_s + 1}; {memory}"
    if (most := _processes(sandbox)) is not None:
        limits += f"ulimit -u {most} || ulimit -p {most}; "  # bash has -u, dash has -p
    command = f"{limits}sh -c {quote(data.language.command)}"
    longest = max(len(str(output).encode()) for output in test.accepted)
    result = await sandbox.exec(
        command,
        timeout_s=data.wall_s,
        cwd=WORKDIR,
        env=ENV,
        stdin=str(test.input).encode("utf-8", "surrogateescape"),
        output_bytes=OUTPUT_FACTOR * longest + OUTPUT_BYTES,
    )
    if (missed := _missed(result)) is not None:
        return missed, result
    stdout = result.stdout.decode("utf-8", "replace")
    is_same = await asyncio.to_thread(
        lambda: any(is_same_output(stdout, str(output), data.tolerance) for output in test.accepted)
    )
    return "passed" if is_same else "failed", result


def _missed(result: ExecResult) -> Verdict | None:
    if result.is_timed_out or result.status in _TOO_LONG:
        return "timed_out"
    return "failed" if result.status != 0 or result.dropped_bytes else None


# --- functions ----------------------------------------------------------------------------------------


async def _called(sandbox: Sandbox, data: CodeData, test: Case) -> tuple[Verdict, ExecResult]:
    call = {"op": "call", "on": None, "name": data.entry_point, "args": _encoded(test.input), "kwargs": {"dict": []}}
    longest = max(len(json.dumps(to_builtins(output))) for output in test.accepted)
    result = await sandbox.exec(
        ["python3", "-c", _source("_worker.py")],
        timeout_s=data.wall_s,
        cwd=WORKDIR,
        env=ENV,
        stdin=b"".join(json.dumps(line).encode() + b"\n" for line in (_settings(sandbox, data), call)),
        output_bytes=OUTPUT_FACTOR * longest + OUTPUT_BYTES,
    )
    if (missed := _missed(result)) is not None:
        return missed, result
    is_same = await asyncio.to_thread(_is_accepted, result.stdout, test, data.tolerance)
    return "passed" if is_same else "failed", result


def _is_accepted(answer: bytes, test: Case, tolerance: float) -> bool:
    """The solution shares the worker's process, so the answer may contain anything."""
    try:
        reply = json.loads(answer)
        value = _worker.decode(reply["value"], lambda _: object())
        return any(is_same_result(value, output, tolerance) for output in test.accepted)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError):
        return False


def _encoded(value: Json) -> Json:
    """JSON values in the worker's encoding."""
    return cast("Json", _worker.encode(to_builtins(value), None))


# --- asserts ------------------------------------------------------------------------------------------


async def _run_asserts(sandbox: Sandbox, data: CodeData, counts: Counter[Verdict], findings: Findings) -> None:
    nonce = secrets.token_hex(16)
    job = {
        "nonce": nonce,
        "worker": _source("_worker.py"),
        "settings": _settings(sandbox, data),
        "entry_point": data.entry_point,
        "asserts": data.asserts,
        "wall_s": data.wall_s,
        "most_late": MOST_LATE,
    }
    result = await sandbox.exec(
        ["python3", "-I", "-c", _source("_tester.py")],
        timeout_s=START_S + len(data.asserts) * data.wall_s,
        cwd=WORKDIR,
        env=ENV,
        stdin=json.dumps(job).encode(),
    )
    records = [line.split() for line in result.stdout.decode("utf-8", "replace").splitlines()]
    verdicts = {words[1]: words[2] for words in records if len(words) == 3 and words[0] == nonce}
    if "tester" not in verdicts:  # it failed before the solution was loaded; any later failure is the solution's
        stderr = result.stderr[-500:].decode("utf-8", "replace").strip()
        raise VerifierCrashed(f"code: the tester did not start (status {result.status}): {stderr}")
    for index in range(len(data.asserts)):
        verdict = cast("Verdict", verdicts.get(str(index), "failed"))
        counts[verdict] += 1
        findings.add("tests", f"assert {index}", verdict, passed=verdict == "passed")


def _settings(sandbox: Sandbox, data: CodeData) -> dict[str, Json]:
    return {
        "file": data.language.file,
        "prelude": data.prelude,
        "time_s": data.time_s,
        "memory_bytes": data.memory_bytes,
        "processes": _processes(sandbox),
    }


def _processes(sandbox: Sandbox) -> int | None:
    """None if processes are not counted per sandbox: the limit would count all processes of the user."""
    return PROCESSES if sandbox.limits_in_force.get("processes", "none") != "none" else None


def _source(name: str) -> str:
    return (_HERE / name).read_text()
