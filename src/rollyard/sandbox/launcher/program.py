"""The parent of every sandbox: a program of its own, run as `python -I -S program.py FD KIND`.

    service ──socket──▶ fork server ─clone─▶ init process (PID 1 of the sandbox's own namespaces)
       │                                    ├── bwrap or apptainer ── its init ── an idle process
       ├──────── one socket per sandbox ───▶├── exec'd commands (directly in the inner namespaces)
       └──────── lifeline (pipe) ──────────▶├── file jobs (in its mounts, not in its PID namespace)
                                            └── squashfuse, for a SIF image

The fork server is a loaded Python that clones itself, so that a start costs the service one message. It does what
requires its own user (folders, the record, cgroups, and, for a service run as root, mounts that show root's files as
the sandbox's own), and then releases the init process. The init process switches to the sandbox's user, opens the
doorway, assembles the root file system (image, layers, overlay), runs bwrap or Apptainer on it, and serves one sandbox
until it ends. With KIND `local` there are no namespaces: the init process is a subreaper and kills its descendants one
by one. With KIND `container` this program is PID 1 of a container, run by the portable Python that is bound into it,
and is its init process.

Measured on two busy x86-64 cores with bubblewrap 0.8 (medians): 8 to 11 ms from the request to a ready sandbox, 3.5 ms
for a command's status; 0.6 ms of the service's CPU for a start and 0.4 for a kill; 6 ms of CPU for both in all other
processes together. 200 at once: 1.8 s. Loading a Python for each sandbox would add 70 ms.

Invariants. EOF on the lifeline, whose only write end is the service's, ends the init process, and the kernel ends all
processes below it; so does EOF on its socket. The init process's pidfd, sent before any code of the sandbox runs, is
readable only when everything in the sandbox is dead. No process here holds a descriptor of another sandbox; all are
CLOEXEC, and the child renumbers its own, so that numbers cannot collide. Processes inside have no capability, no way to
get one, and only the descriptors that the service passed. A status comes from waitpid, never from inside.

The init process is in `sandbox_init.py`, its start in `assembly.py`. These files are one program. It imports nothing
from the package (it starts before, and outlives, any import), and *nothing at all* after entering a sandbox, whose
files are not trusted: hence all imports are at the top.
"""

# Descriptors and raw paths: pathlib would only be one more import.
# ruff: noqa: PTH100, PTH101, PTH102, PTH106, PTH110, PTH114, PTH116, PTH120

from __future__ import annotations

import base64
import contextlib
import gc
import json
import os
import select
import socket
import stat
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING or __package__:
    from rollyard.sandbox.launcher import kernel
    from rollyard.sandbox.launcher.assembly import announce, environment, make_place, open_listeners, start
    from rollyard.sandbox.launcher.kernel import Message
    from rollyard.sandbox.launcher.sandbox_init import ContainerSpace, SandboxInit
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import kernel
    from assembly import announce, environment, make_place, open_listeners, start
    from kernel import Message
    from sandbox_init import ContainerSpace, SandboxInit

AS_IT_IS, MUST_MAP, MAY_MAP = 0, 1, 2  # whether a tree must, or should if possible, belong to the sandbox's user


class Removal:
    """Runs `rm -rf` as a process, since it handles overlay work folders and deep trees; if permissions forbid it, runs
    chmod and retries. None of them follows a link."""

    STEPS = (("rm", "-rf"), ("chmod", "-R", "u+rwX"), ("rm", "-rf"))

    def __init__(self, paths: list[str], answer: int) -> None:
        self.paths, self.answer, self.step = paths, answer, 0
        for path in paths:
            with contextlib.suppress(OSError):  # usually there are few files, and no process is needed
                remove_small(path)

    def next_step(self) -> int | None:
        """Starts the next step and returns its PID, or sends the answer and returns None."""
        self.paths = [path for path in self.paths if os.path.lexists(path)]
        while self.paths and self.step < len(self.STEPS):
            name, *options = self.STEPS[self.step]
            self.step += 1
            program = f"/bin/{name}" if os.path.exists(f"/bin/{name}") else f"/usr/bin/{name}"
            # chmod follows a link that is its argument.
            paths = [path for path in self.paths if name != "chmod" or not os.path.islink(path)]
            if not paths:
                continue
            with contextlib.suppress(OSError):
                return os.posix_spawn(program, [name, *options, "--", *paths], {}, setsigdef=kernel.DEFAULTED)
        with contextlib.suppress(OSError):
            os.write(self.answer, b"1" if self.paths else b"0")
        os.close(self.answer)
        return None


