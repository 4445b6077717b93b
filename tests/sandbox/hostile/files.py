"""Attacks on the file calls, and on files that are not the attacker's.

The host's tools run inside the sandbox's own mounts, so a link leads where it leads inside; what they read is a
regular file of a bounded size, or it is refused with ValueError. An OSError would pass for trouble of the host.
"""

# Small files of the host: blocking calls are short.

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile
import tempfile
from collections.abc import Generator
from pathlib import Path

from rollyard.sandbox.base import Runtime
from rollyard.testing.sandbox_conformance import marked
from rollyard.tools.shell import Shell
from tests.sandbox.hostile.cases import LONG_S, SECONDS, answers, hostile, python, started

MEGABYTE = 1 << 20


@contextlib.contextmanager
def host_folder() -> Generator[Path, None, None]:
    """A folder of the host's with a secret in it."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "secret").write_text("the host's")
        yield Path(name)


def only_the_secret(folder: Path) -> bool:
    return {entry.name: entry.read_text() for entry in folder.iterdir()} == {"secret": "the host's"}


@hostile
async def reading_another_sandboxs_files(runtime: Runtime) -> None:
    """A mount namespace each: no path leads to another's workspace, home, control folder or processes."""
    name = f"mine-{marked()}"
    async with started(runtime) as victim, started(runtime) as thief:
        for path in (name, f"/tmp/{name}"):
            await victim.write(path, b"not yours")
        (victim.control_dir / name).write_text("not yours")
        result = await thief.exec(["find", "/", "-name", name], timeout_s=LONG_S)
        assert result.stdout == b"", result.stdout
        for path in (victim.control_dir / name, Path("/proc/1/root", "workspace", name)):
            assert (await thief.exec(["cat", str(path)], timeout_s=SECONDS)).status != 0
        await thief.write("planted", b"")
        assert (await victim.exec(["ls", "planted"], timeout_s=SECONDS)).status != 0


@hostile
async def links_out_through_read_and_download(runtime: Runtime) -> None:
    """File jobs run in the sandbox's mounts and outside its PID namespace: neither a link nor /proc leads out."""
    with host_folder() as folder, tempfile.TemporaryDirectory() as scratch:
        async with started(runtime) as sandbox:
            links = {
                "way": str(folder / "secret"),
                "door": str(folder),
                "root": f"/proc/self/root{folder}/secret",
                "one": f"/proc/1/root{folder}/secret",
                "cwd": f"/proc/self/cwd/../../../..{folder}/secret",
                "up": "../" * 40 + str(folder / "secret").lstrip("/"),
            }
            for name, target in links.items():
                await sandbox.exec(["ln", "-s", target, name], timeout_s=SECONDS)
            target = Path(scratch, "target")
            for path in (*links, "door/secret", *(f"/proc/self/fd/{n}" for n in range(10)), "/proc/self/environ"):
                with contextlib.suppress(OSError, ValueError):
                    got = await sandbox.read(path, limit_bytes=1000)
                    raise AssertionError(f"reading {path} gave {got!r}")
                with contextlib.suppress(OSError, ValueError):
                    await sandbox.download(path, target, limit_bytes=1000)
                    raise AssertionError(f"{path} came out")
            assert await sandbox.download(".", target, limit_bytes=MEGABYTE) == "tar"
            with tarfile.open(target) as archive:
                assert all(member.issym() for member in archive)  # links as they are: what they point to stays


@hostile
async def links_out_through_write_and_upload(runtime: Runtime) -> None:
    """A file is made under a new name and renamed: a link at its place is replaced, and none leads out."""
    with host_folder() as folder, tempfile.TemporaryDirectory() as source:
        Path(source, "secret").write_text("overwritten")
        async with started(runtime) as sandbox:
            await sandbox.exec(["ln", "-s", str(folder / "secret"), "way"], timeout_s=SECONDS)
            await sandbox.exec(["ln", "-s", str(folder), "door"], timeout_s=SECONDS)
            for path in ("way", "door/secret", "door/planted"):
                with contextlib.suppress(OSError):
                    await sandbox.write(path, b"overwritten")
                with contextlib.suppress(OSError):
                    await sandbox.upload(Path(source, "secret"), path)
            for path in ("door", "door/deeper"):
                with contextlib.suppress(OSError):
                    await sandbox.upload(Path(source), path)
        assert only_the_secret(folder)


