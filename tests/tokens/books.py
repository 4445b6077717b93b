"""Helpers for the tests of splicing: a book, an engine's reply to record in it, and the check of its traces."""

import copy
from typing import Any

from rollyard.core import Sampling, Trajectory
from rollyard.tokens import Renderer, verify
from rollyard.tokens.splice import ConversationBook, PreparedTurn

SHELL = {"type": "function", "function": {"name": "shell", "description": "", "parameters": {"type": "object"}}}
START = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]


def book(renderer: Renderer, **more: Any) -> ConversationBook:
    return ConversationBook(renderer, sampling=Sampling(), policy="p", model="m", **more)


def keep(
    it: ConversationBook, renderer: Renderer, turn: PreparedTurn, text: str, *, is_cut: bool = False, **more: Any
) -> Any:
    """Records a reply: the tokens of a text and (unless cut off) the stop token."""
    ids = [*renderer.encode(text), *(() if is_cut else renderer.stop_token_ids[:1])]
    parsed = it.keep(
        turn,
        ids,
        [-0.5] * len(ids),
        finish_reason="length" if is_cut else "stop",
        versions=[(3, 0, len(ids))],
        logprobs_kind="processed",
        **more,
    )
    return ids, copy.deepcopy(dict(parsed.message))


def proven(it: ConversationBook) -> list[int]:
    """Verifies all traces; returns the number of owned spans in each."""
    traces = it.traces()
    verify(Trajectory("r", 1, traces=traces))
    owned = [span.turn for trace in traces for span in trace.spans if span.is_owned]
    assert sorted(owned) == list(range(it.turns))
    assert sum(trace.sampled_tokens for trace in traces) == it.sampled_tokens
    return [sum(span.is_owned for span in trace.spans) for trace in traces]


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {arguments}}}\n</tool_call>'
