"""Attacks that a model may try from inside a sandbox: one case per control, for every runtime with `is_isolated`.

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    async def test_hostile(case, runtime):
        await case.run(runtime)

A case gets an open runtime and attacks from inside one of its sandboxes. It raises AssertionError if the attack
succeeds. Its docstring (`case.control`) names the control that it tests; without that control the case fails. Each
attack bounds its own count, bytes and time, so a machine without the control is not harmed. The sandboxes need python3,
bash, the usual programs, the doorway and layers. They name no image: a runtime that needs one is passed as a subclass
whose `start` sets it.

Attacks on the score (files left for the verifier) are tested in tests/pipeline.
"""

from __future__ import annotations

from tests.sandbox.hostile import (  # noqa: F401  each adds its cases
    doorway,
    ends,
    files,
    host,
    kernel,
    limits,
    shell,
)
from tests.sandbox.hostile.cases import CASES, LIMITS, Case

__all__ = ["CASES", "LIMITS", "Case"]
