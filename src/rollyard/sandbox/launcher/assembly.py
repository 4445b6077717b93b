"""Starts one sandbox: assembles its root file system, runs bwrap or Apptainer on it, and becomes its init process.

Part of the launcher's program (`program.py`), with the same rules: nothing is imported from the package, and nothing at
all after entering a sandbox.
"""

# Descriptors and raw paths: pathlib would only be one more import.
# ruff: noqa: PTH101, PTH102, PTH108

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import socket
import stat
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING or __package__:
    from rollyard.sandbox.launcher import file_jobs as files
    from rollyard.sandbox.launcher import kernel
    from rollyard.sandbox.launcher.kernel import Message
    from rollyard.sandbox.launcher.sandbox_init import NamespacedSpace, ProcessSpace, SandboxInit
else:
    import file_jobs as files
    import kernel
    from kernel import Message
    from sandbox_init import NamespacedSpace, ProcessSpace, SandboxInit


def start(config: Message, kind: str, fds: list[int]) -> NoReturn:
    """Runs in the fork server's child and becomes the init process. `step` names the failed step for the service."""
    kernel.reset_signals()
    for group in config["tasks"]:  # cgroup v1 checks the permissions of the process that opened the files
        os.write(group, b"0")
    kernel.place({3: fds[0], 4: fds[1], 5: fds[2]})
    kernel.close_from(6)
    for fd in (3, 4, 5):
        os.set_inheritable(fd, False)
    ctl, lifeline, gate, step = socket.socket(fileno=3), 4, socket.socket(fileno=5), "launcher"
    try:
        go, trees = kernel.receive(gate)
        gate.close()
        if go is None:
            os._exit(1)  # the fork server failed and has reported it, or has ended
        refused = base64.b64decode(config.get("seccomp", ""))
        announce(ctl, go["pid"])
        wake = kernel.watch_children()
        if kind == "local":
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            os.setsid()
            world = ProcessSpace()
        else:
            step = "user"
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            step = "mounts"
            kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
            step = "loopback"
            kernel.bring_lo_up()
            step = "doorway"
            open_listeners(ctl, config)
            step = "stage"
            set_stage(config["stage"], trees)
            step = "proc"
            if config["namespaces"] is not None:
                kernel.write_file("/proc/sys/user/max_user_namespaces", str(config["namespaces"]))
            kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
            step = "overlay"
            vital = make_root(config["stage"], config["root"]) if config["root"] else ()
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # processes inside cannot inspect children that are about to exec
            step = kind
            world, env = run_inner(config, kind, lifeline, vital)
            kernel.send(ctl, {"event": "env", "env": env})
        kernel.send(ctl, {"event": "ready"})
        sandbox_init = SandboxInit(ctl, lifeline, wake, world, refused)
        if kind == "bubblewrap":
            sandbox_init.listen()
        sandbox_init.serve()
    except BaseException as error:
        with contextlib.suppress(OSError):
            kernel.send(ctl, {"event": "failed", "step": step, "detail": str(error)})
    os._exit(1)


def announce(ctl: socket.socket, pid: int) -> None:
    """Sends the service this process's PID and pidfd, which proves its end."""
    pidfd = os.pidfd_open(os.getpid())
    kernel.send(ctl, {"event": "born", "pid": pid}, [pidfd])
    os.close(pidfd)


def open_listeners(ctl: socket.socket, config: Message) -> None:
    """Opens the listeners of the doorway and the egress proxy, if requested (a port each). Called before any code of
    the sandbox can run, so that no process inside can take the port first."""
    for name in ("doorway", "egress"):
        if config[name]:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
                listener.bind(("127.0.0.1", config[name]))
                listener.listen(16)
                kernel.send(ctl, {"event": name}, [listener.fileno()])


