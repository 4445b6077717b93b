"""Joins the parts of a completion that several calls sampled into one `Generation`."""

from __future__ import annotations

from array import array
from typing import Literal

from rollyard.core.trace import LogprobsKind
from rollyard.engines.base import Generation, Top, VersionSpan

NOTHING = Generation(array("i"), array("f"), "abort")


class PartialCompletion:
    """The joined parts of one completion."""

    def __init__(self) -> None:
        self.token_ids: array[int] = array("i")
        self._logprobs: array[float] | None = array("f")
        self._tops: tuple[Top, ...] | None = ()
        self._versions: list[VersionSpan] = []
        self._parts: list[Generation] = []
        self._untrainable = ""
        self._is_tokenizer_verified = True
        self._engine = ""
        self._logprobs_kind: LogprobsKind | None = None

    def add(self, part: Generation) -> None:
        shift = len(self.token_ids)
        self._parts.append(part)
        self._untrainable = self._untrainable or part.untrainable
        self._is_tokenizer_verified &= part.is_tokenizer_verified
        if part.token_ids:
            self._engine = part.engine or self._engine
        if part.token_ids and part.logprobs_kind is not None:
            is_other = self._logprobs_kind not in (None, part.logprobs_kind)
            self._logprobs_kind = "unknown" if is_other else part.logprobs_kind
        self.token_ids += part.token_ids
        if self._logprobs is not None and part.logprobs is not None:
            self._logprobs += part.logprobs
        elif part.token_ids:
            self._logprobs = None  # a gap makes all of them unusable
        if self._tops is not None and part.tops is not None:
            self._tops += part.tops
        elif part.token_ids:
            self._tops = None
        for span in part.versions:
            last = self._versions[-1] if self._versions else None
            if last is not None and last.version == span.version:
                self._versions[-1] = VersionSpan(last.version, last.start, span.end + shift)
            else:
                self._versions.append(VersionSpan(span.version, span.start + shift, span.end + shift))

    def generation(self, finish_reason: Literal["stop", "length", "abort"]) -> Generation:
        first = self._parts[0] if self._parts else NOTHING
        return Generation(
            token_ids=self.token_ids,
            logprobs=self._logprobs,
            finish_reason=finish_reason,
            versions=tuple(self._versions),
            prompt_tokens=first.prompt_tokens,
            cached_tokens=first.cached_tokens,
            # an engine's columns also cover the prompt of its call, so those of several calls cannot simply be joined
            columns=first.columns if len(self._parts) == 1 else {},
            untrainable=self._untrainable,
            is_tokenizer_verified=self._is_tokenizer_verified,
            tops=self._tops or None,
            engine=self._engine,
            logprobs_kind=self._logprobs_kind,
        )
