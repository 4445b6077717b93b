"""What EVAL printed, kept within its bounds whatever it is."""

import json
from typing import Any

import pytest

from rollyard.envs.findings import MOST_BYTES, Findings
from rollyard.sandbox.base import ExecResult


def shown(findings: Findings) -> list[dict[str, Any]]:
    data = findings.encoded()
    assert len(data) <= MOST_BYTES
    return json.loads(data)


def test_a_finding_has_its_text_and_whether_it_passed() -> None:
    findings = Findings()
    assert findings.encoded() == b""
    findings.add("judge", "judge", "yes", passed=True)
    findings.ran("check", "tidy", ExecResult(-9, b"out\n", b"err\n", 0.1))
    findings.ran("check", "slow", ExecResult(0, b"", b"", 0.1, is_timed_out=True), passed=False)
    assert shown(findings) == [
        {"kind": "judge", "name": "judge", "text": "yes", "passed": True},
        {"kind": "check", "name": "tidy", "text": "out\nerr\n(exit status -9)", "passed": None},
        {"kind": "check", "name": "slow", "text": "(it did not end in time)", "passed": False},
    ]


@pytest.mark.parametrize(
    "text", ["x" * 9_000_000, "\0" * 9_000_000, b"\xff" * 9_000_000, "\ud800" * 100_000, "é" * 50_000]
)
def test_a_long_or_broken_text_keeps_its_beginning_and_its_end(text: str | bytes) -> None:
    findings = Findings()
    ends: Any = (b"begin ", b" end") if isinstance(text, bytes) else ("begin ", " end")
    findings.add("tests", "tests", ends[0] + text + ends[1])
    (finding,) = shown(findings)
    assert finding["text"].startswith("begin ") and finding["text"].endswith(" end")


def test_the_first_and_the_last_of_many_are_kept() -> None:
    findings = Findings()
    for number in range(10_000):
        findings.add("tests", f"test {number} " + "n" * 1000, "t" * 100, passed=False)
    kept = shown(findings)
    assert kept[0]["name"].startswith("test 0 ") and kept[-1]["name"].startswith("test 9999 ")
    (left_out,) = [one for one in kept if not one["name"]]
    assert left_out["text"] == f"({10_000 - len(kept) + 1} more were left out)"


def test_a_patch_and_a_log_both_fit() -> None:
    findings = Findings()
    findings.add("patch", "patch", "p" * 1_000_000)
    findings.add("tests", "tests", "t" * 1_000_000)
    assert [one["kind"] for one in shown(findings)] == ["patch", "tests"]
