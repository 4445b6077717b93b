"""The portable Python: a folder that runs in any image, bound read-only, with its own loader and libraries.

It is a copy of the interpreter that runs this service: the program, the standard library (without tests and Tk), the
shared libraries that they need, including libc and the loader, and IPython if it is installed on the host. *Its own
loader* starts it, so that the image needs nothing: no libc, no /bin, no /lib. Python locates its library relative to
its program, so the folder works at any path without an environment variable.

    FOLDER/ld.so   FOLDER/bin/python3   FOLDER/lib/*.so   FOLDER/lib/pythonX.Y/{…,site-packages}

Invariants. A folder is built once per digest of its inputs, under a lock, in another folder, and is renamed once it
has been tested: an existing folder is complete. All users may read it. It is never changed and never deleted here.

Child processes cannot use `sys.executable`: the kernel would look for the image's loader. Use `argv`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path

from rollyard.core.failure import SandboxStartFailed
from rollyard.core.locks import locked

log = logging.getLogger("rollyard.sandbox")

INSIDE = "/.rollyard-python"
FORMAT = 1
"""Part of the digest: incremented when the build changes."""

BUILD_S = 300.0
"""Time limit of each program that the build runs; the whole build takes about 3 s."""

PACKAGE = "ipython"

_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
_NO_FOLDERS = {"test", "tests", "idlelib", "turtledemo", "tkinter", "ensurepip", "site-packages", "dist-packages"}
_NO_FILES = re.compile(
    r"_?(ctypes_|xx)?test.*\.so|xxlimited.*\.so|_tkinter\..*|.*\.a|.*\.opt-[12]\.pyc"
    r"|(site|user)customize\.py|EXTERNALLY-MANAGED"
)
_BESIDE_LIBC = ("libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2")
"""Libraries that glibc opens itself, so `ldd` does not list them: to end threads, and for users and hosts before
glibc 2.34."""

_TRIAL = """
import sys, json, ctypes, socket, tarfile, resource, termios, select, fcntl, struct, hashlib, zlib, asyncio, subprocess
assert sys.prefix == sys.exec_prefix == sys.argv[1], sys.prefix
assert all(path.startswith(sys.prefix) for path in sys.path), sys.path
ctypes.CDLL(None).getpid()
if sys.argv[2]:
    from IPython.core.interactiveshell import InteractiveShell
"""


@dataclass(frozen=True, slots=True)
class PortablePython:
    """`folder` on the host is mounted as INSIDE; `argv` starts the interpreter there, with `env` added."""

    folder: Path
    argv: tuple[str, ...]
    env: Mapping[str, str]

    def on_host(self) -> PortablePython:
        """The same for a runtime that cannot bind folders: started at its path on the host."""
        return _python_in(self.folder, str(self.folder))


def _python_in(folder: Path, path_inside: str) -> PortablePython:
    argv = (f"{path_inside}/ld.so", "--library-path", f"{path_inside}/lib", f"{path_inside}/bin/python3")
    # Empty is unset: values that a task set for the image's Python would break this one.
    return PortablePython(folder, argv, {"PYTHONHOME": "", "PYTHONPATH": ""})


def portable_python(cache: Path) -> PortablePython:
    """Returns the portable Python below `cache`, and builds it if necessary. Call it in a thread: a build blocks for
    seconds."""
    parts = _own_parts()
    folder = cache.absolute() / parts.digest()
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / ".lock"):  # another process may be building the same
            if not folder.is_dir():
                _build(parts, folder)
    return _python_in(folder, INSIDE)


class PythonBuilds:
    """Builds the portable Python at the first `get`, once for all callers, in a thread."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._turn = asyncio.Lock()
        self._python: PortablePython | None = None

    async def get(self) -> PortablePython:
        async with self._turn:
            if self._python is None:
                self._python = await asyncio.to_thread(portable_python, self._cache)
            return self._python


