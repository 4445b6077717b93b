"""Names whose lookups take long: they must not occupy the threads that all sandboxes share."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rollyard.core.egress import HostRule
from rollyard.sandbox.egress.base import Egress, ProxyBounds, Refused
from rollyard.sandbox.egress.gate import LOOKUPS, EgressGate


async def test_a_lookup_that_was_given_up_counts_until_its_thread_is_free():
    running, most, may_end = 0, 0, asyncio.Event()

    async def slow(host: str, port: int) -> Sequence[str]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.shield(asyncio.ensure_future(may_end.wait()))
        running -= 1
        return ["1.1.1.1"]

    rules = (HostRule("slow.test", (443,)),)
    gate = EgressGate(Egress(rules, resolve=slow, bounds=ProxyBounds(connect_s=0.02)))
    for _ in range(2 * LOOKUPS):
        with pytest.raises(Refused, match="was not looked up in time"):
            await gate.addresses("slow.test", 443)
    assert (running, most) == (LOOKUPS, LOOKUPS)
    may_end.set()
    async with asyncio.timeout(60):
        while running:
            await asyncio.sleep(0)
    gate._egress = replace(gate._egress, bounds=ProxyBounds())
    assert await gate.addresses("slow.test", 443) == ["1.1.1.1"]
