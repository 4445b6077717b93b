"""Every runtime, every check."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.sandbox import BubblewrapRuntime, LocalRuntime
from rollyard.testing.sandbox_conformance import CHECKS, Check

PAIRS = [
    (kind, check)
    for kind in (BubblewrapRuntime, LocalRuntime)
    for check in CHECKS
    if kind.is_isolated or not check.needs_isolation
]


@pytest.mark.parametrize(("kind", "check"), PAIRS, ids=[f"{kind.name}-{check.name}" for kind, check in PAIRS])
async def test_the_runtime_conforms(
    kind: type[BubblewrapRuntime] | type[LocalRuntime], check: Check, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    async with kind(root=root) as runtime:
        await check.run(runtime)
    assert not list(root.glob("sbx_*"))
