"""Checks of an engine's reply: one logprob per token id, and version spans that cover all tokens.

Nothing is repaired. An invalid reply raises a `ValueError` that states what is wrong; the engine's client turns it into
EngineBroken. A logprob that the engine reports as missing (null, or vLLM's −9999.0) makes all of them None: a
generation with a gap in its logprobs cannot be trained on.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Literal

from rollyard.engines.base import Generation, Top, VersionSpan

FinishReason = Literal["stop", "length", "abort"]

MISSING = -9999.0
"""vLLM reports this for a logprob that is missing, −inf or NaN."""

UNSET_VERSIONS = frozenset({"", "default"})
"""The version that vLLM and SGLang report until they are given one."""

_ROUNDING = 1e-3  # log-softmax in float32 or bf16 may be slightly above zero


def ids_of(values: Sequence[int]) -> array[int]:
    try:
        ids = array("i", values)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids are not 32-bit integers: {error}") from None
    if ids and min(ids) < 0:
        raise ValueError(f"token id {min(ids)} is negative")
    return ids


def top_of(pairs: Iterable[tuple[int, float | None]], most: int) -> Top:
    """The `most` likeliest, in order. Engines add the sampled token to the list, and a masked one has no logprob."""
    finite = [
        (token, value) for token, value in pairs if value is not None and value > MISSING and math.isfinite(value)
    ]
    return tuple(sorted(finite, key=lambda pair: -pair[1])[:most])


def logprobs_of(values: Sequence[float | None] | None, token_count: int) -> array[float] | None:
    """One finite logprob per token; None if any is missing."""
    if values is None:
        return None
    if len(values) != token_count:
        raise ValueError(f"{len(values)} logprobs for {token_count} tokens")
    if None in values or MISSING in values:
        return None
    logprobs = array("f", values)  # type: ignore[arg-type]  # None was excluded above
    if logprobs and not (math.isfinite(min(logprobs)) and math.isfinite(sum(logprobs))):
        raise ValueError("a logprob is not finite")
    if logprobs and max(logprobs) > _ROUNDING:
        raise ValueError(f"logprob {max(logprobs):.6g} is positive")
    return logprobs


def check_logprob_ids(ids: Sequence[int], logprob_ids: Sequence[int]) -> None:
    """Checks that the ids listed with the logprobs are the sampled ones."""
    if list(logprob_ids) != list(ids):
        at = next(
            (i for i, (a, b) in enumerate(zip(ids, logprob_ids, strict=False)) if a != b),
            min(len(ids), len(logprob_ids)),
        )
        raise ValueError(f"the logprob at {at} is not that of the sampled token")


def placeholder_id(token: str) -> int:
    """vLLM up to 0.28 names tokens "token_id:N"."""
    prefix, _, number = token.rpartition(":")
    if prefix != "token_id" or not number.isdigit():
        raise ValueError(f"a logprob's token is {token[:40]!r}, not token_id:N")
    return int(number)


def version_of(text: str) -> int | None:
    """A weight version as a number; None if the engine has not been given one."""
    if text in UNSET_VERSIONS:
        return None
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"weight version {text[:40]!r} is not a number")
    return int(text)


def spans_of(spans: Iterable[tuple[str, int, int]], token_count: int) -> tuple[VersionSpan, ...]:
    """Spans that cover [0, token_count) in order without gaps; () if the engine does not report them.

    Tokens that were sampled before the engine was given a version have version −1.
    """
    version_spans: list[VersionSpan] = []
    position = 0
    for text, start, end in spans:
        if start != position or end < start:
            raise ValueError(f"weight version spans do not join: [{start}, {end}) after {position}")
        position = end
        version = version_of(text)
        if end > start:
            version_spans.append(VersionSpan(-1 if version is None else version, start, end))
    if version_spans and position != token_count:
        raise ValueError(f"weight version spans cover {position} of {token_count} tokens")
    return tuple(version_spans)


def finish_of(reason: str | None) -> FinishReason:
    if reason == "stop" or reason == "length" or reason == "abort":
        return reason
    raise ValueError(f"finish_reason {reason!r} is not stop, length or abort")


def check_length(generation: Generation, max_tokens: int) -> Generation:
    if len(generation.token_ids) > max_tokens:
        raise ValueError(f"{len(generation.token_ids)} tokens where {max_tokens} were asked for")
    return generation
