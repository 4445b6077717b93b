"""Sandboxes, in which a rollout's commands run in isolation, and the runtimes that start them."""

from rollyard.sandbox.base import (
    CONTROL_DIR,
    WORKDIR,
    Bind,
    ExecResult,
    Process,
    Runtime,
    Sandbox,
    SandboxEnd,
    SandboxLimits,
    SandboxSpec,
)
from rollyard.sandbox.runtimes.apptainer import ApptainerRuntime
from rollyard.sandbox.runtimes.bubblewrap import BubblewrapRuntime
from rollyard.sandbox.runtimes.local import LocalRuntime
from rollyard.sandbox.runtimes.oci import OciRuntime

__all__ = [
    "CONTROL_DIR",
    "WORKDIR",
    "ApptainerRuntime",
    "Bind",
    "BubblewrapRuntime",
    "ExecResult",
    "LocalRuntime",
    "OciRuntime",
    "Process",
    "Runtime",
    "Sandbox",
    "SandboxEnd",
    "SandboxLimits",
    "SandboxSpec",
]
