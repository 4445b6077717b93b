"""`Findings`: what EVAL printed and judged, for people who look at a rollout. The API returns it as `info.evidence`.

It has no influence on the score, and no agent sees it. Environments add what a verifier printed, never its files: a
test's output, not the test.

The texts are untrusted: RUN's code may have written them. A text is cut before it is decoded or copied, to its first
and last part. All together have at most `MOST_BYTES` as JSON: the first and the last findings are kept, and one finding
counts those between.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec

from rollyard.core.texts import cut_text
from rollyard.sandbox.base import ExecResult

MOST_BYTES = 64 << 10
MOST_FINDING_BYTES = 30 << 10
MOST_NAME_CHARS = 200

_HALF_BYTES = MOST_BYTES // 2 - 200  # 200: the finding that counts those left out

FindingKind = Literal["check", "tests", "judge", "patch"]


class Findings:
    """The findings of one EVAL."""

    def __init__(self) -> None:
        self._first: list[bytes] = []  # each as JSON
        self._last: deque[bytes] = deque()
        self._first_bytes = self._last_bytes = 0
        self._is_first_full = False
        self._dropped = 0

    def add(self, kind: FindingKind, name: str, text: str | bytes, *, passed: bool | None = None) -> None:
        """Adds a finding. `passed` is None if it is neither good nor bad."""
        most = MOST_FINDING_BYTES
        finding = _encoded(kind, name, _decoded(text, most), passed)
        while len(finding) > MOST_FINDING_BYTES:  # a character may take 6 bytes in JSON
            most //= 2
            finding = _encoded(kind, name, _decoded(text, most), passed)
        self._is_first_full |= self._first_bytes + len(finding) > _HALF_BYTES
        if not self._is_first_full:
            self._first.append(finding)
            self._first_bytes += len(finding) + 1
            return
        self._last.append(finding)
        self._last_bytes += len(finding) + 1
        while self._last_bytes > _HALF_BYTES:
            self._last_bytes -= len(self._last.popleft()) + 1
            self._dropped += 1

    def ran(self, kind: FindingKind, name: str, result: ExecResult, *, passed: bool | None = None) -> None:
        """Adds what a command of the verifier printed, and how it ended."""
        end = "it did not end in time" if result.is_timed_out else f"exit status {result.status}"
        half = MOST_FINDING_BYTES // 2 - 100
        parts = [_decoded(stream, half).rstrip("\n") for stream in (result.stdout, result.stderr)]
        self.add(kind, name, "\n".join([*filter(None, parts), f"({end})"]), passed=passed)

    def encoded(self) -> bytes:
        """Returns the findings as a JSON list of {"kind", "name", "text", "passed"}; empty without any."""
        if not self._first and not self._last:
            return b""
        dropped = [_encoded("check", "", f"({self._dropped} more were left out)", None)] if self._dropped else []
        return b"[" + b",".join([*self._first, *dropped, *self._last]) + b"]"


def _decoded(text: str | bytes, most: int) -> str:
    """Cuts a text, and replaces what is not Unicode."""
    if isinstance(text, bytes) and len(text) > 4 * most:  # a character has at most 4 bytes
        half = most // 2
        head, tail = (part.decode("utf-8", "replace") for part in (text[: 4 * half], text[len(text) - 4 * half :]))
        return f"{head[:half]}\n… the middle of {len(text)} bytes is left out …\n{tail[len(tail) - half :]}"
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return cut_text(text, most).encode("utf-8", "replace").decode()


def _encoded(kind: FindingKind, name: str, text: str, passed: bool | None) -> bytes:
    name = cut_text(name, MOST_NAME_CHARS).encode("utf-8", "replace").decode()
    return msgspec.json.encode({"kind": kind, "name": name, "text": text, "passed": passed})
