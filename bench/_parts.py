"""Common parts of the sandbox benchmarks: runtimes by name, and a minimal image.

The image is the smallest that all runtimes can start: one static busybox, or else the host's `sh`, `cat`, `echo` and
`sleep` with their libraries. It needs no network and no registry.
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
"""Starts in progress in a bench: more than in a service, so that kills hit every phase of a start."""


class Missing(Exception):
    """This machine lacks a part; the message has its name, and how to install it."""


@dataclass(frozen=True, slots=True)
class Images:
    """The image as a folder and as a SIF file; `sif` is None if it cannot be built here."""

    folder: Path
    sif: Path | None


def make_images(place: Path) -> Images:
    """Builds the images below `place`, in a second or two. Blocks: call it in a thread."""
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
            program = shutil.which(name, path="/usr/bin:/bin") or "/bin/sh"
            shutil.copy(program, folder / "bin" / name)
            for library in _libraries(program):
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
    completed = subprocess.run(argv, capture_output=True, timeout=BUILD_S, check=False)
    return Images(folder, sif if completed.returncode == 0 else None)


def _libraries(program: str) -> list[Path]:
    """Returns the libraries of a program, including its loader. A static program has none."""
    output = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=10, check=False).stdout
    return [Path(path) for path in re.findall(r"(/\S+) \(0x", output)]


def make_runtime(name: str, root: Path, *, images: Images | None = None, control: Path | None = None) -> AnyRuntime:
    """Returns a runtime that is not open yet. It starts up to AT_ONCE at once, except for Apptainer, which has a limit
    per image. `control` is the folder for control folders that are counted; None: on tmpfs, which is fast."""
    match name:
        case "bubblewrap":
            return BubblewrapRuntime(root=root, control_root=control, max_starting=AT_ONCE)
        case "apptainer":
            return ApptainerRuntime(root=root, control_root=control)
        case "local":
            return LocalRuntime(root=root, control_root=control, max_starting=AT_ONCE)
        case "oci":
            image = str(images.folder) if images is not None else None
            builds = PythonBuilds(CACHE / "python")
            command = shlex.join(engine())
            return OciRuntime(root=root, control_root=control, command=command, image=image, pythons=builds)
    raise CommandError(f"there is no runtime {name!r}", "there are: bubblewrap, apptainer, oci, local", 2)


async def forget_image(runtime: AnyRuntime, images: Images | None) -> None:
    """Removes our image from the container engine. Call it before the image's folder is deleted."""
    if isinstance(runtime, OciRuntime) and images is not None:
        await runtime.forget(str(images.folder))


@functools.cache
def engine() -> tuple[str, ...]:
    """Returns the container engine of the operator's settings, else the first that works here."""
    named = os.environ.get("ROLLYARD_OCI_COMMAND", "")
    if named:
        return tuple(shlex.split(named))
    if shutil.which("podman"):
        completed = subprocess.run(
            ["podman", "info", "--format", "json"], capture_output=True, text=True, timeout=30, check=False
        )
        try:
            host = json.loads(completed.stdout)["host"]
            # crun does not support machines with cgroups of both versions.
            if host["ociRuntime"]["name"] == "crun" and host["cgroupVersion"] == "v1" and shutil.which("runc"):
                return ("podman", "--runtime", "runc")
        except (ValueError, KeyError, TypeError):
            pass
        return ("podman",)
    if shutil.which("docker"):
        return ("docker",)
    raise Missing("neither podman nor docker is installed; apt-get install podman runc")


def quantiles_ms(times_s: Sequence[float]) -> tuple[float, float]:
    """Returns the median and the 99th percentile."""
    ordered = sorted(times_s)
    return round(ordered[len(ordered) // 2] * 1000, 2), round(ordered[int(len(ordered) * 0.99)] * 1000, 2)
