"""Small real git repositories in images, each with an issue. The rows are made from the repositories' own commits.

An image consists of the sandboxes' test image (hard links to it), pytest, and the repository at /testbed. Its HEAD is
the commit before the fix; the branch `main` contains the fix, as in a carelessly built image.
"""

import hashlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from rollyard.agents.base import AgentContext
from rollyard.agents.oracle import NoopAgent
from rollyard.core import Message
from tests.sandbox.runtimes import image

LOGO = bytes(range(256)) * 4
NEW_LOGO = bytes(reversed(range(256))) * 4
LIMITS = {"init_s": 30, "run_s": 30, "eval_s": 30}

BASE: dict[str, bytes] = {
    "calc.py": b"def add(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return a * b\n",
    "old.py": b"raise ImportError('gone')\n",
    "logo.bin": LOGO,
    "notes.txt": b"one\r\ntwo\r\nthree\r\n",
    ".gitattributes": b"*.txt text\n*.bin diff=hex\n",
    ".gitignore": b"*.log\n/build/\n",
    "kept.log": b"tracked, though ignored\n",
    "tests/test_calc.py": b"from calc import mul\n\n\ndef test_mul():\n    assert mul(2, 3) == 6\n",
}
FIX: dict[str, bytes | None] = {
    "calc.py": BASE["calc.py"].replace(b"a - b", b"a + b"),
    "old.py": None,
    "logo.bin": NEW_LOGO,
    "notes.txt": b"one\r\n2\r\nthree\r\nfour\n",
    "new name.py": b"VALUE = 42\n",
}
TESTS: dict[str, bytes | None] = {
    "tests/test_calc.py": b"""import hashlib
import itertools
from pathlib import Path

from calc import add, mul


def sha(name):
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()


def test_mul():
    assert mul(2, 3) == 6


def test_add():
    assert add(2, 3) == 5


def test_files():
    assert sha("logo.bin") == "LOGO"
    assert sha("notes.txt") == "NOTES"
    assert Path("new name.py").read_text() == "VALUE = 42\\n"
    assert not Path("old.py").exists()
""".replace(b"LOGO", hashlib.sha256(NEW_LOGO).hexdigest().encode()).replace(
        b"NOTES", hashlib.sha256(FIX["notes.txt"] or b"").hexdigest().encode()
    )
}
FAIL_TO_PASS = ["tests/test_calc.py::test_add", "tests/test_calc.py::test_files"]
PASS_TO_PASS = ["tests/test_calc.py::test_mul"]


@dataclass(frozen=True)
class Repository:
    image: Path
    base_commit: str
    fix_commit: str
    patch: str
    test_patch: str

    def row(self, **more: Any) -> dict[str, Any]:
        """The row in SWE-bench's format."""
        return {
            "repo": "tests/calc",
            "instance_id": "tests__calc-1",
            "base_commit": self.base_commit,
            "patch": self.patch,
            "test_patch": self.test_patch,
            "problem_statement": "add() subtracts: {add(2, 3)} is -1",
            "hints_text": "",
            "version": "1.0",
            "created_at": "2024-01-01",
            "FAIL_TO_PASS": json.dumps(FAIL_TO_PASS),
            "PASS_TO_PASS": json.dumps(PASS_TO_PASS),
            "test_command": "python3 -m pytest -rA -p no:cacheprovider {test_files}",
            "log_parser": "parse_log_pytest",
            **more,
        }

    def body(self, commands: Sequence[str] = (), **more: Any) -> dict[str, Any]:
        """A task's body, with `commands` for the agent `hands`."""
        return self.task(self.row(**more), commands)

    def task(self, data: Mapping[str, Any], commands: Sequence[str] = ()) -> dict[str, Any]:
        agent = {"agent": {"name": "hands", "options": {"commands": list(commands)}}} if commands else {}
        sandbox = {"image": str(self.image)}
        return {"environment": "swe", "data": dict(data), "limits": LIMITS, "sandbox": sandbox, **agent}


class Hands(NoopAgent):
    """An agent that runs the task's commands in the repository, without a model."""

    name: ClassVar[str] = "hands"

    def __init__(self) -> None:
        self.outputs: list[str] = []  # what its commands printed

    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        assert context.sandbox is not None
        commands = context.task.agent.options["commands"]
        assert isinstance(commands, list | tuple)
        for command in commands:
            result = await context.sandbox.exec(str(command), timeout_s=20, cwd=context.sandbox.spec.workdir)
            assert result.status == 0, (command, result.stdout, result.stderr)
            self.outputs.append(result.stdout.decode())
        return await super().run(context, messages)


