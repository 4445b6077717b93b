"""Our own Python as a folder that runs in any image: bound read-only, with its own loader and libraries.

It is a copy of the interpreter that runs this service: its program, its standard library (without tests and Tk), the
shared libraries that these need, libc and the loader among them, and IPython where it is installed here. It is
started *by its own loader*, so that the image needs nothing at all: no libc, no /bin, no /lib. Python finds its library
from where its program lies; so the folder works wherever it is put, and no variable has to say where.

    FOLDER/ld.so   FOLDER/bin/python3   FOLDER/lib/*.so   FOLDER/lib/pythonX.Y/{…,site-packages}

Invariants. A folder is built once per digest of what goes into it, under a lock, elsewhere, and gets its name when it
has been tried: one that is there is whole. Everybody may read it. It is never changed, and never deleted here.

Not for: child processes by `sys.executable`. The kernel would look for the image's loader; use `argv`.
"""

from __future__ import annotations

import asyncio
import fcntl
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
from hashlib import blake2b
from pathlib import Path

from rollyard.core.failure import SandboxStartFailed

log = logging.getLogger("rollyard.sandbox")

INSIDE = "/.rollyard-python"
FORMAT = 1
"""Part of the digest: raised when the folder's making changes."""

BUILD_S = 300.0
"""Bounds each program that the building runs; all of it takes some 3 s."""

PACKAGE = "ipython"

_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
_NO_FOLDERS = {"test", "tests", "idlelib", "turtledemo", "tkinter", "ensurepip", "site-packages", "dist-packages"}
_NO_FILES = re.compile(
    r"_?(ctypes_|xx)?test.*\.so|xxlimited.*\.so|_tkinter\..*|.*\.a|.*\.opt-[12]\.pyc"
    r"|(site|user)customize\.py|EXTERNALLY-MANAGED"
)
_BESIDE_LIBC = ("libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2")
"""What glibc opens by itself, unseen by `ldd`: to end threads, and for users and hosts before glibc 2.34."""

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
    """`folder` on the host, seen as INSIDE; `argv` starts it there, with `env` added."""

    folder: Path
    argv: tuple[str, ...]
    env: Mapping[str, str]

    def on_host(self) -> PortablePython:
        """The same, as it is started where nothing can be bound."""
        return _python_in(self.folder, str(self.folder))


def _python_in(folder: Path, seen_as: str) -> PortablePython:
    argv = (f"{seen_as}/ld.so", "--library-path", f"{seen_as}/lib", f"{seen_as}/bin/python3")
    # Empty is unset: what a task set for the image's own Python would lead ours astray.
    return PortablePython(folder, argv, {"PYTHONHOME": "", "PYTHONPATH": ""})


