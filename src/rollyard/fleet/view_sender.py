"""A node's answers to what its head asks about running rollouts (`views.py`).

Invariant. A view never ends the node: whatever goes wrong is logged, and the head's reader gets no view.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from rollyard.core import Json
from rollyard.core.failure import NodeUnknown
from rollyard.fleet.head_connection import HeadConnection, HeadUnreachable, NodeRefused
from rollyard.fleet.ledger import NodeLedger
from rollyard.fleet.messages import View, ViewRequest
from rollyard.fleet.views import VIEW_S
from rollyard.pipeline import Pipeline

log = logging.getLogger("rollyard.fleet")

CALL_FIELDS = ("calls", "call_errors", "calls_dropped")

MOST_CALLS_BYTES = 512 << 10
"""The head decodes a log of calls on its event loop. One of 2,000 calls has 340 KB at most, unless an MCP server gives
its tools names that JSON must escape: such a log is not sent."""


class ViewSender:
    """Makes views of a node's rollouts and sends them."""

    def __init__(self, session: str, link: HeadConnection, pipeline: Pipeline, ledger: NodeLedger) -> None:
        self._session = session
        self._link = link
        self._pipeline = pipeline
        self._ledger = ledger

    async def send(self, request: ViewRequest) -> None:
        try:
            view = await self._view(request)
            if view is not None:
                await self._link.view(view, VIEW_S)
        except (HeadUnreachable, NodeUnknown, NodeRefused) as error:
            log.info("a view was not received", extra={"rollout": request.key.id, "why": str(error)})
        except Exception:
            log.exception("a view cannot be made", extra={"rollout": request.key.id})

    async def _view(self, request: ViewRequest) -> View | None:
        """Returns the view, or None if the attempt does not run here."""
        live = self._pipeline.live.get(request.key.id)
        if live is None or live.rollout.attempt != request.key.attempt or not self._ledger.has(request.key):
            return None
        if request.requests:
            return View(self._session, request.id, requests=await live.requests())
        if request.after is None:
            return View(self._session, request.id, calls=_calls(await live.calls()))
        page = await live.page(request.after)
        if page is None:
            return None
        return View(
            self._session,
            request.id,
            page.turns,
            page.sampled_tokens,
            page.messages,
            page.end,
            conversation=page.conversation,
            message_turns=list(page.message_turns),
        )


def _calls(info: Mapping[str, Json]) -> bytes:
    data = msgspec.json.encode({name: info[name] for name in CALL_FIELDS if name in info})
    return data if len(data) <= MOST_CALLS_BYTES else b"{}"
