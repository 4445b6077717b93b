"""The door of this wing: a `Runtime` makes `Sandbox`es, a sandbox runs commands apart from the host.

Invariants, proven for every runtime by `rollyard.testing.sandbox_conformance`:
- `exec` is a fresh process with a clean environment; its status comes from the launcher's waitpid, so nothing
  inside can forge it. Output is capped; what was cut is counted.
- When `kill()` returns, no process of the sandbox is left (its PID 1's pidfd said so); if that cannot be shown
  within a bound it raises `SandboxStuck`. It is idempotent.
- Server gone, sandbox gone: PID 1 holds a lifeline pipe whose only write end is ours.
- A sandbox lives while its lease is renewed. Nothing in it ends it by a timer.
- A limit is enforced by the means that `limits_in_force` names. One that ends the sandbox is its `SandboxEnd`.
- The doorway, where one was asked for, listens before anything inside runs. So does the way out (`egress`); without
  one, an isolated sandbox reaches nothing.
- `freeze` ends a sandbox as `kill` does and keeps what it wrote; that is a layer below any number of others.
- Paths are the sandbox's own. File calls never follow a link out of it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol, runtime_checkable

from rollyard.sandbox.doorway import Doorway
from rollyard.sandbox.egress.base import Egress

WORKDIR = "/workspace"
"""Where an agent's files are, in every sandbox."""

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Statuses of a command that SIGKILL ended: its own, and the one that a shell reports of what it ran."""

CONTROL_DIR = "/.rollyard"
"""Where a sandbox sees, read-only, the folder that the host writes commands to."""


@dataclass(frozen=True, slots=True)
class Bind:
    """A host path shown inside."""

    host: Path
    inside: str
    is_read_only: bool = True


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """None: the runtime's default. Which of them are enforced, and how, is in `Sandbox.limits_in_force`."""

    memory_bytes: int | None = None
    processes: int | None = None
    disk_bytes: int | None = None
    open_files: int | None = None
    cpus: float | None = None
    files: int | None = None  # that it makes: folders and links count as well


