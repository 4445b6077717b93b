"""Runs every attack on the isolating runtimes that affect its outcome, and checks that this machine has all limits.

One runtime instance is used for all attacks: damage by one of them would show in the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.sandbox import LocalRuntime, SandboxSpec
from rollyard.sandbox.runtimes.launched import LaunchedRuntime
from rollyard.testing.sandbox_conformance import started
from tests.sandbox.hostile import CASES, LIMITS, Case
from tests.sandbox.runtimes import ATTACKED

pytestmark = pytest.mark.slow

in_one_loop = pytest.mark.asyncio(loop_scope="module")

PAIRS = [
    pytest.param(name, case, id=f"{name}-{case.name}", marks=pytest.mark.xdist_group(f"hostile-{name}"))
    for name in ATTACKED
    for case in CASES
    if case.is_on_root or name != "bubblewrap-folder"
]


@in_one_loop
@pytest.mark.parametrize(("runtime", "case"), PAIRS, indirect=["runtime"])
async def test_the_attack_fails(runtime: LaunchedRuntime, case: Case) -> None:
    await case.run(runtime)
    assert not list(runtime.layer_root.parent.glob("sbx_*"))


@in_one_loop
@pytest.mark.parametrize("runtime", ATTACKED, indirect=True)
async def test_no_limit_is_missing(runtime: LaunchedRuntime) -> None:
    """Otherwise the cases on limits would prove nothing."""
    async with started(runtime, SandboxSpec(limits=LIMITS)) as sandbox:
        for limit in ("memory", "processes", "disk", "files", "open_files"):
            assert sandbox.limits_in_force[limit] != "none", dict(sandbox.limits_in_force)


async def test_no_case_attacks_the_machine_itself(tmp_path: Path) -> None:
    async with LocalRuntime(root=tmp_path) as runtime:
        for case in CASES:
            with pytest.raises(ValueError, match="isolates nothing"):
                await case.run(runtime)


def test_every_case_names_its_control() -> None:
    assert [case.name for case in CASES if len(case.control) <= 40] == []
