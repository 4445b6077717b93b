"""Makes each refused call, by number and as another architecture, and runs programs that must still work."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rollyard.sandbox.launcher import kernel, seccomp

EPERM, ENOSYS = seccomp.EPERM, seccomp.ENOSYS
COLUMN = 0 if os.uname().machine == "x86_64" else 1
MEMFD_KINDS = pytest.mark.parametrize("refuse_memfd", [False, True])

PRELUDE = """
import ctypes, importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    # Returns a result or -errno. Pointers of 1 are invalid: a call that is not refused does no harm.
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_ulong(argument) for argument in arguments))
    return -ctypes.get_errno() if result == -1 else result

def filtered():
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    kernel.refuse_calls(bytes.fromhex(sys.argv[2]))
"""


def run(body: str, *, is_filtered: bool = True, refuse_memfd: bool = True) -> dict[str, int]:
    """Runs `body` in its own process and returns what it stored in `found`."""
    source = PRELUDE + ("filtered()\n" if is_filtered else "") + "found = {}\n" + textwrap.dedent(body)
    program = seccomp.program(refuse_memfd=refuse_memfd).hex()
    completed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source + "\nprint(json.dumps(found))", kernel.__file__, program],
        capture_output=True,
        timeout=30,
    )
    assert completed.returncode == 0, completed.stderr.decode()
    return json.loads(completed.stdout)


def by_number(names: dict[str, tuple[int, int]]) -> str:
    numbers = {name: pair[COLUMN] for name, pair in names.items()}
    return f"for name, number in {numbers!r}.items(): found[name] = call(number, 1, 1, 1, 1, 1, 1)"


def test_every_listed_call_is_refused():
    assert set(run(by_number(seccomp.REFUSED)).values()) == {-EPERM}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make these calls without the filter")
def test_without_the_filter_they_are_not_refused():
    results = run(by_number(seccomp.REFUSED | seccomp.UNSEEN_MEMORY), is_filtered=False)
    assert [name for name, result in results.items() if result == -EPERM] == []


@MEMFD_KINDS
def test_unmeasurable_memory_is_refused_only_if_the_monitor_enforces_memory(refuse_memfd: bool):
    results = run(by_number(seccomp.UNSEEN_MEMORY), refuse_memfd=refuse_memfd)
    assert {result == -EPERM for result in results.values()} == {refuse_memfd}


def test_the_filter_is_inherited_through_exec():
    code = "import os, sys\ntry: os.memfd_create('x')\nexcept PermissionError: sys.exit(7)"
    results = run(f"import subprocess; found['status'] = subprocess.run([sys.executable, '-c', {code!r}]).returncode")
    assert results == {"status": 7}


def test_no_namespace_can_be_made_by_clone_or_unshare():
    body = f"""
    for bit in (7, 17, 25, 26, 27, 28, 29, 30):  # NEWTIME, NEWNS, NEWCGROUP … NEWNET
        found[f"unshare {{bit}}"] = call({seccomp.UNSHARE[COLUMN]}, 1 << bit)
        found[f"unshare {{bit}} with high bits"] = call({seccomp.UNSHARE[COLUMN]}, (1 << 40) | 1 << bit)
        if bit != 7:
            found[f"clone {{bit}}"] = call({seccomp.CLONE[COLUMN]}, 17 | 1 << bit, 0, 0, 0, 0)
    """
    results = run(body)
    assert len(results) == 23
    assert set(results.values()) == {-EPERM}


def test_unshare_of_files_is_still_allowed():
    assert run(f"found['files'] = call({seccomp.UNSHARE[COLUMN]}, 0x400)") == {"files": 0}


def test_clone3_returns_enosys():
    assert run(f"found['clone3'] = call({seccomp.CLONE3[COLUMN]}, 1, 88)") == {"clone3": -ENOSYS}


def test_a_terminal_cannot_be_typed_into():
    body = f"""
    import pty
    master, slave = pty.openpty()
    byte = ctypes.create_string_buffer(b"x")
    for name, request in (("TIOCSTI", {seccomp.TIOCSTI}), ("TIOCLINUX", {seccomp.TIOCLINUX})):
        for high in (0, 1 << 32):
            found[f"{{name}} {{high}}"] = call({seccomp.IOCTL[COLUMN]}, slave, high | request, ctypes.addressof(byte))
    found["TIOCGPGRP"] = call({seccomp.IOCTL[COLUMN]}, slave, 0x540F, 1)
    """
    results = run(body)
    assert results.pop("TIOCGPGRP") != -EPERM
    assert len(results) == 4
    assert set(results.values()) == {-EPERM}


def test_sockets_outside_network_namespaces_are_refused():
    body = f"""
    for family in (1, 2, 10, 16, 40, 42):
        found[family] = call({seccomp.SOCKET[COLUMN]}, family, 3 if family == 16 else 1, 0)
    """
    results = run(body)
    assert {family for family, result in results.items() if result == -EPERM} == {"40", "42"}
    assert results["1"] > 0 and results["2"] > 0 and results["16"] > 0


def test_calls_of_other_architectures_are_refused():
    """getpid by x32's number, and by i386's interrupt 0x80 (a crash if the kernel does not support it). ARM has
    neither: there, such numbers are only checked not to be calls."""
    body = """
    found["x32"] = call(0x40000000 + 39)
    found["x32 mount"] = call(0x40000000 + 165, 1, 1, 1, 1, 1)
    """
    if COLUMN != 0:
        assert all(result < 0 for result in run(body).values())
        return
    body += """
    import mmap
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20; int 0x80; ret
    pid = os.fork()
    if pid == 0:
        getpid = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
        os._exit(0 if getpid() == -1 else 9)
    found["i386"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    """
    results = run(body)
    assert results["x32"] == results["x32 mount"] == -EPERM
    assert results["i386"] in (0, -11)


def filtered_run(argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    source = PRELUDE + "filtered()\nos.execvp(sys.argv[3], sys.argv[3:])"
    program = seccomp.program(refuse_memfd=True).hex()
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", source, kernel.__file__, program, *argv],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=50,
    )


ORDINARY = {
    "bash": ["bash", "-c", "x=$(echo a | tr a b; (sleep 0 & wait)); echo $x > f; cat < f; mkdir -p d/e; rm -r d"],
    "python": [
        sys.executable,
        "-c",
        "import subprocess, threading, socket, tempfile, multiprocessing as m\n"
        "ts = [threading.Thread(target=lambda: subprocess.run(['true'], check=True)) for _ in range(4)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]\n"
        "a, b = socket.socketpair(); tempfile.TemporaryFile().write(b'x'); v = m.Value('i', 3)\n"
        "with m.get_context('fork').Pool(2) as p: print(sum(p.map(abs, [-40, -1, -1])))\n",
    ],
    "git": [
        "sh",
        "-c",
        "git init -q . && git -c user.name=a -c user.email=b commit -q --allow-empty -m c && git log --oneline | cat",
    ],
    "gcc": [
        "sh",
        "-c",
        "printf '#include <pthread.h>\\n#include <stdio.h>\\nvoid*f(void*x){return x;}int main(){pthread_t t;"
        'pthread_create(&t,0,f,0);pthread_join(t,0);puts("ok");}\' > a.c && gcc -pthread -O1 a.c -o a && ./a',
    ],
    "bash with a pipe and job control": ["bash", "-ic", "seq 1000 | sort -n | tail -1; sleep 0 & wait %1"],
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_run(name: str, tmp_path: Path):
    argv = ORDINARY[name]
    if name in ("git", "gcc") and not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    completed = filtered_run(argv, tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout


def test_the_numbers_match_the_kernel_headers():
    """Compares with the headers of a C compiler: a wrong number would refuse another call. Every machine has ARM's
    numbers, x86-64 also its own."""
    headers = {0: "x86_64-linux-gnu/asm/unistd_64.h", 1: "asm-generic/unistd.h"}
    listed = seccomp.REFUSED | seccomp.UNSEEN_MEMORY
    listed |= {"clone3": seccomp.CLONE3, "clone": seccomp.CLONE, "unshare": seccomp.UNSHARE}
    listed |= {"ioctl": seccomp.IOCTL, "socket": seccomp.SOCKET}
    looked_at = 0
    for column, header in headers.items():
        path = Path("/usr/include") / header
        if not path.exists():
            continue
        defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text()))
        for name, numbers in listed.items():
            assert int(defined.get(name, numbers[column])) == numbers[column], name
            looked_at += name in defined
    if not looked_at:
        pytest.skip("the kernel's headers are not installed")
    assert looked_at > 35 * sum((Path("/usr/include") / header).exists() for header in headers.values())


def test_an_unsupported_machine_is_refused():
    with pytest.raises(ValueError, match="riscv64"):
        seccomp.program(refuse_memfd=False, machine="riscv64")


def test_the_program_is_within_the_kernels_limits():
    for machine in ("x86_64", "aarch64"):
        assert 8 < len(seccomp.program(refuse_memfd=True, machine=machine)) <= 4096 * 8
