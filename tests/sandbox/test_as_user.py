"""Runs the suites as an ordinary user, and tests the runner for that."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from rollyard.testing.sandbox_conformance import alive, eventually, marked
from tests.sandbox.as_user import UID, run_as_user
from tests.sandbox.runtimes import ISOLATED

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user; this run is an ordinary user's"),
    pytest.mark.slow,
    pytest.mark.timeout(1260),
    pytest.mark.xdist_group("user"),
]


# Each way of making a root once: root's own run covers all other differences between the runtimes. Not oci, which needs
# subordinate uids or a daemon.
CONFORMING = ("bubblewrap", "apptainer-folder", "apptainer-sif")
ATTACKED = ("bubblewrap", "apptainer-folder")


def test_the_runtimes_conform_and_the_attacks_fail() -> None:
    chosen = [f"(test_the_runtime_conforms and {_only(name)})" for name in CONFORMING]
    chosen += [f"(test_the_attack_fails and {_only(name)})" for name in ATTACKED]
    files = ("tests/sandbox/test_conformance.py", "tests/sandbox/test_hostile.py")
    run_as_user(*files, "-k", " or ".join(chosen), timeout_s=1200)


def _only(name: str) -> str:
    """Returns an expression that selects `bubblewrap` without `bubblewrap-folder`."""
    longer = [other for other in ISOLATED if other != name and other.startswith(name)]
    return " and not ".join([name, *longer])


# --- the runner itself --------------------------------------------------------------------------------

_INNER = """
import os
from pathlib import Path

def test_who_am_i():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert os.getresuid() == ({uid},) * 3 and os.getgroups() == []
    assert not any(int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
    assert not os.access("/root", os.W_OK) and not os.access({here!r}, os.W_OK)
    Path(os.environ["TMPDIR"], "mine").touch()

def test_that_fails():
    assert {ok}, "what is wrong"

def test_that_leaves_a_process():
    assert os.spawnvp(os.P_NOWAIT, "sleep", ["sleep", {mark!r}])
"""


@pytest.fixture
def inner() -> Generator[Path, None, None]:
    """The path of an inner test file, in a folder that the user can read."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name, "test_inner.py")


def test_the_user_is_unprivileged_and_leaves_no_process(inner: Path) -> None:
    mark = marked()
    inner.write_text(_INNER.format(uid=UID, here=str(inner.parent), ok=True, mark=mark))
    run_as_user(str(inner), timeout_s=60)
    assert not alive(mark)


def test_inner_failures_are_reported(inner: Path) -> None:
    inner.write_text(_INNER.format(uid=UID, here=str(inner.parent), ok=False, mark="0"))
    with pytest.raises(AssertionError, match=r"(?s)test_that_fails.*what is wrong.*1 failed, 2 passed"):
        run_as_user(str(inner), timeout_s=60)


def test_an_empty_selection_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="ran no test"):
        run_as_user("tests/sandbox/test_hostile.py", "-k", "no_such_attack", timeout_s=60)


async def test_a_run_over_its_time_limit_is_ended_with_all_processes(inner: Path) -> None:
    mark = marked()
    inner.write_text(f"import os\ndef test_it():\n    os.execvp('sleep', ['sleep', {mark!r}])\n")
    with pytest.raises(AssertionError, match="took more than"):
        run_as_user(str(inner), timeout_s=5.0)
    await eventually(lambda: not alive(mark), "nothing is left of it")