def remove_small(path: str, depth: int = 0, above: int | None = None) -> None:
    """Removes a file, a link, or a few folders and files; raises OSError if there are more. The path is of a sandbox's
    files: what is a link there, even the path itself, may lead to any folder of the host, and is never followed."""
    if not stat.S_ISDIR(os.stat(path, dir_fd=above, follow_symlinks=False).st_mode):
        os.unlink(path, dir_fd=above)
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        with os.scandir(folder) as entries:  # not all of them: a sandbox may have left a million
            names = [entry.name for _, entry in zip(range(17), entries, strict=False)]
        if len(names) > 16 or depth > 4:
            raise OSError("too many entries")
        for name in names:
            remove_small(name, depth + 1, folder)
    finally:
        os.close(folder)
    os.rmdir(path, dir_fd=above)


GROUP_MS = 50


def make_group(cgroup: Message | None, fds: list[int]) -> list[int]:
    """Creates the sandbox's cgroup and returns descriptors: of its folder, to start in (v2), or of its tasks files, to
    enter (v1). They are added to `fds`, which the fork server closes."""
    opened: list[int] = []
    for folder, settings in cgroup["make"] if cgroup else ():
        os.mkdir(folder)
        for file, value, is_optional in settings:
            try:
                kernel.write_file(f"{folder}/{file}", value)
            except (FileNotFoundError, PermissionError):  # EPERM: the file does not exist and cannot be created there
                if not is_optional:
                    raise
        is_v2 = cgroup is not None and cgroup["is_v2"]
        path, flags = (folder, os.O_RDONLY | os.O_DIRECTORY) if is_v2 else (f"{folder}/tasks", os.O_WRONLY)
        opened.append(os.open(path, flags | os.O_CLOEXEC))
        fds.append(opened[-1])
    return opened


def is_removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


