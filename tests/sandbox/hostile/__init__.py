"""What a stranger's model may try in a sandbox, one case per control, against any runtime that says `is_isolated`.

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    async def test_hostile(case, runtime):
        await case.run(runtime)

A case gets an open runtime and attacks from inside a sandbox of it. It raises AssertionError where the attack has
gone through; its docstring (`case.control`) names the control that it proves, and without that control it fails. An
attack is bounded by itself, in count, in bytes and in time: a machine that lacks the control comes to no harm. The
sandboxes need python3, bash and the usual programs. They name no image: a runtime that cannot do without one
is given as a subclass whose `start` fills it in. The doorway and layers are needed too.

Attacks on the score (files left for the verifier) are no business of a sandbox; the pipeline's tests have them.
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
