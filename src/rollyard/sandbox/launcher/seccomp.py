"""The system calls that sandboxes may not make: a classic-BPF filter, assembled here and installed by the launcher.

It lists the calls to refuse, not those to allow: compilers, browsers and interpreters of any image run unchanged, and
calls that only a container or an attacker needs are refused. They create or enter namespaces and mounts, load code
into the kernel, hold memory that no limit covers, or type into a terminal.

Invariants. A refused call returns EPERM and does nothing. clone3 returns ENOSYS, since its flags are in memory that a
filter cannot read; every libc then falls back to clone. A call of another architecture than the filter's (i386 on
x86-64, x32) is refused whatever its number, since numbers have other meanings there. A filter is permanent: all
children inherit it, through every exec. Since 5.11 the kernel caches the verdict for calls whose arguments are not
checked, so that read and write cost nothing.

File access, users and capabilities are the task of namespaces. `kernel.refuse_calls` installs the filter.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

EPERM, ENOSYS = 1, 38

# name → (x86-64, aarch64). From 424 on, the numbers are the same on all machines.
REFUSED: dict[str, tuple[int, int]] = {
    # keys: stored by the kernel per user, not per namespace
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # kernel internals: most privilege escalations started at one of these
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "setns": (308, 268),
    "open_by_handle_at": (304, 265),  # opens by inode, outside any mount
    # the machine
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
}

UNSEEN_MEMORY: dict[str, tuple[int, int]] = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),  # up to 512 MB of messages per IPC namespace
}
"""They hold memory that is in no RSS and on no visible tmpfs: refused where the resource monitor enforces memory."""

CLONE3 = (435, 435)
CLONE, UNSHARE, IOCTL, SOCKET = (56, 220), (272, 97), (16, 29), (41, 198)

NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
NEWTIME = 0x80  # for unshare only: in clone's flags this bit is part of the signal
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # type into a terminal; paste into a console
FOREIGN_FAMILIES = (40, 42)  # AF_VSOCK, AF_QIPCRTR: not confined by a network namespace; vsock reaches a VM's host

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables, AUDIT_ARCH
_X32 = 0x40000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH = 0, 4  # offsets in struct seccomp_data; argument n is at 16 + 8 n, its low half first
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000

_Instruction = tuple[int, int, int, int]


def program(*, refuse_memfd: bool, machine: str | None = None) -> bytes:
    """Returns the filter for this machine (or for "x86_64", "aarch64"). Raises ValueError for other machines."""
    machine = machine or os.uname().machine
    if machine not in _MACHINES:
        raise ValueError(f"no seccomp filter for {machine}")
    instructions = list(_instructions(refuse_memfd, *_MACHINES[machine]))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)


def _instructions(refuse_memfd: bool, column: int, arch: int) -> Iterator[_Instruction]:
    yield _LOAD, 0, 0, _ARCH
    yield _IF_EQUAL, 1, 0, arch
    yield _RETURN, 0, 0, _ERRNO | EPERM
    yield _LOAD, 0, 0, _NUMBER
    if column == 0:
        yield from _refuse_if(_IF_AT_LEAST, _X32)
    for numbers in (REFUSED | (UNSEEN_MEMORY if refuse_memfd else {})).values():
        yield from _refuse_if(_IF_EQUAL, numbers[column])
    yield from _refuse_if(_IF_EQUAL, CLONE3[column], ENOSYS)
    yield from _refuse_by_argument(CLONE[column], 0, _IF_ANY_BIT, NAMESPACES)
    yield from _refuse_by_argument(UNSHARE[column], 0, _IF_ANY_BIT, NAMESPACES | NEWTIME)
    yield from _refuse_by_argument(IOCTL[column], 1, _IF_EQUAL, TIOCSTI, TIOCLINUX)
    yield from _refuse_by_argument(SOCKET[column], 0, _IF_EQUAL, *FOREIGN_FAMILIES)
    yield _RETURN, 0, 0, _ALLOW


def _refuse_if(test: int, value: int, errno: int = EPERM) -> Iterator[_Instruction]:
    yield test, 0, 1, value
    yield _RETURN, 0, 0, _ERRNO | errno


def _refuse_by_argument(number: int, argument: int, test: int, *values: int) -> Iterator[_Instruction]:
    """Refuses one call by the low 32 bits of one argument: the kernel reads only these."""
    yield _IF_EQUAL, 0, 2 + 2 * len(values), number
    yield _LOAD, 0, 0, 16 + 8 * argument
    for value in values:
        yield from _refuse_if(test, value)
    yield _RETURN, 0, 0, _ALLOW