@hostile
async def links_out_through_unpack(runtime: Runtime) -> None:
    """An archive from a sandbox is unpacked inside one: its names and links, however made up, end there."""
    with host_folder() as folder, tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch, "archive")
        with tarfile.open(archive, "w") as writer:
            link = tarfile.TarInfo("door")
            link.type, link.linkname = tarfile.SYMTYPE, str(folder)
            writer.addfile(link)
            names = ("door/planted", "door/secret", "../" * 40 + f"{folder}/planted".lstrip("/"), f"{folder}/planted")
            for name in names:
                entry = tarfile.TarInfo(name)
                entry.size = 1
                writer.addfile(entry, io.BytesIO(b"x"))
        async with started(runtime) as sandbox:
            await sandbox.exec(["ln", "-s", str(folder), "here"], timeout_s=SECONDS)
            for path in (".", "here", "new"):
                with contextlib.suppress(OSError, ValueError):
                    await sandbox.unpack(archive, path)
            await answers(sandbox)
        assert only_the_secret(folder)


@hostile
async def writing_to_the_control_folder(runtime: Runtime) -> None:
    """It is a read-only mount: who could write there would choose the next command, or its neighbour's."""
    async with started(runtime) as sandbox:
        shell = await Shell.open(sandbox)
        try:
            path = sandbox.control_path
            before = {entry.name for entry in sandbox.control_dir.iterdir()}
            assert before
            attacks = (
                f"for f in {path}/*; do echo 'echo forged' > $f; rm -f $f; chmod 777 $f; truncate -s 0 $f; done",
                f"touch {path}/new; mkdir {path}/more; ln -s /tmp {path}/link; mv {path} /tmp/away; rm -rf {path}",
                f"mount -o remount,rw {path}; mount -t tmpfs none {path}; umount -l {path}",
                f"for f in /proc/1/root{path}/* /proc/self/root{path}/*; do echo 'echo forged' > $f; done",
            )
            for attack in attacks:
                await sandbox.exec(attack, timeout_s=SECONDS)
                await shell.run(attack, SECONDS)
            assert {entry.name for entry in sandbox.control_dir.iterdir()} == before
            result = await shell.run("echo true to itself", SECONDS)
            assert result.output.strip() == "true to itself", result
        finally:
            await shell.close()


@hostile
async def folders_without_end(runtime: Runtime) -> None:
    """File walks do not recurse and do not trust a path's length: the tree is downloaded or refused, and deleted."""
    async with started(runtime) as sandbox:
        deep = "import os\nfor _ in range(4000):\n os.mkdir('deep-down'); os.chdir('deep-down')"
        assert (await python(sandbox, deep, timeout_s=LONG_S)).status == 0
        wide = "for n in range(5000): open(f'wide-{n}', 'w').close()"
        assert (await python(sandbox, wide, timeout_s=LONG_S)).status == 0
        with tempfile.TemporaryDirectory() as scratch:
            async with asyncio.timeout(LONG_S):
                with contextlib.suppress(ValueError):
                    await sandbox.download(".", Path(scratch, "target"), limit_bytes=16 * MEGABYTE)
                with contextlib.suppress(ValueError):
                    await sandbox.download("deep-down", Path(scratch, "target"), limit_bytes=16 * MEGABYTE)
        await answers(sandbox)


@hostile
async def artifacts_that_never_end(runtime: Runtime) -> None:
    """Regular files only, opened without waiting, the size looked at first: no FIFO holds us, no hole fills a disk."""
    async with started(runtime) as sandbox:
        setup = (
            "mkfifo fifo; ln -s /dev/zero zero; ln -s /dev/tty tty; ln -s fifo way; ln -s /proc/kmsg log; mkdir folder"
            "; for f in sparse folder/sparse; do truncate -s 1T $f || truncate -s 1G $f; done"
        )
        await sandbox.exec(setup, timeout_s=SECONDS)
        server = "import socket; socket.socket(socket.AF_UNIX).bind('socket')"
        await python(sandbox, server)
        with tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch, "target")
            async with asyncio.timeout(SECONDS):
                for name in ("fifo", "sparse", "zero", "tty", "way", "log", "socket", "folder"):
                    # A folder is none of a file's ends, and what is not there is missing: both are answers too.
                    with contextlib.suppress(ValueError, IsADirectoryError, FileNotFoundError):
                        await sandbox.read(name, limit_bytes=MEGABYTE)
                        raise AssertionError(f"{name} was read")
                    with contextlib.suppress(ValueError, FileNotFoundError):
                        await sandbox.download(name, target, limit_bytes=MEGABYTE)
                        raise AssertionError(f"{name} came out")
                for name in ("fifo", "way", "tty"):
                    await sandbox.write(name, b"a file now")
            assert not list(Path(scratch).iterdir())
