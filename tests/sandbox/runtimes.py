"""The runtimes under test, by name: to add one, add a line to `RUNTIMES`.

The suites start sandboxes without an image. For a runtime that needs one, or is tested with one, a subclass here fills
it in. scripts/make-test-image makes the image of this machine's packages in seconds, as the user that runs the tests:
an overlay in a user namespace needs an image that belongs to that user.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from rollyard.sandbox import ApptainerRuntime, BubblewrapRuntime, LocalRuntime, OciRuntime, SandboxSpec
from rollyard.sandbox.launched_sandbox import LaunchedSandbox
from rollyard.sandbox.python import PythonBuilds

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollyard"
SCRIPT = Path(__file__).parents[2] / "scripts" / "make-test-image"


@functools.cache
def image(*, is_sif: bool) -> str:
    """Returns the image's folder or SIF file; made at the first call."""
    folder = CACHE / "images-for-tests" / "debian"
    target = folder.with_suffix(".sif") if is_sif else folder
    completed = subprocess.run([str(SCRIPT), str(folder), *([str(target)] if is_sif else [])], stderr=subprocess.PIPE)
    assert completed.returncode == 0, completed.stderr.decode()
    return str(target)


class BubblewrapOnFolder(BubblewrapRuntime):
    async def start(self, spec: SandboxSpec, *, lease_s: float) -> LaunchedSandbox:
        return await super().start(replace(spec, image=spec.image or image(is_sif=False)), lease_s=lease_s)


class ApptainerOnFolder(ApptainerRuntime):
    async def start(self, spec: SandboxSpec, *, lease_s: float) -> LaunchedSandbox:
        return await super().start(replace(spec, image=spec.image or image(is_sif=False)), lease_s=lease_s)


class ApptainerOnSif(ApptainerRuntime):
    async def start(self, spec: SandboxSpec, *, lease_s: float) -> LaunchedSandbox:
        return await super().start(replace(spec, image=spec.image or image(is_sif=True)), lease_s=lease_s)


class OciByPodman(OciRuntime):
    """Uses runc, because crun does not support machines that have cgroups of both kinds."""

    def __init__(self, *, root: Path, control_root: Path | None = None) -> None:
        command = f"podman --runtime {shutil.which('runc') or 'crun'}"
        pythons = PythonBuilds(CACHE / "python")  # built once for all tests, since that takes seconds
        super().__init__(root=root, control_root=control_root, command=command, pythons=pythons)

    async def start(self, spec: SandboxSpec, *, lease_s: float) -> LaunchedSandbox:
        return await super().start(replace(spec, image=spec.image or image(is_sif=False)), lease_s=lease_s)


Kind = type[BubblewrapRuntime] | type[ApptainerRuntime] | type[LocalRuntime] | type[OciByPodman]

RUNTIMES: dict[str, Kind] = {
    "bubblewrap": BubblewrapRuntime,
    "bubblewrap-folder": BubblewrapOnFolder,
    "apptainer": ApptainerRuntime,
    "apptainer-folder": ApptainerOnFolder,
    "apptainer-sif": ApptainerOnSif,
    "oci": OciByPodman,
    "local": LocalRuntime,
}
ISOLATED: dict[str, Kind] = {name: kind for name, kind in RUNTIMES.items() if kind.is_isolated}

ATTACKED = ("bubblewrap", "bubblewrap-folder", "apptainer-folder")
"""Runtimes of the hostile suite, which takes a minute each. The others differ only in the source of the root."""
