"""Checks of `rollyard doctor` inside a sandbox: tries every isolation feature and limit, with a program that attempts
to break it.

Two sandboxes per runtime. In the first, a script tries each feature and prints the results; the portable Python runs
it, so that any image works. The files of that sandbox become a layer of the second, which then exceeds its memory
limit. The checks report what happened; `limits_in_force` only names the mechanism.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from rollyard.cli.doctor.check import DELEGATE, DoctorCheck, State
from rollyard.core import RollyardError
from rollyard.core.failure import MemoryLimit
from rollyard.sandbox import Bind, Sandbox, SandboxLimits, SandboxSpec
from rollyard.sandbox.launched_sandbox import LaunchedSandbox
from rollyard.sandbox.launcher.seccomp import REFUSED
from rollyard.sandbox.python import INSIDE, PortablePython
from rollyard.service.runtimes import AnyRuntime

LIMITS = SandboxLimits(memory_bytes=96 << 20, processes=64, open_files=512, cpus=0.5)
COMMAND_S, LEASE_S = 30.0, 120.0
FORKS = 160

SCRIPT = r"""
import ctypes, errno, json, os, resource, signal, socket, sys, time, urllib.request
keyctl, url, forks = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
def refused(call, *words):
    ctypes.set_errno(0)
    return call(*words) == -1 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS, errno.ENOSPC)
def is_routed():
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
        return True
    except OSError:
        return False
def answer():
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return opener.open(url, timeout=10).read().decode()
    except OSError as error:
        return str(error)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
