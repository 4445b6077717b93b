"""Runs tests as an ordinary user from a test run of root: the same suites and files, without privileges.

The user gets its own mount and PID namespace, in which every path that the tests need is the same as outside: a parent
folder that only root may enter (root's home, with a Python below it) is covered by an empty one, and the needed path is
bound into it. So no path changes, and nothing on the machine does. When the inner run ends or times out, all its
processes end with the PID namespace.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

UID = 54_321
"""An unused uid. Not that of `nobody`, which also represents every uid that a namespace does not map."""

TAIL = 3000
REPOSITORY = Path(__file__).parents[2]


def run_as_user(*selection: str, timeout_s: float) -> None:
    """Runs pytest with these arguments as the user. Raises AssertionError with all inner failures."""
    # Not the usual folder of temporary files, which may be in memory: without control groups, that would count as the
    # sandbox's memory.
    with tempfile.TemporaryDirectory(prefix="rollyard-user-", dir="/var/tmp") as name:
        home = Path(name)
        (home / "tmp").mkdir()
        (home / "passwd").write_text(Path("/etc/passwd").read_text() + f"tester:x:{UID}:{UID}::{home}:/bin/sh\n")
        for path in (home, home / "tmp"):
            path.chmod(0o755)
            os.chown(path, UID, UID)
        report = home / "tmp" / "report.xml"
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *selection]
        # The shell stays as PID 1: a process that changes its user loses the setting to die with its parent.
        script = "\n".join(["set -e", *_mounts(home), shlex.join([*_SETPRIV, *pytest]), "exit 0"])
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            completed = subprocess.run(
                [*namespaces, "sh", "-c", script],
                env=_environment(home),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
            failures = list(_failures(report))
            assert completed.returncode == 0 and not failures, "\n\n".join(
                [
                    *failures,
                    f"as uid {UID}, pytest ended with {completed.returncode}:",
                    completed.stdout.decode()[-TAIL:],
                ]
            )
            return
        raise AssertionError(f"as uid {UID}, {shlex.join(selection)} took more than {timeout_s} s")


_SETPRIV = [
    *("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"),
    *("--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all", "--"),
]


def _environment(home: Path) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        **{name: os.environ[name] for name in ("ROLLYARD_NO_SKIPS",) if name in os.environ},
    }


def _mounts(home: Path) -> Iterator[str]:
    """Yields shell commands that make the paths that the tests need accessible to the user."""
    staging = home / "held"
    covered: set[Path] = set()
    needed = [REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)]
    shut = {path: _shut_above(path) for path in needed}
    for number, path in enumerate(needed):
        if shut[path] is not None:
            yield shlex.join(["mkdir", "-p", f"{staging}/{number}"])
            yield shlex.join(["mount", "--bind", str(path), f"{staging}/{number}"])
    for cover in filter(None, shut.values()):
        if cover not in covered and not covered & set(cover.parents):
            covered.add(cover)
            yield shlex.join(["mount", "-t", "tmpfs", "-o", "mode=755,size=1m", "covered", str(cover)])
    for number, path in enumerate(needed):
        if shut[path] is not None:
            yield shlex.join(["mkdir", "-p", str(path)])
            yield shlex.join(["mount", "--move", f"{staging}/{number}", str(path)])
    yield shlex.join(["mount", "--bind", str(home / "passwd"), "/etc/passwd"])  # Apptainer looks its user up
    yield shlex.join(["cd", str(REPOSITORY)])


def _shut_above(path: Path) -> Path | None:
    """Returns the topmost parent folder of `path` that others may not enter."""
    for folder in [*reversed(path.resolve().parents), path.resolve()]:
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None


def _failures(report: Path) -> Iterator[str]:
    """Yields the inner run's failures, as pytest reported them. A missing report and an empty run are failures too."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        yield f"the inner run left no report: {error}"
        return
    if not cases:
        yield "the inner run ran no test"
    for case in cases:
        for bad in [*case.iter("failure"), *case.iter("error")]:
            yield f"--- {case.get('classname')}::{case.get('name')}\n{(bad.text or bad.get('message') or '')[-TAIL:]}"
