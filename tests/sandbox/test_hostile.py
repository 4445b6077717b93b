"""Every isolating runtime, every attack; and on this machine no limit is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.sandbox import LocalRuntime, SandboxSpec
from rollyard.testing.sandbox_conformance import started
from rollyard.testing.sandbox_hostile import CASES, LIMITS, Case
from tests.sandbox.runtimes import ATTACKED, ISOLATED


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ATTACKED)
async def test_the_attack_fails(name: str, case: Case, tmp_path: Path) -> None:
    root = tmp_path / "root"
    async with ISOLATED[name](root=root) as runtime:
        await case.run(runtime)
    assert not list(root.glob("sbx_*"))


@pytest.mark.parametrize("name", ATTACKED)
async def test_no_limit_is_missing(name: str, tmp_path: Path) -> None:
    """Else the cases on limits would show nothing."""
    async with ISOLATED[name](root=tmp_path) as runtime, started(runtime, SandboxSpec(limits=LIMITS)) as sandbox:
        for limit in ("memory", "processes", "disk", "open_files"):
            assert sandbox.limits_in_force[limit] != "none", dict(sandbox.limits_in_force)


async def test_no_case_attacks_the_machine_itself(tmp_path: Path) -> None:
    async with LocalRuntime(root=tmp_path) as runtime:
        for case in CASES:
            with pytest.raises(ValueError, match="isolates nothing"):
                await case.run(runtime)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_names_its_control(case: Case) -> None:
    assert len(case.control) > 40
