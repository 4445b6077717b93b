"""The state of a streamed generation. Each piece is checked as strictly as a complete reply.

Invariant: a piece is added completely or not at all. Its ids, logprobs, version and finish_reason are checked before
any of its tokens is added, so added tokens can be passed on at once and are never withdrawn.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from rollyard.engines.base import GenerateRequest, Generation, Top
from rollyard.engines.clients import replies
from rollyard.engines.clients.replies import FinishReason


class TokenStream:
    """Collects the pieces of one streamed generation."""

    def __init__(self, request: GenerateRequest) -> None:
        self.token_ids: array[int] = array("i")
        self.finish: FinishReason | None = None  # set: the generation is complete, even if its connection fails
        self.prompt_tokens = len(request.prompt_ids)
        self.cached_tokens: int | None = None
        self.top = request.top_logprobs
        self._max_tokens = request.max_tokens
        self._tops: list[Top] | None = [] if self.top else None
        self._logprobs: array[float] | None = array("f")
        self._spans: list[tuple[str, int, int]] = []
        self._columns: Mapping[str, bytes] = {}

    def take(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None] | None,
        listed: Sequence[int] | None = None,
        *,
        finish: str | None = None,
        version: str | None = None,
        spans: Sequence[tuple[str, int, int]] | None = None,
        columns: Mapping[str, bytes] | None = None,
        tops: Sequence[Top] | None = None,
    ) -> array[int]:
        """Adds one piece and returns its tokens. `listed` are the ids listed with the logprobs; `version` is the
        version of these tokens; `spans` are the spans of all tokens, sent at the end. Raises ValueError if the piece is
        invalid; it is then not added."""
        if self.finish is not None:
            raise ValueError("a stream continued after its finish_reason")
        fresh = replies.ids_of(ids)
        values = replies.logprobs_of(logprobs, len(fresh))
        if listed is not None:
            replies.check_logprob_ids(ids, listed)
        at = len(self.token_ids)
        total = at + len(fresh)
        if total > self._max_tokens:
            raise ValueError(f"{total} tokens where {self._max_tokens} were asked for")
        all_spans = list(spans) if spans is not None else self._spans
        if version is not None and fresh:
            all_spans = _extended(all_spans, version, at, total)
        if finish is not None:
            replies.spans_of(all_spans, total)
        reason = None if finish is None else replies.finish_of(finish)

        self.token_ids += fresh
        if fresh and values is None:
            self._logprobs = None  # a gap makes all of them unusable
        elif self._logprobs is not None and values is not None:
            self._logprobs += values
        if tops is None or len(tops) != len(fresh):
            self._tops = self._tops if not fresh else None
        elif self._tops is not None:
            self._tops += tops
        self._spans = all_spans
        self.finish = reason
        self._columns = columns or {}
        return fresh

    def generation(self) -> Generation:
        """The generation so far. If it is incomplete, it is an abort, with the versions received if they cover it."""
        spans = self._spans if self.finish is not None or self._spans_cover() else []
        return Generation(
            token_ids=self.token_ids,
            logprobs=self._logprobs,
            finish_reason=self.finish or "abort",
            versions=replies.spans_of(spans, len(self.token_ids)),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            columns=self._columns,
            tops=tuple(self._tops) if self._tops else None,
        )

    def _spans_cover(self) -> bool:
        return bool(self._spans) and self._spans[-1][2] == len(self.token_ids)


def _extended(spans: list[tuple[str, int, int]], version: str, start: int, end: int) -> list[tuple[str, int, int]]:
    replies.version_of(version)
    if spans and spans[-1][0] == version:
        return [*spans[:-1], (version, spans[-1][1], end)]
    return [*spans, (version, start, end)]
