"""Runs `math-verify` in child processes, because it may hang.

It limits its own time by SIGALRM, which works only in a main thread and not during a long operation in C code.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.envs.children import Children

ANSWER_S = 30.0
"""math-verify limits each of its three steps to 5 s; beyond their sum it hangs."""
MAX_ANSWER_CHARS = 10_000
"""A longer answer is wrong without being parsed."""


class MathJudge:
    """Compares answers with math-verify, in child processes."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self.children = Children("math-verify", "rollyard.envs.math._child", command=command or ())
        self.answer_s = ANSWER_S

    async def is_same(
        self, known: str, answer: str, *, tolerance: float | None = None, wait_s: float | None = None, owner: str = ""
    ) -> bool:
        """Whether the two are equivalent. Raises VerifierCrashed if the verifier fails, EvalDeadline if it hangs.

        With a `tolerance` both must be numbers and differ by at most that share of the known one. `wait_s` limits the
        wait for a free process, which is not the answer's fault.
        """
        if len(answer) > MAX_ANSWER_CHARS:
            return False
        reply = await self.children.ask([known, answer, tolerance], answer_s=self.answer_s, wait_s=wait_s, owner=owner)
        return bool(reply.get("same"))

    async def close(self) -> None:
        await self.children.close()
