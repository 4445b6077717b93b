"""Policies survive a restart: the newest record of each, and a pause in progress."""

from __future__ import annotations

from rollyard.core.policy import PauseMode, PolicyEngine, PolicyRecord
from rollyard.store.base import Store
from tests.store.conftest import AnyOpener

PAUSED = PolicyRecord(
    "actor",
    version=7,
    is_named=True,
    is_paused=True,
    mode=PauseMode.KEEP,
    lease_s=12.5,
    holder="a1b2",
    engines=(PolicyEngine("e1", 7), PolicyEngine("e2", 6, is_paused=True, error="it did not resume: ü")),
)


async def test_the_newest_record_of_a_policy_survives_a_restart(open_any: AnyOpener) -> None:
    store: Store = await open_any()
    assert list(await store.policies()) == []
    await store.put_policy(PolicyRecord("actor"))
    await store.put_policy(PolicyRecord("critic", version=1, is_named=True))
    await store.put_policy(PAUSED)
    await store.close()
    store = await open_any()
    assert list(await store.policies()) == [PAUSED, PolicyRecord("critic", version=1, is_named=True)]
    await store.close()
