"""Breaks the code on purpose and checks that the small form of each soak test fails: `python -m tests.soak.broken`.

Each defect is one replacement in a copy of the package. The named test runs against an unchanged copy, where it must
pass, and against the broken one, where it must fail. The exit status is 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import rollyard
from rollyard.cli._console import note, show, table

LIMIT_S = 150.0
"""A defect may cause a rollout that never ends; then the test does not end either."""

GRACE_S = 30.0
FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Defect:
    """One change in one file of the package, and the test that must fail because of it."""

    name: str
    what: str
    file: str
    old: str
    new: str
    test: str


DEFECTS = (
    Defect(
        "kill",
        "a restart ends interrupted rollouts instead of running them again",
        "store/sql/recovery.py",
        "elif not is_evaluable and attempt - excused < max_attempts:",
        "elif False:",
        "tests/acceptance/test_kill.py::test_nothing_is_lost_or_invented_when_the_service_is_killed",
    ),
    Defect(
        "draw",
        "the progress of a draw is not written together with its groups",
        "store/sql/groups.py",
        "    if draw is not None:\n        put",
        "    if draw is not None and not groups:\n        put",
        "tests/acceptance/test_draw_kill.py::test_batches_survive_kills_of_service_and_trainer[deliver]",
    ),
    Defect(
        "groups",
        "a restart loses the groups of a draw that were in flight",
        "sampling/draw_runner.py",
        "in_flight = [active_groups.adopt(group) for group in groups]",
        "in_flight = []",
        "tests/acceptance/test_draw_kill.py::test_batches_survive_kills_of_service_and_trainer[deliver]",
    ),
    Defect(
        "fleet",
        "rollouts of a node that died end instead of going to another node",
        "fleet/leases.py",
        "await self.settle(leased, leased.cancelled or NodeLost(",
        "await self.settle(leased, leased.cancelled or Cancelled(",
        "tests/fleet/test_chaos.py::test_rollouts_outlive_nodes_and_heads",
    ),
    Defect(
        "survive",
        "the next service does not remove the sandboxes of a killed one",
        "sandbox/runtimes/launched.py",
        'if await self._end_recorded(folder / "record.json"):',
        'if await self._end_recorded(folder / "record.json") and not paths:',
        "tests/acceptance/test_sandbox_endurance.py::test_a_killed_service_leaves_no_survivor[bubblewrap]",
    ),
    Defect(
        "endurance",
        "a sandbox that ended leaves its control groups behind",
        "sandbox/runtimes/launched.py",
        "await self._remove([str(place.folder), str(place.control)], place.groups)",
        "await self._remove([str(place.folder), str(place.control)])",
        "tests/acceptance/test_sandbox_endurance.py::test_sandboxes_that_ended_leave_nothing[bubblewrap]",
    ),
    Defect(
        "steady",
        "a sandbox that ended leaves a descriptor of the service open",
        "sandbox/launcher/init_client.py",
        "self._loop.remove_reader(self._pidfd)\n            os.close(self._pidfd)",
        "self._loop.remove_reader(self._pidfd)",
        "tests/soak/test_steady.py::test_the_resource_use_of_a_service_levels_off",
    ),
    Defect(
        "fuzz",
        "a body that is not JSON is not refused and crashes the call",
        "service/json_body.py",
        "except (msgspec.DecodeError, UnicodeDecodeError, RecursionError)",
        "except (UnicodeDecodeError, RecursionError)",
        "tests/service/test_fuzz.py::test_no_request_breaks_the_service",
    ),
)


def verdict(defect: Defect) -> str:
    """Returns "fails" if the test passes without the defect and fails with it; else what happened instead."""
    with tempfile.TemporaryDirectory(prefix="rollyard-broken-") as name:
        package = Path(name, "rollyard")
        shutil.copytree(Path(rollyard.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        file = package / defect.file
        text = file.read_text()
        if text.count(defect.old) != 1:
            raise SystemExit(f"{defect.name}: {defect.file} contains {text.count(defect.old)} times: {defect.old}")
        if _status(defect.test, Path(name)) != 0:
            return "FAILS WITHOUT THE DEFECT"
        file.write_text(text.replace(defect.old, defect.new))
        status = _status(defect.test, Path(name))
        return {0: "STILL PASSES", 1: FAILS}.get(status, f"DID NOT RUN: pytest's status is {status}")


def _status(test: str, folder: Path) -> int:
    """Runs a test. Returns pytest's status: 0 if it passed, 1 if it failed or did not end within LIMIT_S."""
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", test]
    process = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(folder)}, stdout=sys.stderr)
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # its fixtures end the processes that it started
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return 1


def main(names: Sequence[str]) -> int:
    chosen = [defect for defect in DEFECTS if not names or defect.name in names]
    results_table, results = table("defect", "what is broken", "test", "result"), set[str]()
    for defect in chosen:
        note(f"{defect.name}: {defect.what}")
        result = verdict(defect)
        results.add(result)
        results_table.add_row(defect.name, defect.what, defect.test.rpartition("::")[2], result)
    show(results_table)
    return int(results != {FAILS})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.soak.broken", description=__doc__)
    known = [defect.name for defect in DEFECTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these defects: {', '.join(known)}")
    names = parser.parse_args().names
    if unknown := set(names) - set(known):
        parser.error(f"there is no defect {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    sys.exit(main(names))
