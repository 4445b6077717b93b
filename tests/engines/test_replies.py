"""The checks of an engine's reply."""

from __future__ import annotations

import math

import pytest

from rollyard.engines.base import VersionSpan
from rollyard.engines.clients import replies


def test_there_must_be_one_logprob_per_token() -> None:
    assert replies.logprobs_of([-1.0, -0.5], 2) is not None
    with pytest.raises(ValueError, match="1 logprobs for 2 tokens"):
        replies.logprobs_of([-1.0], 2)
    with pytest.raises(ValueError, match="3 logprobs for 2 tokens"):
        replies.logprobs_of([-1.0] * 3, 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        replies.logprobs_of([-1.0, bad], 2)


def test_a_positive_logprob_is_refused_but_rounding_is_not() -> None:
    assert replies.logprobs_of([1e-6], 1) is not None
    with pytest.raises(ValueError, match="positive"):
        replies.logprobs_of([0.5], 1)


@pytest.mark.parametrize("missing", [None, -9999.0])
def test_one_missing_logprob_makes_all_of_them_none(missing: float | None) -> None:
    assert replies.logprobs_of([-1.0, missing], 2) is None


@pytest.mark.parametrize("ids", [[-1], [1 << 40]])
def test_ids_are_non_negative_and_of_32_bits(ids: list[int]) -> None:
    with pytest.raises(ValueError):
        replies.ids_of(ids)


def test_version_spans_must_cover_every_token() -> None:
    assert replies.spans_of([("3", 0, 2), ("4", 2, 5)], 5) == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 5))
    for spans in ([("3", 0, 4)], [("3", 1, 5)], [("3", 0, 2), ("4", 3, 5)]):
        with pytest.raises(ValueError):
            replies.spans_of(spans, 5)


def test_a_version_that_was_never_set_is_minus_one_and_one_that_is_not_a_number_is_refused() -> None:
    assert replies.spans_of([], 5) == ()
    assert replies.spans_of([("default", 0, 5)], 5) == (VersionSpan(-1, 0, 5),)
    assert replies.spans_of([("default", 0, 2), ("7", 2, 5)], 5) == (VersionSpan(-1, 0, 2), VersionSpan(7, 2, 5))
    with pytest.raises(ValueError, match="'main' is not a number"):
        replies.spans_of([("main", 0, 5)], 5)


def test_token_placeholders_are_parsed() -> None:
    assert replies.placeholder_id("token_id:42") == 42
    with pytest.raises(ValueError):
        replies.placeholder_id(" the")
