"""Every runtime, every check."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.testing.sandbox_conformance import CHECKS, Check
from tests.sandbox.runtimes import RUNTIMES, Kind

PAIRS = [
    pytest.param(kind, check, id=f"{name}-{check.name}")
    for name, kind in RUNTIMES.items()
    for check in CHECKS
    if kind.is_isolated or not check.needs_isolation
]


@pytest.mark.parametrize(("kind", "check"), PAIRS)
async def test_the_runtime_conforms(kind: Kind, check: Check, tmp_path: Path) -> None:
    root = tmp_path / "root"
    async with kind(root=root) as runtime:
        await check.run(runtime)
    assert not list(root.glob("sbx_*"))
