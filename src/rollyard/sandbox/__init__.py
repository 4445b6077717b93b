"""Isolated places to run commands in, and what makes them."""

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

__all__ = [
    "CONTROL_DIR",
    "WORKDIR",
    "Bind",
    "BubblewrapRuntime",
    "ExecResult",
    "LocalRuntime",
    "Process",
    "Runtime",
    "Sandbox",
    "SandboxEnd",
    "SandboxLimits",
    "SandboxSpec",
]
