"""What the benches of sandboxes are made with: runtimes by name, and an image of our own.

The image is the smallest that all of them can start: one static busybox, or where there is none the host's own `sh`,
`cat`, `echo` and `sleep` with the libraries that they load. No network, no registry.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peer_drivers import CACHE
from rollyard.cli._console import CommandError
from rollyard.sandbox import ApptainerRuntime, BubblewrapRuntime, LocalRuntime, OciRuntime
from rollyard.sandbox.python import PythonBuilds

AnyRuntime = BubblewrapRuntime | ApptainerRuntime | OciRuntime | LocalRuntime

PROGRAMS = ("sh", "cat", "echo", "sleep")
BUILD_S = 120.0
AT_ONCE = 50
"""Starts that a bench may have in progress: more than a service would, so that each moment of one is met."""


class Missing(Exception):
    """This machine has no such part; the text says which, and how to get it."""


@dataclass(frozen=True, slots=True)
class Images:
    """`sif` is None where nothing here can build one."""

    folder: Path
    sif: Path | None


def make_images(place: Path) -> Images:
    """Below `place`, in a second or two. Blocks: for a thread."""
    folder = place / "image"
    for name in ("bin", "etc", "tmp", "proc", "dev", "root", "var"):
        (folder / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    if busybox is not None and not _libraries(busybox):
        shutil.copy(busybox, folder / "bin" / "busybox")
        for name in PROGRAMS:
            (folder / "bin" / name).symlink_to("busybox")
    else:
        for name in PROGRAMS:
            found = shutil.which(name, path="/usr/bin:/bin") or "/bin/sh"
            shutil.copy(found, folder / "bin" / name)
            for library in _libraries(found):
                target = folder / library.relative_to("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(library, target)
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (folder / "etc" / "group").write_text("root:x:0:\n")
    for name in ("hosts", "resolv.conf"):
        (folder / "etc" / name).touch()
    builder = shutil.which("apptainer") or shutil.which("singularity")
    if builder is None:
        return Images(folder, None)
    sif = place / "image.sif"
    argv = [builder, "--quiet", "build", str(sif), str(folder)]
    done = subprocess.run(argv, capture_output=True, timeout=BUILD_S, check=False)
    return Images(folder, sif if done.returncode == 0 else None)


def _libraries(program: str) -> list[Path]:
    """What it loads, its loader among them; empty: it is static."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=10, check=False).stdout
    return [Path(path) for path in re.findall(r"(/\S+) \(0x", said)]


def make_runtime(name: str, root: Path, *, images: Images | None = None, control: Path | None = None) -> AnyRuntime:
    """Not open yet. Up to AT_ONCE starts at once, except for Apptainer, which has a gate of its own per image.
    `control` is for the folders of commands where they are to be counted; None: on tmpfs, where they are fast."""
    match name:
        case "bubblewrap":
            return BubblewrapRuntime(root=root, control_root=control, max_starting=AT_ONCE)
        case "apptainer":
            return ApptainerRuntime(root=root, control_root=control)
        case "local":
            return LocalRuntime(root=root, control_root=control, max_starting=AT_ONCE)
        case "oci":
            image = str(images.folder) if images is not None else None
            shelf = PythonBuilds(CACHE / "python")
            command = shlex.join(engine())
            return OciRuntime(root=root, control_root=control, command=command, image=image, pythons=shelf)
    raise CommandError(f"there is no runtime {name!r}", "there are: bubblewrap, apptainer, oci, local", 2)


async def forget_image(runtime: AnyRuntime, images: Images | None) -> None:
    """The image of ours that a container engine has imported goes before its folder does."""
    if isinstance(runtime, OciRuntime) and images is not None:
        await runtime.forget(str(images.folder))


@functools.cache
def engine() -> tuple[str, ...]:
    """The container engine as the operator's settings name it, else the first that can run something here."""
    named = os.environ.get("ROLLYARD_OCI_COMMAND", "")
    if named:
        return tuple(shlex.split(named))
    if shutil.which("podman"):
        said = subprocess.run(
            ["podman", "info", "--format", "json"], capture_output=True, text=True, timeout=30, check=False
        )
        try:
            host = json.loads(said.stdout)["host"]
            # crun takes no machine that has cgroups of both kinds.
            if host["ociRuntime"]["name"] == "crun" and host["cgroupVersion"] == "v1" and shutil.which("runc"):
                return ("podman", "--runtime", "runc")
        except (ValueError, KeyError, TypeError):
            pass
        return ("podman",)
    if shutil.which("docker"):
        return ("docker",)
    raise Missing("neither podman nor docker is installed; apt-get install podman runc")


def quantiles_ms(times_s: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    ordered = sorted(times_s)
    return round(ordered[len(ordered) // 2] * 1000, 2), round(ordered[int(len(ordered) * 0.99)] * 1000, 2)
