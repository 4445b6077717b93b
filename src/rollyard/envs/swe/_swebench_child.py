"""The child process that runs swebench: its log parsers, its report and its definition of "resolved".

In:  {"log": "…", "status": 1, "log_parser": "…", "fail_to_pass": […], "pass_to_pass": […], "expected": null, …}
Out: {"resolved": true, "shares": {"fail_to_pass": 1.0, "pass_to_pass": 1.0}, "tests": 12}
"""

from __future__ import annotations

import tempfile
from typing import Any

from swebench.harness import grading
from swebench.harness.constants import (
    END_TEST_OUTPUT,
    FAIL_ONLY_REPOS,
    START_TEST_OUTPUT,
    TEST_EXIT_CODE,
    EvalType,
    ResolvedStatus,
)
from swebench.harness.log_parsers import PARSER_REGISTRY
from swebench.types import TestSpec
from swebench.utils import ansi_escape

from rollyard.envs.children import answer_lines

SUMMARY = "short test summary info"
R2E_OUTCOMES = ("PASSED", "FAILED", "ERROR")


def answer(question: Any) -> Any:
    if question["log_parser"] not in PARSER_REGISTRY:
        return {"unknown_parser": question["log_parser"]}
    kind = question["eval_type"]
    if not kind:
        kind = (EvalType.FAIL_ONLY if question["repo"] in FAIL_ONLY_REPOS else EvalType.PASS_AND_FAIL).value
    spec = TestSpec(
        instance_id=question["instance_id"],
        image="",
        eval_script_list=[],
        repo=question["repo"],
        version=question["version"],
        FAIL_TO_PASS=question["fail_to_pass"],
        PASS_TO_PASS=question["pass_to_pass"],
        log_parser=question["log_parser"],
        eval_type=kind,
    )
    try:
        return _graded(question, spec, kind)
    except OSError:  # the log could not be written or read: not the patch's fault
        raise
    except Exception:  # of the parser, at a line that the tests printed: as an error it would spare a patch its 0
        names = ("fail_to_pass", "pass_to_pass") if question["expected"] is None else ("expected",)
        return {"resolved": False, "shares": dict.fromkeys(names, 0.0), "tests": 0}


def _graded(question: Any, spec: TestSpec, kind: str) -> Any:
    if question["expected"] is not None:
        return _as_expected(question["log"], question["expected"], spec)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="") as file:
        file.write(_as_swebench_logs(question["log"], question["status"]))
        file.flush()
        outcomes, is_found = grading.get_logs_eval(spec, file.name)
    if not is_found:
        return {"resolved": False, "shares": {"fail_to_pass": 0.0, "pass_to_pass": 0.0}, "tests": 0}
    gold: Any = {"FAIL_TO_PASS": spec.FAIL_TO_PASS, "PASS_TO_PASS": spec.PASS_TO_PASS}
    report = grading.get_eval_tests_report(outcomes, gold, eval_type=EvalType(kind))
    return {
        "resolved": grading.get_resolution_status(report) == ResolvedStatus.FULL.value,
        "shares": {
            "fail_to_pass": grading.compute_fail_to_pass(report),
            "pass_to_pass": grading.compute_pass_to_pass(report),
        },
        "tests": len(outcomes),
    }


def _as_swebench_logs(log: str, status: int) -> str:
    """The tests' output in the format of swebench's own scripts. Marks that the tests printed are removed."""
    log = log.replace(">>>>>", ">>>>")
    return f"{START_TEST_OUTPUT}\n{log}\n{END_TEST_OUTPUT}\n{TEST_EXIT_CODE}: {status}\n"


def _as_expected(log: str, expected: dict[str, str], spec: TestSpec) -> Any:
    """R2E-Gym's rule: exactly the same tests with the same outcomes. Its test names do not include the file, and it has
    three outcomes: a test that is skipped or expected to fail does not count."""
    _, _, summary = ansi_escape(log).partition(SUMMARY)
    outcomes = PARSER_REGISTRY[spec.log_parser](summary, spec)
    actual_outcomes = {
        _name(test.partition("::")[2]): outcome
        for test, outcome in outcomes.items()
        if "::" in test and outcome in R2E_OUTCOMES
    }
    expected_outcomes = {_name(test): outcome for test, outcome in expected.items() if test}
    matched = sum(actual_outcomes.get(test) == outcome for test, outcome in expected_outcomes.items())
    return {
        "resolved": actual_outcomes == expected_outcomes,
        "shares": {"expected": matched / len(expected_outcomes) if expected_outcomes else 0.0},
        "tests": len(actual_outcomes),
    }


def _name(test: str) -> str:
    """Collapses spaces, as the parser does but the rows do not."""
    return " ".join(ansi_escape(test).split(" - ")[0].replace("::", ".").split())


if __name__ == "__main__":
    answer_lines(answer)