def set_stage(stage: Message, trees: list[int]) -> None:
    """Mounts all host trees of the sandbox below one folder, under short names: the sandbox's user may not be able to
    reach their original paths, and those paths do not appear in any list of mounts."""
    at = stage["at"]
    opened = trees or [kernel.open_tree(path) for _, path, _ in stage["trees"]]
    kernel.mount("stage", at, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
    for (name, _, _), tree in zip(stage["trees"], opened, strict=True):
        target = f"{at}/{name}"
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        kernel.move_mount(tree, target)
        os.close(tree)


def make_root(stage: Message, root: Message) -> tuple[int, ...]:
    """Mounts image, layers and the sandbox's own files as STAGE/root. Returns the processes that it depends on."""
    at, vital = stage["at"], ()
    if sif := root.get("sif"):
        os.mkdir(f"{at}/image")
        vital = (mount_sif(sif, f"{at}/sif", f"{at}/image"),)
    os.mkdir(f"{at}/root")
    lowers = ":".join(f"{at}/{name}" for name in root["lowers"])
    options = f"lowerdir={lowers},upperdir={at}/own/upper,workdir={at}/own/work,userxattr"
    kernel.mount("overlay", f"{at}/root", "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for path, mode in root["make"]:
        make_place(f"{at}/root", path, mode)
    return vital


def make_place(root: str, path: str, mode: int) -> None:
    """Creates a folder (or, for mode 0, a file) as a mount point. A link in its path could lead out, so it is
    replaced."""
    here = root
    *above, last = path.strip("/").split("/")
    for name in above:
        here = f"{here}/{name}"
        make_folder(here, 0o755)
    here = f"{here}/{last}"
    if mode:
        make_folder(here, mode)
        return
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISREG(os.lstat(here).st_mode):
            return
        os.unlink(here)
    os.close(os.open(here, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


def make_folder(path: str, mode: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            return
        os.unlink(path)
    os.mkdir(path)
    os.chmod(path, mode)


def mount_sif(sif: Message, image: str, target: str) -> int:
    """Mounts a SIF file and returns squashfuse's PID. It goes to the background once it has mounted, and PID 1, this
    process, becomes its parent."""
    stderr, stderr_in = os.pipe2(os.O_CLOEXEC)
    options = f"offset={sif['offset']},ro,nosuid,nodev"
    argv = ["squashfuse", "-o", options, image, target]
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    file_actions = [(os.POSIX_SPAWN_DUP2, fd, slot) for slot, fd in enumerate((null, null, stderr_in))]
    env = {"PATH": "/usr/bin:/bin"}
    pid = os.posix_spawn(sif["program"], argv, env, file_actions=file_actions, setsigdef=kernel.DEFAULTED)
    os.close(stderr_in)
    os.close(null)
    _, status = os.waitpid(pid, 0)
    message = os.read(stderr, 4096).decode("utf-8", "replace").strip() if status else ""
    os.close(stderr)
    if status:
        raise OSError(f"squashfuse: {message or status}")
    return next(child for child, (parent, _) in kernel.running_processes().items() if parent == 1)


def run_inner(
    config: Message, kind: str, lifeline: int, vital: tuple[int, ...]
) -> tuple[NamespacedSpace, dict[str, str]]:
    """Starts bwrap or Apptainer with an idle `cat` inside, whose echo proves that the sandbox is ready."""
    (echo_in, echo), (echoed, echoed_in), (info, info_in), (stderr, stderr_in) = (
        os.pipe2(os.O_CLOEXEC) for _ in "1234"
    )
    os.write(echo, b".")
    passed_fds, argv = [echo_in, echoed_in, stderr_in], config["argv"]
    if kind == "bubblewrap":
        arguments = os.memfd_create("arguments", os.MFD_CLOEXEC)  # keeps them out of `ps`
        files.write_all(arguments, b"".join(os.fsencode(word) + b"\0" for word in argv))
        os.lseek(arguments, 0, os.SEEK_SET)
        passed_fds += [info_in, arguments]
        argv = ["bwrap", "--info-fd", "3", "--args", "4"]
        if config["seccomp"]:  # for the idle program too, since it is a file of the image
            refused = os.memfd_create("seccomp", os.MFD_CLOEXEC)
            files.write_all(refused, base64.b64decode(config["seccomp"]))
            os.lseek(refused, 0, os.SEEK_SET)
            passed_fds.append(refused)
            argv += ["--seccomp", "5"]
        argv += ["--", "cat"]
    # All source descriptors are above 4, and only the last target is 5: none is overwritten before it is used.
    actions = [(os.POSIX_SPAWN_DUP2, fd, slot) for slot, fd in enumerate(passed_fds)]
    idle = os.posix_spawn(config["program"], argv, config["env"], file_actions=actions, setsigdef=kernel.DEFAULTED)
    for fd in {*passed_fds, info_in}:
        os.close(fd)
    if lifeline in select.select([echoed, lifeline], [], [])[0]:
        os._exit(1)
    if os.read(echoed, 1) != b".":
        raise OSError(os.read(stderr, 4096).decode("utf-8", "replace").strip() or "it ended at once")
    if kind == "bubblewrap":
        first = json.loads(os.read(info, 4096))["child-pid"]
        # bwrap's own process would only forward how PID 1 inside ended, with 137 both if it was killed from outside and
        # if its idle process was killed inside. As a child of this process, PID 1 reports its own status.
        os.kill(idle, signal.SIGKILL)
        os.waitpid(idle, 0)
        world = NamespacedSpace((first, *vital), first)
        env: dict[str, str] = {}
    else:
        pid = innermost_process(idle)
        world, env = NamespacedSpace((idle, *vital), pid), environment(pid)
        shut(world, config["shm_bytes"])
    for fd in (echoed, info, stderr):  # `echo` stays open: at EOF the idle process would end
        os.close(fd)
    return world, env


def innermost_process(root: int) -> int:
    """Returns the idle process: the one below `root` that is deepest in PID namespaces, and there the youngest."""
    candidates: list[tuple[int, int, int]] = []
    for pid in kernel.descendants({root}, kernel.running_processes()):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
            numbers = next(line for line in status if line.startswith("NSpid:")).split()[1:]
            candidates.append((len(numbers), int(numbers[-1]), pid))
    if not candidates:
        raise OSError("it has no process inside")
    return max(candidates)[2]


def environment(pid: int) -> dict[str, str]:
    """Returns the variables that the image sets, as Apptainer's start-up scripts left them."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        words = file.read(1 << 20).split(b"\0")
    return {os.fsdecode(key): os.fsdecode(value) for key, equals, value in (w.partition(b"=") for w in words) if equals}


def shut(world: NamespacedSpace, shm_bytes: int) -> None:
    """Restricts what Apptainer leaves open: /proc and /dev are writable; /dev/shm, and the tmpfs of the file mounted as
    /etc/resolv.conf, may each take half of the memory; and /proc/keys lists the user's keys."""
    error_out, error_in = os.pipe2(os.O_CLOEXEC)
    pid = world.fork_unseen()
    if pid == 0:
        try:
            world.enter_mounts()
            socket.sethostname("sandbox")
            again = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID
            for path in ("/proc/keys", "/proc/key-users"):
                with contextlib.suppress(FileNotFoundError):  # a kernel without keys
                    kernel.mount("/dev/null", path, "", kernel.MS_BIND)
            with open("/proc/1/mounts", "rb") as file:
                mounts = [os.fsdecode(line).split(" ") for line in file]
            for _, at, kind, options, *_ in mounts:
                if kind == "tmpfs" and options.split(",")[0] == "rw" and at != "/dev/shm":
                    kernel.mount("none", at, "", again | kernel.MS_NODEV * (at != "/dev"))
            kernel.mount("none", "/proc", "", again | kernel.MS_NODEV)
            kernel.mount("none", "/dev", "", again)
            flags = kernel.MS_REMOUNT | kernel.MS_NOSUID | kernel.MS_NODEV
            kernel.mount("tmpfs", "/dev/shm", "tmpfs", flags, f"size={shm_bytes}")
        except OSError as error:
            os.write(error_in, str(error).encode()[:500])
        finally:
            os._exit(0)
    os.close(error_in)
    os.waitpid(pid, 0)
    trouble = os.read(error_out, 500).decode("utf-8", "replace")
    os.close(error_out)
    if trouble:
        raise OSError(f"restricting Apptainer's mounts failed: {trouble}")