# --- contents -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Parts:
    """All files of the folder: path in the folder → path on the host."""

    loader: Path
    files: dict[str, Path]
    packages: dict[str, str] = field(default_factory=dict[str, str])  # name → version

    @classmethod
    def discover(cls) -> _Parts:
        program = Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()
        stdlib = Path(os.__file__).resolve().parent
        home = f"{sys.platlibdir}/{_VERSION}"
        files = {f"{home}/{name}": path for name, path in _stdlib_files(stdlib)}
        packages: dict[str, str] = {}
        for distribution in _distributions(PACKAGE):
            packages[distribution.metadata["Name"]] = distribution.version
            for file in distribution.files or ():  # third_party: 32 MB of jedi's stubs, for completion only
                if not {"..", "third_party"} & {*file.parts} and not _NO_FILES.fullmatch(file.name):
                    files[f"{home}/site-packages/{file}"] = Path(str(file.locate()))
        binaries = [program, *(path for path in files.values() if path.suffix == ".so")]
        loader, libraries, broken = _libraries(binaries)
        files = {name: path for name, path in files.items() if path not in broken}
        files |= {f"lib/{name}": path for name, path in libraries.items()}
        files["bin/python3"] = program
        return cls(loader, files, packages)

    def digest(self) -> str:
        """Covers name, size and time of compiled files; the versions cover the rest."""
        hasher = blake2b(f"{FORMAT}\n{sys.version}\n{sorted(self.packages.items())}\n".encode(), digest_size=8)
        for name, path in sorted({**self.files, "ld.so": self.loader}.items()):
            if ".so" in path.suffixes or name in ("bin/python3", "ld.so"):
                file_stat = path.stat()
                hasher.update(f"{name} {path} {file_stat.st_size} {file_stat.st_mtime_ns}\n".encode())
        return f"{_VERSION}-{hasher.hexdigest()}"


@cache
def _own_parts() -> _Parts:
    """The parts of this interpreter, found once per process."""
    return _Parts.discover()


def _stdlib_files(stdlib: Path) -> Iterator[tuple[str, Path]]:
    for above, folders, names in os.walk(stdlib):
        folders[:] = [name for name in folders if name not in _NO_FOLDERS and not name.startswith("config-")]
        for name in names:
            path = Path(above, name)
            if not _NO_FILES.fullmatch(name) and path.is_file():  # not a dangling link
                yield str(path.relative_to(stdlib)), path


def _distributions(name: str) -> list[importlib.metadata.Distribution]:
    """Returns the package and its dependencies that are installed, without extras."""
    distributions: dict[str, importlib.metadata.Distribution] = {}
    pending = [name]
    while pending:
        normalized = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        if normalized in distributions:
            continue
        try:
            distributions[normalized] = importlib.metadata.distribution(normalized)
        except importlib.metadata.PackageNotFoundError:  # for another system, or IPython itself is not installed
            continue
        for requirement in distributions[normalized].requires or ():
            if "extra ==" not in requirement:
                pending.append(re.match(r"[\w.-]+", requirement.strip())[0])  # type: ignore[index]
    return list(distributions.values())


def _libraries(binaries: list[Path]) -> tuple[Path, dict[str, Path], set[Path]]:
    """Returns the loader, the shared libraries by the name under which they are loaded, and the binaries that lack one
    even on the host."""
    output = _loaded_together(binaries)
    if "=>" not in output or "=> not found" in output:
        output = _run(["ldd", *map(str, binaries)], may_fail=True)  # reports which binary lacks it
    loader, libraries, broken, current = None, dict[str, Path](), set[Path](), binaries[0]
    for line in output.splitlines():
        if header := re.fullmatch(r"(/.*):", line):
            current = Path(header[1])
        elif library := re.fullmatch(r"\s+(\S+) => (/.*) \(0x[0-9a-f]+\)", line):
            libraries[Path(library[1]).name] = Path(library[2]).resolve()
        elif "=> not found" in line:
            broken.add(current)
        elif loaded := re.fullmatch(r"\s+(/.*) \(0x[0-9a-f]+\)", line):
            loader = loader if Path(loaded[1]) in binaries else Path(loaded[1])
    if loader is None or binaries[0] in broken:
        raise SandboxStartFailed(f"the libraries of {binaries[0].name} were not found: {output[-500:]}", step="python")
    if libc := libraries.get("libc.so.6"):
        for name in _BESIDE_LIBC:
            if (libc.parent / name).is_file():
                libraries.setdefault(name, (libc.parent / name).resolve())
    libraries.setdefault(loader.name, loader.resolve())  # libc needs it, and finds it loaded under that name
    return loader.resolve(), libraries, broken


