"""Files of a container engine: imports folders as images, exports containers as layers, finds a container's writes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

from rollyard.core.failure import SandboxLost, SandboxStartFailed

IMPORT_S = 1800.0


def import_folder(engine: list[str], folder: str, name: str) -> None:
    """Imports a folder by `tar | import`, which both engines support. All files become root's, as in an image."""
    packing = ["tar", "--create", "--numeric-owner", "--owner=0", "--group=0", "--directory", folder, "."]
    with subprocess.Popen(packing, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tar:
        completed = subprocess.run(
            [*engine, "import", "-", name],
            stdin=tar.stdout,
            capture_output=True,
            text=True,
            timeout=IMPORT_S,
            check=False,
        )
    if completed.returncode != 0 or tar.returncode != 0:
        raise SandboxStartFailed(f"import of {folder}: {completed.stderr.strip()[-500:] or 'tar failed'}", step="image")


def upper_folder(pid: int) -> Path | None:
    """Returns the host's folder of a container's writes: the upper folder of its root's overlay. None if there is no
    such folder (another storage driver), or it cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mountinfo") as mounts:
        for line in mounts:
            here, _, source = line.partition(" - ")
            if here.split()[4] == "/" and source.startswith("overlay "):
                words = source.split()[2].split(",")
                upper = next((Path(word[9:]) for word in words if word.startswith("upperdir=")), None)
                return upper if upper is not None and os.access(upper, os.R_OK | os.X_OK) else None
    return None


def export_container(engine: list[str], container: str, image: str, first_uid: int) -> None:
    """Makes an image of a container by export and import. `commit` would keep the container's uids on the host
    (podman 4.3), so that its users could not write to the files."""
    with (
        subprocess.Popen([*engine, "export", container], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as source,
        subprocess.Popen(
            [*engine, "import", "-", image], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as target,
        tarfile.open(fileobj=source.stdout, mode="r|") as packed,
        tarfile.open(fileobj=target.stdin, mode="w|", format=tarfile.PAX_FORMAT) as repacked,
    ):
        for member in packed:
            member.uid, member.gid = max(0, member.uid - first_uid), max(0, member.gid - first_uid)
            # Large numbers are also in the headers as text, which would be written again.
            member.pax_headers = {key: text for key, text in member.pax_headers.items() if key not in ("uid", "gid")}
            repacked.addfile(member, packed.extractfile(member) if member.isreg() else None)
        repacked.close()
        assert target.stdin is not None
        target.stdin.close()
    if source.returncode != 0 or target.returncode != 0:
        raise SandboxLost("the container engine could not store the files that the container wrote")


def probe_image(folder: Path) -> Path | None:
    """Makes the smallest image: busybox, if this machine has it."""
    program = shutil.which("busybox")
    if program is None:
        return None
    if not (folder / "bin").is_dir():
        (folder / "bin").mkdir(parents=True)
        shutil.copy(program, folder / "bin" / "busybox")
        for name in ("sh", "cat", "echo"):
            (folder / "bin" / name).symlink_to("busybox")
    return folder
