"""Listings of the store's rollouts, all pages of them."""

from __future__ import annotations

from rollyard.core import Rollout, State
from rollyard.store import Store


async def all_rollouts(store: Store, state: State | None = None) -> list[Rollout]:
    """Returns the rollouts of all runs."""
    found: list[Rollout] = []
    cursor: str | None = None
    while True:
        page = await store.list(state=state, after=cursor, limit=1000)
        found += page.rollouts
        if not page.rollouts or (cursor := page.next_cursor) is None:
            return found