def _loaded_together(binaries: list[Path]) -> str:
    """Returns what the loader reports if one process loads all binaries. `ldd` starts two processes for each of them,
    which takes a second."""
    program, *modules = map(str, binaries)
    preloaded = {"LD_TRACE_LOADED_OBJECTS": "1", "LD_PRELOAD": " ".join(modules)}
    return _run([program, "-c", ""], env={**os.environ, **preloaded}, may_fail=True)


# --- building -----------------------------------------------------------------------------------------


def _build(parts: _Parts, folder: Path) -> None:
    """Builds the folder. The lock is held, so any other unfinished folder was left by a process that died."""
    started_at = time.monotonic()
    log.info("building the portable Python", extra={"folder": str(folder), "files": len(parts.files)})
    for stale in folder.parent.glob(".building-*"):
        shutil.rmtree(stale, ignore_errors=True)
    building = folder.parent / f".building-{os.urandom(6).hex()}"
    try:
        building.mkdir()
        created_folders: set[Path] = set()
        for name, path in {**parts.files, "ld.so": parts.loader}.items():
            target = building / name
            if target.suffix == ".pyc" and not path.exists():
                continue  # listed in pip's records but deleted since: it is compiled below
            if target.parent not in created_folders:
                target.parent.mkdir(parents=True, exist_ok=True)
                created_folders.add(target.parent)
            shutil.copyfile(path, target)
            file_stat = path.stat()
            os.utime(target, ns=(file_stat.st_atime_ns, file_stat.st_mtime_ns))  # else the .pyc beside it is stale
            target.chmod(0o755 if name in ("bin/python3", "ld.so") or ".so" in target.suffixes else 0o644)
        packages = building / sys.platlibdir / _VERSION / "site-packages"
        packages.mkdir(exist_ok=True)
        packages.with_name("dist-packages").symlink_to("site-packages")  # as Debian's Python calls it
        python = _python_in(building, str(building))
        library = str(packages.parent)
        _run([*python.argv, "-I", "-m", "compileall", "-q", "-s", str(building), "-p", INSIDE, library], may_fail=True)
        has_package = PACKAGE if PACKAGE in parts.packages else ""
        _run([*python.argv, "-I", "-c", _TRIAL, str(building), has_package])
        for above, _, names in os.walk(building):
            Path(above).chmod(0o755)
            for name in names:
                if name.endswith(".pyc"):  # those just compiled have the umask's mode
                    Path(above, name).chmod(0o644)
        building.rename(folder)
    except OSError as error:
        raise SandboxStartFailed(f"the portable Python could not be built: {error}", step="python") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    took_s = round(time.monotonic() - started_at, 2)
    log.info("built the portable Python", extra={"folder": str(folder), "took_s": took_s, "packages": parts.packages})


def _run(argv: list[str], *, env: Mapping[str, str] | None = None, may_fail: bool = False) -> str:
    what = f"{Path(argv[0]).name}, run to build the portable Python,"
    try:
        completed = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=BUILD_S, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxStartFailed(f"{what} failed: {error}"[:500], step="python") from error
    if completed.returncode != 0 and not may_fail:
        raise SandboxStartFailed(
            f"{what} ended with {completed.returncode}: {completed.stderr.strip()[-500:]}", step="python"
        )
    return completed.stdout
