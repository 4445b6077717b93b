"""The texts of a trace's tokens, by the tokenizer of an engine that serves the trace's model."""

from __future__ import annotations

import asyncio
import logging

from rollyard.core import Trace
from rollyard.engines.base import Engine
from rollyard.service.app_state import AppState
from rollyard.tokens import Renderer

log = logging.getLogger("rollyard.service")

INCOMPLETE = "\ufffd"  # decoded from some of the bytes of a character
MOST_BYTES = 4  # of a character


async def token_texts(app_state: AppState, trace: Trace) -> list[str] | None:
    """None: no engine serves the model, or its tokenizer cannot be loaded."""
    engine = _engine(app_state, trace)
    if engine is None:
        return None
    try:
        renderer = await app_state.resources.renderers.of(engine)
    except Exception as error:  # a tokenizer's files can make their reader raise anything
        log.warning("a tokenizer cannot be loaded", extra={"engine": engine.spec.id, "error": str(error)})
        return None
    return await asyncio.to_thread(_texts, renderer, trace)


def _engine(app_state: AppState, trace: Trace) -> Engine | None:
    for status in app_state.router.list():
        if status.info is not None and (status.spec.policy, status.info.model) == (trace.policy, trace.model):
            return app_state.router.engine(status.spec.id)
    return None


def _texts(renderer: Renderer, trace: Trace) -> list[str]:
    """A character of several tokens is the text of its last one, and the others have none: joined, the texts are the
    text of the trace."""
    singles = {token: renderer.decode([token]) for token in set(trace.token_ids)}
    texts, held = list[str](), list[int]()
    for place, token in enumerate(trace.token_ids, 1):
        held.append(token)
        text = singles[token] if len(held) == 1 else renderer.decode(held)
        if text.endswith(INCOMPLETE) and len(held) < MOST_BYTES and place < len(trace.token_ids):
            texts.append("")
        else:
            texts.append(text)
            held = []
    return texts
