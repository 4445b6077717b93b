"""Runs on every runtime the checks whose result depends on it. One instance serves all checks, as it does rollouts."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rollyard.sandbox.runtimes.launched import LaunchedRuntime
from rollyard.testing.sandbox_conformance import CHECKS, RuntimePart, SandboxCheck
from tests.sandbox.runtimes import RUNTIMES

pytestmark = pytest.mark.slow

in_one_loop = pytest.mark.asyncio(loop_scope="module")

SINCE = {
    "bubblewrap": RuntimePart.LAUNCHER,
    "local": RuntimePart.LAUNCHER,
    "apptainer-folder": RuntimePart.LAUNCHER,
    "oci": RuntimePart.PROGRAM,
    "bubblewrap-folder": RuntimePart.ROOT,
    "apptainer": RuntimePart.ROOT,
    "apptainer-sif": RuntimePart.ROOT,
}
"""The first part of each runtime that the tests of other runtimes do not cover."""

PAIRS = [
    pytest.param(
        name,
        check,
        id=f"{name}-{check.name}",
        marks=pytest.mark.xdist_group("podman" if name == "oci" else f"conformance-{name}"),
    )
    for name, kind in RUNTIMES.items()
    for check in CHECKS
    if check.decided_by >= SINCE[name] and (kind.is_isolated or not check.needs_isolation)
]


@in_one_loop
@pytest.mark.parametrize(("runtime", "check"), PAIRS, indirect=["runtime"])
async def test_the_runtime_conforms(runtime: LaunchedRuntime, check: SandboxCheck) -> None:
    await check.run(runtime)
    assert not list(runtime.layer_root.parent.glob("sbx_*"))


def test_each_check_runs_on_bubblewrap() -> None:
    assert SINCE.keys() == RUNTIMES.keys()
    pairs: set[Any] = {(name, check.name) for name, check in (cast(Any, param.values) for param in PAIRS)}
    assert {check.name for check in CHECKS} == {check for name, check in pairs if name == "bubblewrap"}
