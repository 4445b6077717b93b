"""Builds one trace by appending context that was sent and tokens that were sampled, in their order.

Invariants. Appended tokens do not change. `prompt()` is what is sent, so the digest stored with a sampled span is the
digest of exactly those ids. Work per turn grows with what is new, except for the one copy that is sent: the digest is
kept as a hash state. A built trace ends with the last sampled token; context after it, from which nothing was sampled,
is left out.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

from rollyard.core import Sampling, Span, Trace, ids_array, logprobs_array
from rollyard.core.failure import TraceInvalid
from rollyard.core.trace import DEMONSTRATION, LogprobsKind, common_prefix

NO_LOGPROBS = "the engine gave no logprobs"
NO_VERSION = "the engine named no weight version"


def prompt_digest(ids: Sequence[int]) -> str:
    """The fingerprint of a prompt: BLAKE2b of its ids as little-endian int32."""
    return new_digest(ids).hexdigest()


def new_digest(ids: Sequence[int] = ()) -> blake2b:
    """A running digest that has read these ids."""
    return blake2b(int32_bytes(ids), digest_size=16)


def int32_bytes(ids: Sequence[int]) -> bytes:
    values = ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)
    if sys.byteorder == "big":
        values = array("i", values)
        values.byteswap()
    return values.tobytes()


class TraceBuilder:
    """The builder of one trace."""

    def __init__(
        self,
        *,
        sampling: Sampling,
        policy: str,
        model: str,
        fork_reason: str | None = None,
    ) -> None:
        self._sampling = sampling
        self._policy = policy
        self._model = model
        self._logprobs_kind: LogprobsKind | None = None
        self._fork_reason = fork_reason
        self._ids = ids_array()
        self._mask = bytearray()
        self._logprobs = logprobs_array()
        self._versions = ids_array()
        self._spans: list[Span] = []
        self._columns: dict[str, bytes] = {}
        self._untrainable: str | None = None
        self._is_tokenizer_verified = True
        self._has_logprobs = True
        self._digest = new_digest()
        self._sampled_tokens = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def sampled_tokens(self) -> int:
        """The number of sampled tokens that the trace owns, including given ones."""
        return self._sampled_tokens

    @property
    def spans(self) -> Sequence[Span]:
        return self._spans

    def prompt(self) -> list[int]:
        """A copy of all ids so far: the prompt of the next model call."""
        return self._ids.tolist()

    def ids(self, start: int, end: int) -> array[int]:
        """The ids [start, end)."""
        return self._ids[start:end]

    def context(self, ids: Sequence[int]) -> None:
        """Appends ids that the policy did not sample: never trained on."""
        added = ids_array(array("i", ids))
        self._ids += added
        self._mask += bytes(len(added))
        self._logprobs += logprobs_array(array("f", bytes(4 * len(added))))
        self._versions += array("i", (-1,)) * len(added)
        self._digest.update(int32_bytes(added))

    def sampled(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float] | None,
        *,
        turn: int,
        finish_reason: str,
        versions: Sequence[tuple[int, int, int]] = (),
        logprobs_kind: LogprobsKind = "unknown",
        engine: str = "",
        request_id: str = "",
        cached_tokens: int | None = None,
        columns: Mapping[str, bytes] | None = None,
        untrainable: str = "",
        is_tokenizer_verified: bool = True,
    ) -> None:
        """Appends what one model call sampled from `prompt()`. `versions` are (version, start, end) over `ids`;
        `untrainable` is a reason not to train on them."""
        if logprobs is not None and len(logprobs) != len(ids):
            raise TraceInvalid(f"turn {turn}: {len(ids)} tokens were sampled, with {len(logprobs)} logprobs")
        if not ids:
            return
        added = array("i", ids)
        start, end = len(self._ids), len(self._ids) + len(added)
        before = self._digest.copy().hexdigest()
        self._digest.update(int32_bytes(added))
        self._spans.append(
            Span(
                start=start,
                end=end,
                turn=turn,
                finish_reason=finish_reason,
                prompt_digest=before,
                sampled_digest=self._digest.copy().hexdigest(),
                engine=engine,
                request_id=request_id,
                cached_tokens=cached_tokens,
            )
        )
        self._ids += added
        self._mask += b"\x01" * len(added)
        self._is_tokenizer_verified &= is_tokenizer_verified
        if untrainable:
            self.untrainable(untrainable)
        self._versions += self._version_column(versions, len(added))
        if logprobs is None:
            self._has_logprobs = False
            self._untrainable = NO_LOGPROBS
            self._logprobs += array("f", bytes(4 * len(added)))
        else:
            self._logprobs += array("f", logprobs)
        is_one_kind = self._logprobs_kind in (None, logprobs_kind)
        self._logprobs_kind = logprobs_kind if is_one_kind else "unknown"  # another engine took over
        for name, value in (columns or {}).items():
            self._columns[f"{name}/{turn}"] = value
        self._sampled_tokens += len(added)

    def given(self, ids: Sequence[int], *, turn: int) -> None:
        """Appends a given turn in place of a sampled one: it makes the whole trace a demonstration."""
        self.sampled(ids, None, turn=turn, finish_reason="stop")
        self._untrainable = DEMONSTRATION

    def untrainable(self, reason: str) -> None:
        """Marks the trace as untrainable. The first reason is kept."""
        self._untrainable = self._untrainable or reason

    def copies(self, spans: Sequence[Span]) -> None:
        """Marks spans of this trace as copies of spans that an earlier trace owns."""
        self._spans += [replace(span, is_owned=False) for span in spans]

    def common_prefix(self, ids: Sequence[int], beyond: int = 0) -> int:
        """The length of the common prefix; 0 if it is not longer than `beyond`, which is checked cheaply."""
        other = ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)
        return common_prefix(self._ids, other, beyond)

    def build(self) -> Trace:
        """The trace so far. Later appends do not change it."""
        end = self._spans[-1].end if self._spans else 0
        return Trace(
            token_ids=self._ids[:end],
            mask=self._mask[:end],
            logprobs=self._logprobs[:end] if self._has_logprobs else None,
            versions=self._versions[:end],
            spans=tuple(self._spans),
            sampling=self._sampling,
            policy=self._policy,
            model=self._model,
            logprobs_kind=self._logprobs_kind or "unknown",
            is_trainable=self._untrainable is None,
            untrainable_reason=self._untrainable,
            fork_reason=self._fork_reason,
            columns=dict(self._columns),
            is_tokenizer_verified=self._is_tokenizer_verified,
        )

    def _version_column(self, versions: Sequence[tuple[int, int, int]], length: int) -> array[int]:
        column = array("i", (-1,)) * length
        for version, start, end in versions:
            stop = min(end, length)
            if 0 <= start < stop and version >= 0:
                column[start:stop] = array("i", (version,)) * (stop - start)
        if -1 in column:
            self._untrainable = self._untrainable or NO_VERSION
        return column
