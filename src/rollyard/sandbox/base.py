"""The interface of this package: a `Runtime` starts `Sandbox`es; a sandbox runs commands isolated from the host.

Invariants, checked for every runtime by `rollyard.testing.sandbox_conformance`:
- `exec` runs a new process with a clean environment. Its status comes from the launcher's waitpid, so no process
  inside can forge it. Output is capped; the bytes dropped are counted.
- When `kill()` returns, no process of the sandbox is left (the pidfd of its PID 1 is readable). If this cannot be
  confirmed within a time limit, it raises `SandboxStuck`. It is idempotent.
- A sandbox ends with its service: PID 1 holds a lifeline pipe whose only write end is the service's.
- A sandbox lives while its lease is renewed. No timer inside it ends it.
- A limit is enforced by the mechanism that `limits_in_force` names. A limit that ends the sandbox is the reason of
  its `SandboxEnd`.
- The doorway, if requested, listens before any command runs inside. So does the egress proxy; without `egress`, an
  isolated sandbox has no network.
- `freeze` ends a sandbox as `kill` does and keeps the files that it wrote as a layer for any number of sandboxes.
- Paths are paths inside the sandbox. File calls never follow a link out of it.
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
"""The folder of the agent's files in every sandbox."""

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Statuses of a command that SIGKILL ended: its own, and the one that a shell reports for its child."""

CONTROL_DIR = "/.rollyard"
"""The read-only path, inside a sandbox, of the folder to which the host writes commands."""


@dataclass(frozen=True, slots=True)
class Bind:
    """A host path that is mounted inside a sandbox."""

    host: Path
    inside: str
    is_read_only: bool = True


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """None is the runtime's default. `Sandbox.limits_in_force` reports which limits are enforced, and how."""

    memory_bytes: int | None = None
    processes: int | None = None
    disk_bytes: int | None = None
    open_files: int | None = None
    cpus: float | None = None
    files: int | None = None  # created inside; folders and links count too


