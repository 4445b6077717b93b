"""What a streamed generation has given so far: checked piece by piece, as strictly as a whole reply.

Invariant: a piece is taken wholly or not at all. Everything that can be wrong with it (ids, logprobs, its version, the
end that it tells) is looked at before any of its tokens counts, so what has been taken can be handed on at once and
is never taken back.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from rollyard.engines.base import GenerateRequest, Generation, Top
from rollyard.engines.clients import replies
from rollyard.engines.clients.replies import FinishReason


class TokenStream:
    """See the module. ValueErrors of `take` say what was wrong with a piece; then nothing of it was taken."""

    def __init__(self, request: GenerateRequest) -> None:
        self.token_ids: array[int] = array("i")
        self.finish: FinishReason | None = None  # set: it is complete, whatever becomes of its connection
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
        """The new tokens, now taken. `listed` are the ids beside the logprobs; `version` is that of these tokens,
        `spans` are those of all of them, told at the end."""
        if self.finish is not None:
            raise ValueError("a stream went on after its finish_reason")
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
            self._logprobs = None  # a hole in them: better none than a guess
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
        """What there is. Broken off, it is an abort, with the versions told so far if they cover it."""
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
