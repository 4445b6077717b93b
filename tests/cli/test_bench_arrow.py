"""The bench of Arrow and JSON, with a small page."""

from typing import Any

import pytest

from bench import arrow

pytestmark = pytest.mark.slow


async def test_both_formats_of_a_page_are_measured_under_the_same_names(monkeypatch: pytest.MonkeyPatch):
    for name, value in (("GROUPS", 2), ("MEMBERS", 2), ("TOKENS", 160)):
        monkeypatch.setattr(arrow, name, value)
    figures: Any = await arrow.bench_arrow(quick=True)
    arrow_metrics, json_metrics = figures["metrics"], figures["versus"]["json"]
    assert json_metrics.keys() == {"size_mb", "bytes_per_token", "encode_ms", "decode_ms"}
    assert json_metrics.keys() <= arrow_metrics.keys()
    assert (arrow_metrics["traces"], arrow_metrics["tokens_per_trace"]) == (4, 160)


async def test_formats_with_different_content_raise(monkeypatch: pytest.MonkeyPatch):
    for name, value in (("GROUPS", 1), ("MEMBERS", 1), ("TOKENS", 160)):
        monkeypatch.setattr(arrow, name, value)
    seeds = iter(range(100))
    whole = arrow.groups_page
    monkeypatch.setattr(arrow, "groups_page", lambda _, *rest: whole([arrow._group(2 + next(seeds))], *rest))
    with pytest.raises(RuntimeError, match="token_ids of a trace of bench-1-0 differs between Arrow and JSON"):
        await arrow.bench_arrow(quick=True)
