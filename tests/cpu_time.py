"""Measures the CPU time of each test, with all processes that it starts: `pytest --cpu-time`.

It reads the `cpuacct` control group of its worker, so this needs root and cgroup v1. What several tests share counts in
the test that starts it, and what a test leaves running in the next one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from operator import itemgetter
from pathlib import Path

import pytest

from rollyard.sandbox.limits.cgroup_files import own_folders

LISTED = 60


class CpuMeter:
    """A plugin of a process that runs tests."""

    def __init__(self) -> None:
        self._usage = Path(own_folders("/proc")["cpuacct"][0], "cpuacct.usage")
        self._before_s = self._used_s()

    def _used_s(self) -> float:
        return int(self._usage.read_text()) / 1e9

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        used_s = self._used_s()
        report.__dict__["cpu_s"] = round(used_s - self._before_s, 4)  # xdist transfers it with the report
        self._before_s = used_s
        return report


def list_files(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists the files that took the most CPU time, at the end of the run."""
    used_s: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            used_s[getattr(report, "nodeid", "").partition("::")[0]] += getattr(report, "cpu_s", 0.0)
    terminalreporter.section(f"CPU time: {sum(used_s.values()):.0f} s")
    for name, seconds in sorted(used_s.items(), key=itemgetter(1), reverse=True)[:LISTED]:
        terminalreporter.write_line(f"{seconds:8.1f} s  {name}")
