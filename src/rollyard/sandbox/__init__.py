"""Isolated places to run commands in, and what makes them."""

from rollyard.sandbox.apptainer import ApptainerRuntime
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
from rollyard.sandbox.bubblewrap import BubblewrapRuntime
from rollyard.sandbox.local import LocalRuntime
from rollyard.sandbox.oci import OciRuntime

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