found = {"mode": status["Seccomp"].strip(), "keyctl": refused(libc.syscall, keyctl, 0, -3, 0)}
found["capabilities"] = int(status["CapEff"], 16) | int(status["CapPrm"], 16)
found["privileges"] = status["NoNewPrivs"].strip() == "1"
found["namespaces"] = refused(libc.unshare, 0x10000000)
found["interfaces"] = sorted(name for _, name in socket.if_nameindex())
found["routed"] = is_routed()
found["doorway"] = answer() if url else None
found["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
began, used = time.monotonic(), time.process_time()
while time.monotonic() - began < 0.4:
    pass
found["cpus"] = (time.process_time() - used) / (time.monotonic() - began)
children, found["forked"] = [], True
try:
    for _ in range(forks):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        children.append(pid)
except OSError:
    found["forked"] = False
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print(json.dumps(found))
"""

MEMORY_SCRIPT = """
import time
held = [b"x" * (8 << 20) for _ in range(40)]
time.sleep(3)  # a watchdog needs a moment
"""


async def look_inside(runtime: AnyRuntime, python: PortablePython, worst: State) -> list[DoctorCheck]:
    """Raises `RollyardError` if a sandbox of the runtime does not start."""
    folder = runtime.layer_root / "doctor"
    folder.mkdir()
    binds = (Bind(python.folder, INSIDE),)
    layer = folder / "files"
    try:
        sandbox = await runtime.start(
            SandboxSpec(binds=binds, has_doorway=True, limits=LIMITS, owner="doctor"), lease_s=LEASE_S
        )
        try:
            checks = list(_judged(await _probe_results(sandbox, python), sandbox, worst))
            await sandbox.write("/workspace/doctor", b"a layer")
            await sandbox.freeze(layer)
        finally:
            await sandbox.kill()
        spec = SandboxSpec(binds=binds, layers=(layer,), limits=LIMITS, owner="doctor")
        checks += await _in_a_fork(runtime, spec, python, worst)
    finally:
        await runtime.remove([layer, folder])
    return [DoctorCheck(f"{runtime.name}: {check.name}", check.state, check.detail, check.remedy) for check in checks]


async def _probe_results(sandbox: Sandbox, python: PortablePython) -> Mapping[str, Any]:
    url = ""
    if sandbox.doorway is not None:
        await sandbox.doorway.serve(_answer)
        url = sandbox.doorway.url
    column = 1 if os.uname().machine == "aarch64" else 0
    argv = [*python.argv, "-c", SCRIPT, str(REFUSED["keyctl"][column]), url, str(FORKS)]
    result = await sandbox.exec(argv, timeout_s=COMMAND_S, env=python.env)
    try:
        return json.loads(result.stdout)
    except ValueError:
        stderr_lines = result.stderr.decode(errors="replace").strip().splitlines() or [f"status {result.status}"]
        return {"trouble": stderr_lines[-1][:200]}


def _judged(results: Mapping[str, Any], sandbox: LaunchedSandbox, worst: State) -> Iterator[DoctorCheck]:
    if trouble := results.get("trouble"):
        yield DoctorCheck(
            "inside", worst, f"could not be checked: {trouble}", "run it again with ROLLYARD_LOG_LEVEL=debug"
        )
        return
    means = sandbox.limits_in_force
    newer = "update the kernel (5.11 or newer) and the runtime, and do not run inside another container's sandbox"

    def check(name: str, is_ok: bool, good: str, bad: str, remedy: str, state: State = worst) -> DoctorCheck:
        return DoctorCheck(name, "ok" if is_ok else state, good if is_ok else bad, "" if is_ok else remedy)

    is_filtered = results["mode"] == "2" and results["keyctl"]
    yield check(
        "seccomp", is_filtered, "a blocked system call was refused", "a system call that must be blocked was not", newer
    )
    is_bare = results["capabilities"] == 0 and results["privileges"]
    yield check(
        "capabilities", is_bare, "none, and none can be gained", f"{results['capabilities']:#x} are held", newer
    )
    yield check(
        "nested namespaces", results["namespaces"], "refused", "a user namespace could be created inside", newer
    )
    is_isolated = results["interfaces"] == ["lo"] and not results["routed"]
    network_detail = f"it has {', '.join(results['interfaces'])}{' and a route out' if results['routed'] else ''}"
    yield check("network", is_isolated, "only its own loopback", network_detail, newer)
    doorway_reply = str(results["doorway"])
    yield check("doorway", doorway_reply == "ok", "answers from inside", doorway_reply[:200], "see the service's log")
    yield _user(sandbox, worst)
    is_enforced = not results["forked"]
    yield check(
        "processes limit",
        is_enforced,
        f"enforced ({means.get('processes')})",
        f"{FORKS} could be started, but the limit is {LIMITS.processes}",
        DELEGATE,
        "warn",
    )
    is_slow = means.get("cpus") != "none" and results["cpus"] < 0.8
    yield check("cpu limit", is_slow, f"enforced ({means.get('cpus')})", "not enforced", DELEGATE, "warn")
    is_few = results["files"] == LIMITS.open_files
    lacks = f"{results['files']} instead of {LIMITS.open_files}"
    yield check(
        "open files limit", is_few, "enforced (rlimit)", lacks, "raise the hard limit: ulimit -Hn 65536", "warn"
    )


def _user(sandbox: LaunchedSandbox, worst: State) -> DoctorCheck:
    """Checks the host user of the sandbox's processes."""
    try:
        lines = Path(f"/proc/{sandbox.pid}/status").read_text().splitlines()
        uid = next(int(line.split()[1]) for line in lines if line.startswith("Uid:"))
    except (OSError, StopIteration):
        return DoctorCheck("user", worst, "its first process has ended", "run it again")
    if os.geteuid() != 0:
        return DoctorCheck("user", "ok", f"the service's own, uid {uid}, which is not root")
    if uid != 0:
        return DoctorCheck("user", "ok", f"unprivileged: uid {uid} on the host")
    remedy = 'sandbox_uids = "200000-265535" (Linux 5.19 or newer), or run the service as an ordinary user'
    return DoctorCheck("user", worst, "root of the host, without capabilities", remedy)


async def _in_a_fork(runtime: AnyRuntime, spec: SandboxSpec, python: PortablePython, worst: State) -> list[DoctorCheck]:
    name, advice = "layers", "set data_dir to a local disk (ext4 or xfs), not on an overlay or a network file system"
    try:
        fork = await runtime.start(spec, lease_s=LEASE_S)
    except RollyardError as error:
        detail, _, remedy = error.detail.partition("; ")
        return [DoctorCheck(name, worst, detail, remedy or advice)]
    try:
        content = await fork.read("/workspace/doctor", limit_bytes=100)
        has_layer = content == b"a layer"
        finding = "a fork reads its set-up" if has_layer else "a fork does not contain the files of its set-up"
        layers = DoctorCheck(name, "ok" if has_layer else worst, finding, "" if has_layer else advice)
        return [layers, await _memory(fork, python)]
    except (OSError, ValueError) as error:
        return [DoctorCheck(name, worst, f"a fork does not read its set-up: {error}", advice)]
    finally:
        await fork.kill()


async def _memory(sandbox: LaunchedSandbox, python: PortablePython) -> DoctorCheck:
    means = sandbox.limits_in_force.get("memory", "none")
    name, most = "memory limit", f"{(LIMITS.memory_bytes or 0) >> 20} MiB"
    try:
        result = await sandbox.exec([*python.argv, "-c", MEMORY_SCRIPT], timeout_s=COMMAND_S, env=python.env)
    except MemoryLimit:
        return DoctorCheck(
            name, "warn", f"a sandbox beyond {most} is ended by Rollyard's {means}, not by the kernel", DELEGATE
        )
    except RollyardError as error:
        return DoctorCheck(name, "warn", f"the sandbox was lost in the check: {error.detail}", DELEGATE)
    if result.status == 0:
        return DoctorCheck(name, "warn", f"not enforced: the limit is {most}, and 320 MiB were allocated", DELEGATE)
    if result.status == -9:
        return DoctorCheck(name, "ok", f"enforced ({means})")
    stderr_lines = result.stderr.decode(errors="replace").strip().splitlines() or [f"status {result.status}"]
    return DoctorCheck(name, "warn", f"could not be checked: {stderr_lines[-1][:200]}", DELEGATE)


async def _answer(
    scope: MutableMapping[str, Any],
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})