ImageKind = Literal["folder", "sif"]
"""An unpacked root folder, or a SIF file."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Describes a sandbox to start. `image` is of a kind that the runtime reads; None is the host's /usr, read-only."""

    image: str | None = None
    workdir: str = WORKDIR  # where agents and checks start: WORKDIR or a folder of the image
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    binds: tuple[Bind, ...] = ()
    layers: tuple[Path, ...] = ()  # made by `freeze`, topmost first; mounted read-only below the sandbox's own files
    has_doorway: bool = False
    egress: Egress | None = None  # the hosts that it may reach; None: it is offline
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    owner: str = ""  # rollout id, for logs and for the sweep


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command. `status` is the exit status, or −signal as in `subprocess`."""

    status: int
    stdout: bytes
    stderr: bytes
    duration_s: float
    is_timed_out: bool = False  # it and its children were killed at the deadline
    dropped_bytes: int = 0  # output beyond the cap
    is_out_of_memory: bool = False  # the kernel killed it, or its child, at the sandbox's memory limit


@dataclass(frozen=True, slots=True)
class SandboxEnd:
    """Why a sandbox ended."""

    reason: Literal["killed", "ended_inside", "lost", "lease", "memory", "processes", "disk", "files"]
    detail: str = ""


class Process(Protocol):
    """A process started by `spawn`."""

    @property
    def pid(self) -> int:
        """The host's number, for /proc only: signals are sent through a pidfd."""
        ...

    async def wait(self) -> int:
        """Returns its exit status (−signal if a signal ended it). May be awaited more than once."""
        ...

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        """Signals it and its process group; does nothing if it has ended."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """A place in which commands run isolated from the host; the module's docstring has its invariants. A call after its
    end raises the failure of the cause: SandboxLost, or a PolicyFailure."""

    @property
    def id(self) -> str:
        """The sandbox's id, unique on this machine."""
        ...

    @property
    def spec(self) -> SandboxSpec:
        """The specification that it was started with."""
        ...

    @property
    def control_dir(self) -> Path:
        """The host's path of CONTROL_DIR, on tmpfs. The sandbox can read it but not write it."""
        ...

    @property
    def control_path(self) -> str:
        """The path of the same folder inside the sandbox: CONTROL_DIR, or the host's path if nothing is mounted."""
        ...

    @property
    def limits_in_force(self) -> Mapping[str, str]:
        """For each limit, the mechanism that enforces it, or "none": {"memory": "none", "open_files": "rlimit"}."""
        ...

    @property
    def oom_kills(self) -> int:
        """How many of its processes the kernel has killed at the memory limit; 0 where this is not counted."""
        ...

    @property
    def host_kills(self) -> int:
        """How many of its processes the kernel has killed because the machine, not the sandbox, was short of memory.
        0 where this is not counted. Results of such a sandbox must not be used."""
        ...

    @property
    def odd_kills(self) -> int:
        """How many commands of `exec` ended by SIGKILL, not counting timeouts and the memory limit. The sender was a
        process inside or on the host: the status does not distinguish the two."""
        ...

    @property
    def doorway(self) -> Doorway | None:
        """Its doorway, if the spec requests one and the runtime supports it."""
        ...

    @property
    def end(self) -> SandboxEnd | None:
        """How it ended; None while it lives."""
        ...

    async def ended(self) -> SandboxEnd:
        """Waits until it has ended."""
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
        """Runs an argv, or a string by `sh -c`. Raises SandboxLost/SandboxEndedByPolicy if the sandbox has ended."""
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
        """Starts a process whose descriptor `k` is the caller's `fds[k]`; 0, 1 and 2 are required. It has no others.

        With `tty` (a descriptor of the caller) it leads a new session with that controlling terminal.
        The caller keeps its descriptors and closes them.
        """
        ...

    async def read(self, path: str, *, limit_bytes: int) -> bytes:
        """Returns a whole regular file. Raises FileNotFoundError or IsADirectoryError; ValueError if it is larger than
        the limit or not a regular file."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Writes a whole file and creates the folders above it. Raises OSError, or ValueError for a path through a
        link."""
        ...

    async def upload(self, source: Path, path: str) -> None:
        """Copies a host file or folder to `path`. Raises OSError or ValueError as `write` does."""
        ...

    async def download(self, path: str, target: Path, *, limit_bytes: int) -> Literal["file", "tar"]:
        """Copies a file or folder to the host's `target`; a folder as a tar archive. ValueError beyond the limit."""
        ...

    async def unpack(self, archive: Path, path: str, *, is_replaced: bool = False) -> None:
        """Unpacks a tar archive made by `download` into the folder `path`; with `is_replaced`, what the folder has
        before is deleted, but nothing of the host (a bind; without isolation, what is outside of WORKDIR). Raises
        OSError or ValueError as `write` does."""
        ...

    def renew(self, lease_s: float) -> None:
        """Extends its lease to `lease_s` from now."""
        ...

    async def kill(self) -> None:
        """Ends it, as the module's invariants describe."""
        ...

    async def freeze(self, target: Path, *, without: Sequence[str] = ()) -> None:
        """Ends it, confirmed as by `kill`, and keeps the files that it wrote as the new folder `target`, below the
        runtime's `layer_root`: a layer for `SandboxSpec.layers`. Changes below the paths `without` (absolute, inside
        the sandbox) are left out: there, the lower layers are visible again. Processes and tmpfs are not kept.
        """
        ...


class Runtime(Protocol):
    """Starts sandboxes of one kind. `async with` opens it, which removes leftovers of an earlier process, and closes
    it."""

    name: ClassVar[str]
    is_isolated: ClassVar[bool]
    can_reach_out: ClassVar[bool]  # it enforces `SandboxSpec.egress`; else a sandbox with egress does not start
    image_kinds: ClassVar[tuple[ImageKind, ...]]  # those that it reads, preferred first; empty: it has no images

    @property
    def layer_root(self) -> Path:
        """The folder of its layers; the caller fills and prunes it."""
        ...

    @property
    def waiting(self) -> int:
        """How many callers of `room` wait because the machine is short of memory or disk."""
        ...

    async def room(self) -> None:
        """Returns when the machine has memory and disk for one more sandbox."""
        ...

    async def start(self, spec: SandboxSpec, *, lease_s: float) -> Sandbox:
        """Returns a running sandbox, or raises SandboxStartFailed. If cancelled, it leaves nothing behind."""
        ...

    async def remove(self, paths: Sequence[Path]) -> bool:
        """Deletes folders below `layer_root`, whatever their contents and owners. False: something is left."""
        ...

    async def probe(self) -> Mapping[str, str]:
        """Tests each feature on this machine: {"feature": "ok" | "what is wrong and how to fix it"}."""
        ...

    async def close(self) -> None:
        """Ends all remaining sandboxes."""
        ...
