"""The portable Python: it runs in an empty root, and it is built once."""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rollyard
from rollyard.core.failure import SandboxStartFailed
from rollyard.sandbox import python as module
from rollyard.sandbox.python import INSIDE, PortablePython, PythonBuilds, portable_python

pytestmark = pytest.mark.slow

EVERYTHING = (
    "json, ctypes, socket, tarfile, resource, termios, fcntl, select, struct, ssl, sqlite3, hashlib, lzma, bz2, zlib,"
    " uuid, decimal, zoneinfo, multiprocessing, subprocess, asyncio, pwd, unittest, venv, xml.etree.ElementTree"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Generator[PortablePython, None, None]:
    """Built by two threads at once, with the remains of a dead build and a umask that denies others access."""
    cache = tmp_path_factory.mktemp("python")
    (cache / ".building-dead").mkdir()
    before = os.umask(0o077)
    try:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(portable_python, [cache, cache])
    finally:
        os.umask(before)
    assert first == second
    yield first
    shutil.rmtree(cache)


def in_nothing(python: PortablePython, *arguments: str) -> str:
    """Runs it in a sandbox whose root is empty, and returns its output."""
    bare = ["bwrap", "--unshare-all", "--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--clearenv"]
    bare += ["--tmpfs", "/", "--ro-bind", str(python.folder), INSIDE, "--proc", "/proc", "--dev", "/dev"]
    for name, value in python.env.items():
        bare += ["--setenv", name, value]
    completed = subprocess.run([*bare, "--", *python.argv, *arguments], capture_output=True, text=True, timeout=30)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_it_runs_in_an_empty_root(python: PortablePython) -> None:
    output = in_nothing(python, "-c", f"import {EVERYTHING}, os, sys; print(sys.version, sys.prefix, os.listdir('/'))")
    assert output.startswith(sys.version) and INSIDE in output
    assert "usr" not in output.rpartition("[")[2] and "lib" not in output.rpartition("[")[2]


def test_it_loads_no_library_of_the_image(python: PortablePython) -> None:
    code = f"import {EVERYTHING}; print(*{{line.split()[5] for line in open('/proc/self/maps') if '.so' in line}})"
    assert all(path.startswith(INSIDE) for path in in_nothing(python, "-c", code).split())


def test_it_has_ipython(python: PortablePython) -> None:
    code = "from IPython.core.interactiveshell import InteractiveShell as S; S.instance().run_cell('6 * 7')"
    assert "42" in in_nothing(python, "-c", code)


def test_the_launcher_can_import_all_that_it_needs(python: PortablePython) -> None:
    names: set[str] = set()
    launcher = Path(rollyard.__file__).parent / "sandbox" / "launcher"
    for name in ("program", "kernel", "file_jobs"):
        for node in ast.parse((launcher / f"{name}.py").read_text()).body:
            names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
    names = {name for name in names if name.partition(".")[0] in sys.stdlib_module_names}
    assert {"ctypes", "json", "tarfile"} <= names
    code = f"import {', '.join(sorted(names))}; import ctypes; print(ctypes.PyDLL(None).getpid() > 0)"
    assert in_nothing(python, "-I", "-S", "-c", code) == "True\n"


def test_python_variables_of_a_task_are_ignored(python: PortablePython) -> None:
    on_host = python.on_host()
    env = {"PYTHONHOME": "/nowhere", "PYTHONPATH": "/nowhere", **on_host.env}
    completed = subprocess.run(
        [*on_host.argv, "-c", "import sys; print(sys.path, sys.prefix)"], env=env, capture_output=True
    )
    assert completed.returncode == 0, completed.stderr
    assert str(python.folder).encode() in completed.stdout and b"nowhere" not in completed.stdout


def test_all_users_can_read_it(python: PortablePython) -> None:
    for above, _, names in os.walk(python.folder):
        assert stat.S_IMODE(Path(above).stat().st_mode) == 0o755
        for name in names:
            assert stat.S_IMODE(Path(above, name).stat().st_mode) in (0o644, 0o755), name


def test_no_unfinished_build_is_left(python: PortablePython) -> None:
    assert sorted(path.name for path in python.folder.parent.iterdir()) == [".lock", python.folder.name]


async def test_it_is_built_once_for_all_callers(python: PortablePython, caplog: pytest.LogCaptureFixture) -> None:
    builds = PythonBuilds(python.folder.parent)
    with caplog.at_level(logging.INFO, "rollyard.sandbox"):
        assert await asyncio.gather(*[builds.get() for _ in range(4)]) == [python] * 4
    assert not caplog.records


def test_missing_bytecode_is_compiled_again_and_readable(tmp_path: Path) -> None:
    """pip's records list the files that it compiled, even if they have been deleted."""
    parts = module._Parts.discover()
    compiled = [name for name in parts.files if name.endswith(".pyc") and "/IPython/" in name]
    parts.files.update((name, tmp_path / "gone" / name) for name in compiled)
    before = os.umask(0o077)
    try:
        module._build(parts, tmp_path / "built")
    finally:
        os.umask(before)
    bytecode = [path for path in (tmp_path / "built").rglob("*.pyc") if "IPython" in path.parts]
    assert bytecode and {stat.S_IMODE(path.stat().st_mode) for path in bytecode} == {0o644}


def test_a_build_that_does_not_run_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TRIAL", "raise SystemExit('this machine is odd')")
    with pytest.raises(SandboxStartFailed, match="this machine is odd"):
        portable_python(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_module_that_lacks_a_library_is_left_out(tmp_path: Path) -> None:
    library, whole, lacking = (tmp_path / name for name in ("libgone.so", "whole.so", "lacking.so"))
    compiler = ["gcc", "-shared", "-Wl,--no-as-needed", "-o"]
    subprocess.run([*compiler, library, "-xc", "/dev/null"], check=True)
    subprocess.run([*compiler, whole, "-xc", "/dev/null"], check=True)
    subprocess.run([*compiler, lacking, "-xc", "/dev/null", f"-L{tmp_path}", "-lgone"], check=True)
    library.unlink()
    program = Path(sys.executable).resolve()
    loader, libraries, broken = module._libraries([program, whole, lacking])
    assert broken == {lacking} and loader.is_file() and "libc.so.6" in libraries
    assert module._libraries([program, whole]) == (loader, libraries, set())


def test_the_libraries_are_found_without_ldd(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = module._Parts.discover().files
    monkeypatch.setenv("PATH", "/nonexistent")
    assert module._Parts.discover().files == expected


def test_another_python_gets_another_folder(python: PortablePython, tmp_path: Path) -> None:
    """The distribution's Python, outside of any virtual environment: it has no IPython."""
    other = shutil.which("python3", path="/usr/bin") or ""
    is_new = "import sys; sys.exit(sys.version_info < (3, 11))"
    if not other or subprocess.run([other, "-c", is_new]).returncode:
        pytest.skip("no Python of 3.11 or newer in /usr/bin")
    source = Path(rollyard.__file__).parent
    code = f"""
import sys, types
from pathlib import Path
sys.path.insert(0, {str(source.parent)!r})
package = sys.modules["rollyard.sandbox"] = types.ModuleType("rollyard.sandbox")  # not all that it imports is here
package.__path__ = [{str(source / "sandbox")!r}]
from rollyard.sandbox.python import portable_python
print(portable_python(Path({str(tmp_path)!r})).folder)
"""
    completed = subprocess.run([other, "-B", "-c", code], capture_output=True, text=True, timeout=150)
    assert completed.returncode == 0, completed.stderr
    other_python = PortablePython(Path(completed.stdout.strip()), python.argv, python.env)
    assert other_python.folder.name != python.folder.name
    assert in_nothing(other_python, "-c", f"import {EVERYTHING}, sys; print(sys.prefix)") == f"{INSIDE}\n"
    shutil.rmtree(tmp_path)