ImageKind = Literal["folder", "sif"]
"""An unpacked root folder, or a SIF file."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What is wanted. `image` is of a kind that the runtime reads; None is the host's /usr, read-only."""

    image: str | None = None
    workdir: str = WORKDIR  # where agents and checks begin; one that the image has
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    binds: tuple[Bind, ...] = ()
    layers: tuple[Path, ...] = ()  # what `freeze` kept, the topmost first: below this sandbox's own, read-only
    has_doorway: bool = False
    egress: Egress | None = None  # what it may reach; None: it is offline
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    owner: str = ""  # rollout id, for logs and for the sweep


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command did. `status` is the exit status, or −signal as in `subprocess`."""

    status: int
    stdout: bytes
    stderr: bytes
    duration_s: float
    is_timed_out: bool = False  # it and its children were killed at the deadline
    dropped_bytes: int = 0  # output beyond the cap
    is_out_of_memory: bool = False  # the kernel killed it, or what it ran, at the sandbox's memory limit


@dataclass(frozen=True, slots=True)
class SandboxEnd:
    """Why a sandbox is no more."""

    reason: Literal["killed", "ended_inside", "lost", "lease", "memory", "processes", "disk", "files"]
    detail: str = ""


class Process(Protocol):
    """A process started by `spawn`. `pid` is as the host sees it, for /proc only: signals go by pidfd."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Its exit status (−signal if a signal ended it). May be awaited more than once."""
        ...

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        """Signals it and its process group; nothing happens if it has ended."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def spec(self) -> SandboxSpec: ...

    @property
    def control_dir(self) -> Path:
        """The host's side of CONTROL_DIR, on tmpfs. The sandbox can read it and not write it."""
        ...

    @property
    def control_path(self) -> str:
        """The same folder as the sandbox names it: CONTROL_DIR, or the host's path where nothing is mounted."""
        ...

    @property
    def limits_in_force(self) -> Mapping[str, str]:
        """Per limit the means that enforces it, or "none". E.g. {"memory": "none", "open_files": "rlimit"}."""
        ...

    @property
    def oom_kills(self) -> int:
        """Processes in it that the kernel has killed at the memory limit so far; 0 where nobody counts."""
        ...

    @property
    def host_kills(self) -> int:
        """How many of its processes the kernel has killed because the machine, not the sandbox, was short of memory.
        0 where this is not counted. Results of such a sandbox must not be used."""
        ...

    @property
    def odd_kills(self) -> int:
        """How many commands of `exec` ended by SIGKILL, not counting timeouts and the memory limit. The sender was a
        process inside or one of the host: the status does not tell them apart."""
        ...

    @property
    def doorway(self) -> Doorway | None:
        """Its listening socket, if the spec asked for one and the runtime has them."""
        ...

    @property
    def end(self) -> SandboxEnd | None:
        """None while it lives."""
        ...

    async def ended(self) -> SandboxEnd:
        """Waits until it is no more."""
        ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float,
        cwd: str = WORKDIR,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Runs an argv, or a string by `sh -c`. Raises SandboxLost/SandboxEndedByPolicy if it is gone."""
        ...

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        fds: Mapping[int, int],
        tty: int | None = None,
        cwd: str = WORKDIR,
        env: Mapping[str, str] | None = None,
    ) -> Process:
        """Starts a process whose descriptor `k` is our `fds[k]` (0, 1, 2 must be given), and no other.

        With `tty` (one of our descriptors) it leads a new session with that terminal as its own.
        The caller still owns, and closes, its side.
        """
        ...

    async def read(self, path: str, *, limit_bytes: int) -> bytes:
        """A regular file, whole. FileNotFoundError, IsADirectoryError; ValueError beyond the limit or no file."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Writes a file whole, making the folders above it."""
        ...

    async def upload(self, source: Path, path: str) -> None:
        """A host file or folder to `path`."""
        ...

    async def download(self, path: str, target: Path, *, limit_bytes: int) -> Literal["file", "tar"]:
        """A file or folder to the host's `target`; a folder as a tar archive. ValueError beyond the limit."""
        ...

    async def unpack(self, archive: Path, path: str) -> None:
        """A tar archive that `download` made, into the folder `path`; the opposite of it."""
        ...

    def renew(self, lease_s: float) -> None:
        """Keeps it alive for that long from now, unless renewed again."""
        ...

    async def kill(self) -> None:
        """Ends it. See the invariants."""
        ...

    async def freeze(self, target: Path, *, without: Sequence[str] = ()) -> None:
        """Ends it, proven as by `kill`, and keeps what it wrote as the new folder `target`, below the runtime's
        `layer_root`: a layer for `SandboxSpec.layers`. What it changed below the paths `without` (absolute, its own
        names) is left out: there, the layers below show through again. Processes and tmpfs are not kept.
        """
        ...


class Runtime(Protocol):
    """Makes sandboxes of one kind. `async with` opens it (and sweeps what an earlier process left) and closes it."""

    name: ClassVar[str]
    is_isolated: ClassVar[bool]
    can_reach_out: ClassVar[bool]  # it holds a sandbox to `SandboxSpec.egress`; else such a one does not start
    image_kinds: ClassVar[tuple[ImageKind, ...]]  # those that it reads, the best first; empty: it has no images

    @property
    def layer_root(self) -> Path:
        """Where its layers lie; the caller's to fill and prune."""
        ...

    @property
    def waiting(self) -> int:
        """How many callers of `room` wait because the machine is short of memory or disk."""
        ...

    async def room(self) -> None:
        """Returns when the machine has memory and disk for one more sandbox."""
        ...

    async def start(self, spec: SandboxSpec, *, lease_s: float) -> Sandbox:
        """A running sandbox, or SandboxStartFailed. Cancelling it leaves nothing behind."""
        ...

    async def remove(self, paths: Sequence[Path]) -> bool:
        """Deletes folders below `layer_root`, whatever is in them and whoever owns it. False: something is left."""
        ...

    async def probe(self) -> Mapping[str, str]:
        """Tries itself for real: {"feature": "ok" | "what is wrong and how to mend it"}."""
        ...

    async def close(self) -> None:
        """Ends every sandbox that is left."""
        ...
