"""The suites once more, as an ordinary user; and that the way of doing so deserves belief."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest

from rollyard.testing.sandbox_conformance import Check, Part, alive, eventually, marked
from tests.sandbox import test_conformance, test_hostile
from tests.sandbox.as_user import UID, run_as_user

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another; this run is an ordinary user's"),
    pytest.mark.slow,
    pytest.mark.timeout(1260),
    pytest.mark.xdist_group("user"),
]


CONFORMING = {"bubblewrap": Part.LAUNCHER, "apptainer-folder": Part.PROGRAM, "apptainer-sif": Part.ROOT}
"""Each way that a root is made once, and of each the first part that the ones before it have not shown to conform for a
user. What else differs between the runtimes has been seen by root's own run: all of Apptainer, too. Not oci, which
needs subordinate uids or a daemon."""

NONE = len(Part) + 1
ATTACKED = ("bubblewrap", "apptainer-folder")


def test_the_runtimes_conform_and_the_attacks_fail() -> None:
    pairs: list[tuple[str, Check]] = [cast(Any, pair.values) for pair in test_conformance.PAIRS]
    checks = [f"{name}-{check.name}" for name, check in pairs if check.decided_by >= CONFORMING.get(name, NONE)]
    cases = [str(pair.id) for pair in test_hostile.PAIRS if pair.values[0] in ATTACKED]
    chosen = [f"tests/sandbox/test_conformance.py::test_the_runtime_conforms[{name}]" for name in checks]
    chosen += [f"tests/sandbox/test_hostile.py::test_the_attack_fails[{name}]" for name in cases]
    run_as_user(*chosen, timeout_s=1200)


# --- the way itself -----------------------------------------------------------------------------------

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
    """Where an inner test file can lie: the user must be able to read it."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name, "test_inner.py")


def test_a_user_is_one_and_leaves_nothing(inner: Path) -> None:
    mark = marked()
    inner.write_text(_INNER.format(uid=UID, here=str(inner.parent), ok=True, mark=mark))
    run_as_user(str(inner), timeout_s=60)
    assert not alive(mark)


def test_each_inner_failure_is_told(inner: Path) -> None:
    inner.write_text(_INNER.format(uid=UID, here=str(inner.parent), ok=False, mark="0"))
    with pytest.raises(AssertionError, match=r"(?s)test_that_fails.*what is wrong.*1 failed, 2 passed"):
        run_as_user(str(inner), timeout_s=60)


def test_an_empty_selection_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="ran no test"):
        run_as_user("tests/sandbox/test_hostile.py", "-k", "no_such_attack", timeout_s=60)


async def test_a_run_that_takes_too_long_is_ended_whole(inner: Path) -> None:
    mark = marked()
    inner.write_text(f"import os\ndef test_it():\n    os.execvp('sleep', ['sleep', {mark!r}])\n")
    with pytest.raises(AssertionError, match="took more than"):
        run_as_user(str(inner), timeout_s=5.0)
    await eventually(lambda: not alive(mark), "nothing is left of it")