def _copy(image: str | Path, folder: Path) -> None:
    """Copies with hard links if both are on one file system."""
    if subprocess.run(["cp", "-al", str(image), str(folder)], capture_output=True, check=False).returncode != 0:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        subprocess.run(["cp", "-a", str(image), str(folder)], check=True)


def build(folder: Path) -> Repository:
    """Builds the image at `folder`, and returns it with the data of its row. Takes a second."""
    _copy(image(is_sif=False), folder)
    packages = folder / "usr/lib/python3/dist-packages"
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for file in metadata.files(name) or ():
            if ".." not in file.parts:
                _add(Path(str(file.locate())), packages / file)
    library = Path("/usr/lib")
    compiled = (
        library.glob(f"python3.*/{below}__pycache__/*.pyc") for below in ("", "*/")
    )  # saves half a second a run
    shared = (library.glob(f"*/{name}") for name in ("libstdc++.so.6", "libgcc_s.so.1"))  # agent programs need them
    for path in itertools.chain(*compiled, *shared):
        _add(path, folder / path.relative_to("/"))
    repository = folder / "testbed"
    repository.mkdir()
    _git(repository, "init", "-q", "-b", "main")
    _git(repository, "config", "core.autocrlf", "false")
    (repository / ".git/info/attributes").write_text("*.txt -text\n")  # the commits must contain CRLF
    base = _commit(repository, BASE, "base")
    fix = _commit(repository, FIX, "the fix")
    tests = _commit(repository, TESTS, "its tests")
    built = Repository(folder, base, fix, _diff(repository, base, fix), _diff(repository, fix, tests))
    _git(repository, "remote", "add", "origin", "https://example.invalid/calc")
    _git(repository, "update-ref", "refs/remotes/origin/main", tests)
    _git(repository, "tag", "v2", fix)
    _git(repository, "tag", "v1", base)
    _git(repository, "checkout", "-q", "--detach", base)
    (repository / ".git/info/attributes").unlink()
    _write(repository, {"build/out.o": b"\0", "untracked.txt": b"of the image\n"})
    return built


def _add(source: Path, target: Path) -> None:
    """Copies a file unless the target exists: an existing file is a hard link that all images share."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)  # keeps its mtime, else Python would compile it again


def _commit(repository: Path, files: Mapping[str, bytes | None], message: str) -> str:
    _write(repository, files)
    _git(repository, "add", "-A", "-f")
    _git(repository, "commit", "-q", "-m", message)
    return _git(repository, "rev-parse", "HEAD").decode().strip()


def _write(repository: Path, files: Mapping[str, bytes | None]) -> None:
    for name, content in files.items():
        path = repository / name
        if content is None:
            path.unlink()
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)


def _diff(repository: Path, old: str, new: str) -> str:
    return _git(repository, "diff", "--binary", "--no-ext-diff", old, new).decode()


def _git(repository: Path, *arguments: str) -> bytes:
    who = {
        f"GIT_{role}_{field}": "t@example.invalid" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")
    }
    env = {**os.environ, **who, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(["git", *arguments], cwd=repository, env=env, check=True, capture_output=True).stdout


R2E_TEST = b"""import pytest
from calc import add, mul


class T:
    def test_add(self):
        assert add(2, 3) == 5


@pytest.mark.parametrize("x", [1], ids=["a b"])
def test_mul(x):
    assert mul(x, x) == 1


def test_wrong():
    assert False, "PASSED - not"
"""


def as_r2e(calc: Repository, folder: Path) -> Repository:
    """The same repository in an image like R2E-Gym's, which contains the hidden tests."""
    _copy(calc.image, folder)
    (folder / "r2e_tests").mkdir()
    (folder / "r2e_tests/test_1.py").write_bytes(R2E_TEST)
    run = folder / "testbed/run_tests.sh"
    run.write_text("python3 -W ignore -m pytest -rA -p no:cacheprovider -o python_classes=T r2e_tests\n")
    (folder / "testbed/untracked.txt").unlink()
    (folder / "testbed/parsed_commit.json").write_text('{"the fix": "a + b"}')
    return replace(calc, image=folder)


def as_sif(calc: Repository, file: Path) -> Repository:
    """The same image as a SIF file. It is not compressed, so it takes a second or two."""
    no_compression = ["--mksquashfs-args", "-noI -noD -noF -noX"]
    command = ["apptainer", "--quiet", "build", *no_compression, str(file), str(calc.image)]
    subprocess.run(command, check=True, capture_output=True)
    return replace(calc, image=file)
