"""Commands that run modules of this package as processes."""

from __future__ import annotations

import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]

_RUN = (
    "import runpy, sys; sys.path.insert(0, sys.argv[1]); module = sys.argv[2]; del sys.argv[1:3]; "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def module_argv(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs `module` of this package from any working directory."""
    return [sys.executable, "-c", _RUN, str(CHECKOUT), f"bench.{module}", *arguments]
