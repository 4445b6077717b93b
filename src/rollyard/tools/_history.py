"""The history of `undo_edit`: whole files before each edit, bounded over all files of a rollout."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from hashlib import blake2b

UNDO_EDITS, UNDO_BYTES = 100, 4 << 20
"""The bounds over all files of a rollout; the oldest edits are dropped first."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit: the file before it, and a hash of the file after it."""

    path: str
    before: bytes
    after: bytes


class History:
    """The last edits of all files, bounded in number and in bytes."""

    def __init__(self) -> None:
        self._edits: deque[Edit] = deque()
        self._stored_bytes = 0

    def add(self, path: str, before: bytes, after: bytes) -> None:
        self._edits.append(Edit(path, before, mark(after)))
        self._stored_bytes += len(before)
        while len(self._edits) > UNDO_EDITS or self._stored_bytes > UNDO_BYTES:
            self._stored_bytes -= len(self._edits.popleft().before)

    def last(self, path: str) -> Edit | None:
        return next((edit for edit in reversed(self._edits) if edit.path == path), None)

    def drop(self, edit: Edit) -> None:
        self._edits = deque(other for other in self._edits if other is not edit)  # an earlier one may be equal
        self._stored_bytes -= len(edit.before)


def mark(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