class ForkServer:
    def __init__(self, sock: socket.socket, kind: str) -> None:
        self.sock, self.kind, self.wake = sock, kind, kernel.watch_children()
        self.owner = os.geteuid(), os.getegid()
        spaces = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
        self.flags = 0 if kind == "local" else spaces
        self.inits: set[int] = set()
        self.removals: dict[int, Removal] = {}
        self.groups: list[str] = []  # to be removed once the kernel has emptied them, which may take a moment

    def serve(self) -> NoReturn:
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        poller.register(self.wake, select.POLLIN)
        while True:
            self.groups = [folder for folder in self.groups if not is_removed(folder)]
            for fd, _ in poller.poll(GROUP_MS if self.groups else None):
                if fd == self.wake:
                    for pid, status in kernel.reaped(self.wake):
                        self.on_end(pid, status)
                    continue
                message, fds = kernel.receive(self.sock)
                if message is None:  # the service has ended; the init processes detect it too
                    self.groups = [folder for folder in self.groups if not is_removed(folder)]
                    os._exit(0)
                if message["op"] == "remove":
                    self.groups += message["groups"]
                    self.remove(Removal(message["paths"], fds[0]))
                else:
                    self.start(message, fds)

    def start(self, message: Message, fds: list[int]) -> None:
        gate, init_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        step, pid = "folders", 0
        try:
            for folder, mode in message["folders"]:
                os.mkdir(folder)
                os.chmod(folder, mode)
            step = "cgroup"
            groups = make_group(message.get("cgroup"), fds)
            step = "namespaces"
            is_v2 = bool(groups) and message["cgroup"]["is_v2"]
            pid = kernel.clone_into(self.flags, groups[0]) if is_v2 else kernel.clone(self.flags)
            if pid == 0:
                gate.close()
                try:
                    message["tasks"] = [] if is_v2 else groups
                    start(message, self.kind, [fds[0], fds[1], init_end.fileno()])
                finally:
                    os._exit(1)
            self.inits.add(pid)
            self.release(pid, message, gate)
        except OSError as error:
            step = getattr(error, "step", step)
            with socket.socket(fileno=os.dup(fds[0])) as ctl, contextlib.suppress(OSError):
                kernel.send(ctl, {"event": "failed", "step": step, "detail": str(error)})
        finally:
            gate.close()
            init_end.close()
            for fd in fds:
                os.close(fd)

    def release(self, pid: int, message: Message, gate: socket.socket) -> None:
        """Does what only the fork server's user may do for the init process, then lets it continue."""
        here, trees = f"/proc/{pid}", []
        with step_of("namespaces"):
            if self.kind != "local":
                uid, gid = (message["user"],) * 2 if message["user"] is not None else self.owner
                kernel.write_file(f"{here}/setgroups", "deny")
                kernel.write_file(f"{here}/uid_map", f"0 {uid} 1")
                kernel.write_file(f"{here}/gid_map", f"0 {gid} 1")
        with step_of("record"), open(f"{here}/stat", "rb") as file:
            start_time = file.read().rpartition(b")")[2].split()[19].decode()
            inode = os.stat(f"{here}/ns/pid").st_ino
            record = {"pid": pid, "start_time": start_time, "pid_namespace": inode}
            kernel.write_file(message["record"], json.dumps(record))
        try:
            with step_of("stage"):
                if self.kind != "local" and message["user"] is not None:
                    trees = self.trees(f"{here}/ns/user", message["stage"]["trees"])
            kernel.send(gate, {"pid": pid}, trees)
        finally:
            for tree in trees:
                os.close(tree)

    def trees(self, user_namespace: str, entries: list[tuple[str, str, int]]) -> list[int]:
        """Opens the trees for a sandbox that runs as another user, with an idmap that makes it their owner."""
        opened: list[int] = []
        mapping = os.open(user_namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for _, path, mode in entries:
                opened.append(tree := kernel.open_tree(path))
                try:
                    if mode:
                        kernel.idmap(tree, mapping)
                except OSError:
                    if mode == MUST_MAP:
                        raise
        except BaseException:
            for tree in opened:
                os.close(tree)
            raise
        finally:
            os.close(mapping)
        return opened

    def remove(self, removal: Removal) -> None:
        pid = removal.next_step()
        if pid is not None:
            self.removals[pid] = removal

    def on_end(self, pid: int, status: int) -> None:
        if removal := self.removals.pop(pid, None):
            self.remove(removal)
        elif pid in self.inits:
            self.inits.discard(pid)
            if status < 0 and self.kind == "local":  # it was killed; this subreaper has adopted its orphans
                kernel.kill_below(os.getpid(), spare=self.inits | self.removals.keys())


@contextlib.contextmanager
def step_of(name: str) -> Any:
    try:
        yield
    except OSError as error:
        error.step = name  # type: ignore[attr-defined]
        raise


def serve_container(path: str) -> NoReturn:
    """Serves a container as its PID 1. Receives its descriptors from the service's socket at `path`."""
    kernel.reset_signals()  # PID 1 ignores signals without a handler, and Python has one for SIGINT
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(path)
        config, fds = kernel.receive(sock)
    if config is None:
        os._exit(1)
    ctl, lifeline, step = socket.socket(fileno=fds[0]), fds[1], "container"
    try:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        announce(ctl, 0)
        wake = kernel.watch_children()
        step = "doorway"
        open_listeners(ctl, config)
        step = "folders"
        with contextlib.suppress(PermissionError):
            os.chmod("/", 0o755)  # podman's is 0555, which without capabilities applies to root too
        for folder, mode in config["make"]:
            make_place("", folder, mode)
        kernel.send(ctl, {"event": "env", "env": environment(os.getpid())})
        kernel.send(ctl, {"event": "ready"})
        SandboxInit(ctl, lifeline, wake, ContainerSpace(), base64.b64decode(config["seccomp"])).serve()
    except BaseException as error:
        with contextlib.suppress(OSError):
            kernel.send(ctl, {"event": "failed", "step": step, "detail": str(error)})
    os._exit(1)


def main() -> NoReturn:
    if sys.argv[2] == "container":
        serve_container(sys.argv[1])
    sock, kind = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    sock.set_inheritable(False)
    os.chdir("/")  # the sandboxes' users may not have access to the service's folder, and Apptainer would enter it
    if os.geteuid() == 0:
        os.setgroups([])
    if kind == "local":
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()  # clones keep sharing these pages
    gc.disable()
    ForkServer(sock, kind).serve()


if __name__ == "__main__":
    main()
