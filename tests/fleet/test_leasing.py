"""How a head fills its nodes: in batches, and taking no more rollouts from the queue than there is room for."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollyard.core import Rollout
from tests.fleet.fleet_site import loop_node, open_head
from tests.service.site import engine_table, finish, scripted


async def test_rollouts_that_no_node_has_room_for_stay_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rollouts are being read for places that nodes want, every call of a node triggers another admission
    pass."""
    async with scripted(finish()) as engine:
        async with open_head(tmp_path, engines=[engine_table(engine)]) as site, loop_node(site, tmp_path, "n1"):
            pipeline = site.served.app_state.pipeline
            head = site.served.app_state.head
            get_many, read, most = pipeline.store.get_many, list[str](), 0

            async def looked_at_meanwhile(ids: Sequence[str]) -> Sequence[Rollout]:
                nonlocal most
                for _ in range(5):
                    head.nodes.notify()
                    await asyncio.sleep(0)
                    most = max(most, len(pipeline.starting))
                read.extend(ids)
                return await get_many(ids)

            monkeypatch.setattr(pipeline.store, "get_many", looked_at_meanwhile)
            ids = [f"r{number}" for number in range(24)]
            await site.submit(*ids)
            for one in ids:
                assert (await site.ended(one))["attempt"] == 1
            assert sorted(read) == sorted(ids), "each was read once, in its turn"
            assert most < len(ids)
        await engine.idle()
