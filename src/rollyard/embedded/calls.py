"""One request in the event loop: the tokens sampled so far, and the response bodies in vLLM's format.

In addition to vLLM's fields, every event of a stream contains the weight versions of all tokens so far, not only the
last event: the tokens of a broken stream still have their versions.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from rollyard.embedded.batching import Request

if TYPE_CHECKING:
    from rollyard.embedded.batching import BatchedSequence, SampledToken
    from rollyard.embedded.transformer.sampling import SampledDraw

Body = dict[str, Any]


class Call:
    """One call. Used in the event loop only. It no longer changes once `finish` or `error` is set."""

    def __init__(self, known_as: str, request: Request, *, has_logprobs: bool) -> None:
        self.known_as = known_as
        self.request = request
        self.job: BatchedSequence | None = None  # written and read by the worker's thread only
        self.drawn: list[SampledDraw] = []
        self.finish: Literal["stop", "length", "abort"] | None = None
        self.error = ""
        self._has_logprobs = has_logprobs
        self._cached = 0
        self._spans: list[tuple[str, int, int]] = []
        self._changed = asyncio.Event()
        self._end = asyncio.Event()  # separate: waiting for the end does not wake for each token

    @property
    def is_over(self) -> bool:
        return self.finish is not None or bool(self.error)

    def take(self, step: SampledToken) -> None:
        if self.is_over:
            return  # sampled while it was being aborted
        at = len(self.drawn)
        self.drawn.append(step.drawn)
        if self._spans and self._spans[-1][0] == step.version:
            self._spans[-1] = (step.version, self._spans[-1][1], at + 1)
        else:
            self._spans.append((step.version, at, at + 1))
        self._cached = step.job.cached_tokens or 0
        self.finish = step.finish
        self._notify()

    def abort(self) -> None:
        if not self.is_over:
            self.finish = "abort"
            self._notify()

    def fail(self, error: str) -> None:
        if not self.is_over:
            self.error = error
            self._notify()

    async def news(self) -> None:
        """Waits until something has changed since the previous call of `news`."""
        if not self.is_over:
            await self._changed.wait()
            self._changed.clear()

    async def over(self) -> None:
        await self._end.wait()

    def _notify(self) -> None:
        self._changed.set()
        if self.is_over:
            self._end.set()

    # --- bodies

    def choice(self, start: int = 0) -> Body:
        """Returns the response body's choice with the tokens from `start` on."""
        drawn = self.drawn[start:]
        body: Body = {
            "index": 0,
            "finish_reason": self.finish,
            "stop_reason": None,
            "token_ids": [one.token for one in drawn],
            "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in self._spans],
            "logprobs": None,
        }
        if self._has_logprobs:
            body["logprobs"] = {"content": [_entry(one) for one in drawn]}
        return body

    def usage(self) -> Body:
        prompt, sampled = len(self.request.prompt), len(self.drawn)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


def _entry(drawn: SampledDraw) -> Body:
    tops = [{"token_id": token, "logprob": logprob} for token, logprob in drawn.tops]
    return {"token_id": drawn.token, "logprob": drawn.logprob, "top_logprobs": tops}