def portable_python(cache: Path) -> PortablePython:
    """Ours, below `cache`; built if it is not there. Blocks for seconds then: for a thread."""
    parts = _Parts.found()
    folder = cache.absolute() / parts.digest()
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        lock = os.open(cache / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be building the same
            if not folder.is_dir():
                _build(parts, folder)
        finally:
            os.close(lock)
    return _python_in(folder, INSIDE)


class PythonBuilds:
    """Ours for whoever asks: built at the first need, once however many ask, off the event loop."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._turn = asyncio.Lock()
        self._found: PortablePython | None = None

    async def get(self) -> PortablePython:
        async with self._turn:
            if self._found is None:
                self._found = await asyncio.to_thread(portable_python, self._cache)
            return self._found


# --- what goes into it --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Parts:
    """Every file: where it goes → where it is."""

    loader: Path
    files: dict[str, Path]
    packages: dict[str, str] = field(default_factory=dict[str, str])  # name → version

    @classmethod
    def found(cls) -> _Parts:
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
        """By name, size and time for what is compiled; the rest follows from the versions."""
        made = blake2b(f"{FORMAT}\n{sys.version}\n{sorted(self.packages.items())}\n".encode(), digest_size=8)
        for name, path in sorted({**self.files, "ld.so": self.loader}.items()):
            if ".so" in path.suffixes or name in ("bin/python3", "ld.so"):
                found = path.stat()
                made.update(f"{name} {path} {found.st_size} {found.st_mtime_ns}\n".encode())
        return f"{_VERSION}-{made.hexdigest()}"


def _stdlib_files(stdlib: Path) -> Iterator[tuple[str, Path]]:
    for above, folders, names in os.walk(stdlib):
        folders[:] = [name for name in folders if name not in _NO_FOLDERS and not name.startswith("config-")]
        for name in names:
            path = Path(above, name)
            if not _NO_FILES.fullmatch(name) and path.is_file():  # not a link that leads nowhere
                yield str(path.relative_to(stdlib)), path


def _distributions(name: str) -> list[importlib.metadata.Distribution]:
    """The package and all that it needs, as far as they are installed; without its extras."""
    found: dict[str, importlib.metadata.Distribution] = {}
    left = [name]
    while left:
        wanted = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if wanted in found:
            continue
        try:
            found[wanted] = importlib.metadata.distribution(wanted)
        except importlib.metadata.PackageNotFoundError:  # another system's, or IPython itself is not here
            continue
        for requirement in found[wanted].requires or ():
            if "extra ==" not in requirement:
                left.append(re.match(r"[\w.-]+", requirement.strip())[0])  # type: ignore[index]
    return list(found.values())


def _libraries(binaries: list[Path]) -> tuple[Path, dict[str, Path], set[Path]]:
    """The loader, every shared library by the name it is asked for, and the binaries that lack one even here."""
    said = _run(["ldd", *map(str, binaries)], may_fail=True)
    loader, libraries, broken, current = None, dict[str, Path](), set[Path](), binaries[0]
    for line in said.splitlines():
        if header := re.fullmatch(r"(/.*):", line):
            current = Path(header[1])
        elif library := re.fullmatch(r"\s+(\S+) => (/.*) \(0x[0-9a-f]+\)", line):
            libraries[Path(library[1]).name] = Path(library[2]).resolve()
        elif "=> not found" in line:
            broken.add(current)
        elif alone := re.fullmatch(r"\s+(/.*) \(0x[0-9a-f]+\)", line):
            loader = Path(alone[1])
    if loader is None or binaries[0] in broken:
        raise SandboxStartFailed(f"the libraries of {binaries[0].name} were not found: {said[-500:]}", step="python")
    if libc := libraries.get("libc.so.6"):
        for name in _BESIDE_LIBC:
            if (libc.parent / name).is_file():
                libraries.setdefault(name, (libc.parent / name).resolve())
    libraries.setdefault(loader.name, loader.resolve())  # libc itself asks for it, and finds it loaded by that name
    return loader.resolve(), libraries, broken


# --- building -----------------------------------------------------------------------------------------


def _build(parts: _Parts, folder: Path) -> None:
    """With the lock held: whatever else is unfinished here was left by a builder that died."""
    began = time.monotonic()
    log.info("building our own Python", extra={"folder": str(folder), "files": len(parts.files)})
    for left in folder.parent.glob(".building-*"):
        shutil.rmtree(left, ignore_errors=True)
    building = folder.parent / f".building-{os.urandom(6).hex()}"
    try:
        building.mkdir()
        made: set[Path] = set()
        for name, path in {**parts.files, "ld.so": parts.loader}.items():
            target = building / name
            if target.suffix == ".pyc" and not path.exists():
                continue  # pip remembers it, and somebody has cleaned up: it is compiled below
            if target.parent not in made:
                target.parent.mkdir(parents=True, exist_ok=True)
                made.add(target.parent)
            shutil.copyfile(path, target)
            found = path.stat()
            os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))  # or the .pyc beside it is stale
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
                if name.endswith(".pyc"):  # of those just compiled, our umask chose who may read them
                    Path(above, name).chmod(0o644)
        building.rename(folder)
    except OSError as error:
        raise SandboxStartFailed(f"our own Python could not be built: {error}", step="python") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    took_s = round(time.monotonic() - began, 2)
    log.info("built our own Python", extra={"folder": str(folder), "took_s": took_s, "packages": parts.packages})


def _run(argv: list[str], *, may_fail: bool = False) -> str:
    what = f"{Path(argv[0]).name}, which the building of our own Python runs,"
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=BUILD_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxStartFailed(f"{what} did not work: {error}"[:500], step="python") from error
    if done.returncode != 0 and not may_fail:
        raise SandboxStartFailed(f"{what} ended with {done.returncode}: {done.stderr.strip()[-500:]}", step="python")
    return done.stdout
