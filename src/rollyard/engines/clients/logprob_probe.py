"""Determines the meaning of an engine's logprobs by experiment.

A token is sampled from softmax(logits / T), cut to top_k and top_p. An engine may report logprobs of that
distribution ("processed": what a trainer needs) or of softmax(logits) ("raw": vLLM's default). Engines do not report
which over HTTP, so the probe makes three calls of one token each on the same prompt and reads the most likely tokens:

1. T = 1 and T = 2. For two tokens a and b, log p(a) − log p(b) is (logit a − logit b) / T when processed, and the
   same at both when raw. The normaliser cancels, and it does not matter which token was sampled. The pair with the
   widest gap decides. A gap that is too small (a flat distribution) decides nothing, and the next prompt is tried.
2. T = 1 and top_k = 2. If the logprobs include the cut, the two most likely tokens have all the probability.

Logprobs that include the temperature but not the cut count as "processed", with a note, since they are exact for the
usual top_p = 1 and no top_k.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping

from rollyard.core import Sampling
from rollyard.core.trace import LogprobsKind

PROMPTS: tuple[tuple[int, ...], ...] = ((1, 2, 3), (40, 41, 42, 43), (100, 7, 100, 7, 100))
"""Ids that every vocabulary has. Their text does not matter."""

TOP = 5
_FLOOR = -50.0  # below: masked out (vLLM reports −9999), or too small to compare in float32
_GAP = 0.2  # nats at T = 1; half of it must be well above the tolerance
_TOLERANCE = 0.02  # batched kernels and bf16 do not repeat a logprob to the last bit

CUT_NOTE = "top_p and top_k are not in its logprobs: they are exact only with top_p 1 and top_k -1"

TopLogprobs = Callable[[tuple[int, ...], Sampling], Awaitable[Mapping[int, float]]]
"""Samples one token and returns the most likely ones with their logprobs (some may be missing)."""


async def logprob_semantics(ask: TopLogprobs) -> tuple[LogprobsKind, tuple[str, ...]]:
    """(kind, notes), by the test that the module docstring describes."""
    for prompt in PROMPTS:
        cool = await ask(prompt, Sampling(temperature=1.0))
        hot = await ask(prompt, Sampling(temperature=2.0))
        kind = compare(cool, hot)
        if kind == "unknown":
            continue
        if kind == "processed":
            cut = await ask(prompt, Sampling(temperature=1.0, top_k=2))
            return kind, () if cut_is_included(cut) else (CUT_NOTE,)
        return kind, ("its logprobs are not those of the distribution sampled from (raw)",)
    return "unknown", ("the meaning of its logprobs could not be determined",)


def compare(cool: Mapping[int, float], hot: Mapping[int, float]) -> LogprobsKind:
    """Which of the two rules the logprobs at T = 1 and at T = 2 follow."""
    common = [token for token, value in cool.items() if value > _FLOOR and hot.get(token, _FLOOR) > _FLOOR]
    if len(common) < 2:
        return "unknown"
    first, last = max(common, key=cool.__getitem__), min(common, key=cool.__getitem__)
    gap = cool[first] - cool[last]
    if gap < _GAP:
        return "unknown"
    hot_gap = hot[first] - hot[last]
    tolerance = _TOLERANCE + 0.02 * gap
    if abs(hot_gap - gap) <= tolerance:
        return "raw"
    if abs(hot_gap - gap / 2) <= tolerance:
        return "processed"
    return "unknown"


def cut_is_included(top: Mapping[int, float]) -> bool:
    """Whether the two most likely tokens of a top_k = 2 call have all the probability."""
    likeliest = sorted(top.values(), reverse=True)[:2]
    return abs(sum(math.exp(value) for value in likeliest) - 1.0) <= _TOLERANCE
