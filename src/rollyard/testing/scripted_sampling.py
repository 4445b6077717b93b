"""The simulated samples of a scripted engine: token ids, and logprobs computed from the ids alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollyard.testing.script import Fault, Tokenizer

LogprobsMode = Literal["processed", "raw"]
Finish = Literal["stop", "length", "abort"]

MASKED = -9999.0  # vLLM's logprob of tokens that could not be sampled


def scripted_logprob(before: int, position: int, token: int) -> float:
    """Returns the logprob at T = 1 of `token` at that position of the whole sequence, after the token `before`."""
    mixed = (token * 2654435761 ^ position * 40503 ^ (before + 1) * 2246822519) & 0xFFFFFFFF
    return -0.001 - (mixed * 2654435761 & 0xFFFFFFFF) / 0xFFFFFFFF * 3.0


@dataclass(frozen=True, slots=True)
class Sampled:
    """One generation. At temperature 1 without top_k its logprobs are `scripted_logprob`. Otherwise each token has a
    few made-up alternatives, and all logprobs are scaled and cut as an engine of that mode does."""

    prompt: Sequence[int]
    ids: list[int]
    finish: Finish
    cached: int
    versions: Sequence[tuple[str, int]]
    params: Mapping[str, Any]
    logprobs_mode: LogprobsMode
    fault: Fault | None

    @property
    def top(self) -> int:
        return self.params.get("logprobs") or 0

    @property
    def has_logprobs(self) -> bool:
        return self.params.get("logprobs") is not None and self.fault != "no_logprobs"

    def logprobs(self) -> list[float]:
        is_plain = self.logprobs_mode == "raw" or (
            self.params.get("temperature", 1.0) == 1.0 and self.params.get("top_k", -1) <= 0
        )
        values = [self._raw(i) if is_plain else self.tops(i)[token] for i, token in enumerate(self.ids)]
        if self.fault == "fewer_logprobs":
            values = values[:-1]
        elif self.fault == "missing_logprob" and values:
            values[-1] = MASKED
        elif self.fault == "positive_logprob" and values:
            values[-1] = 0.5
        return values

    def tops(self, index: int) -> dict[int, float]:
        """Returns the sampled token and its alternatives; the sampled one is the most likely."""
        token = self.ids[index]
        raw = {token + step: self._raw(index) - 0.5 * step for step in range(max(1, self.top, 5))}
        if self.logprobs_mode == "raw":
            return raw
        temperature = max(self.params.get("temperature", 1.0), 1e-2)
        top_k = self.params.get("top_k", -1)
        scaled = [value / temperature for value in raw.values()]
        allowed = scaled[:top_k] if top_k > 0 else scaled
        total = math.log(sum(math.exp(value) for value in allowed))
        return {
            one: value - total if place < len(allowed) else MASKED
            for place, (one, value) in enumerate(zip(raw, scaled, strict=True))
        }

    def part(self, start: int, end: int) -> Sampled:
        """Returns the tokens [start, end) as a generation whose prompt includes the earlier ones."""
        before = [*self.prompt, *self.ids[:start]] if start else self.prompt
        return replace(self, prompt=before, ids=self.ids[start:end])

    def without_fault(self) -> Sampled:
        return replace(self, fault=None)

    def spans(self) -> list[dict[str, Any]]:
        if self.fault == "bad_version":
            return [{"version": "seven", "start": 0, "end": len(self.ids)}]
        starts = [min(start, len(self.ids)) for _, start in self.versions] + [len(self.ids)]
        return [
            {"version": version, "start": starts[i], "end": starts[i + 1]}
            for i, (version, _) in enumerate(self.versions)
            if starts[i + 1] > starts[i]
        ]

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.ids),
            "total_tokens": len(self.prompt) + len(self.ids),
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def _raw(self, index: int) -> float:
        before = self.ids[index - 1] if index else self.prompt[-1]
        return scripted_logprob(before, len(self.prompt) + index, self.ids[index])


def cut_at_text(ids: list[int], stops: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Cuts ids after the token that completes the first of these texts."""
    for end in range(1, len(ids) + 1) if stops else ():
        text = tokenizer.decode(ids[:end])
        if any(stop in text for stop in stops):
            return ids[:end]
    return ids


def cut_reply(
    ids: list[int], max_tokens: int, stop_token_ids: Sequence[int]
) -> tuple[list[int], Literal["stop", "length"]]:
    """Cuts ids as an engine does: after the first stop token, and at `max_tokens`. Also returns the finish reason."""
    for stop in stop_token_ids:
        if stop in ids:
            ids = ids[: ids.index(stop) + 1]
    return (ids, "stop") if len(ids) <= max_tokens else (ids[:max_tokens], "length")
