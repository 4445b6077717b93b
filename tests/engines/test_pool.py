"""The heap against the plain rule: `pick` always returns the least loaded engine that is up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollyard.engines import EngineSpec, Health, Kind, VllmEngine, open_http
from rollyard.engines.pool.pool import EnginePool, PoolMember

MOVES = st.lists(st.tuples(st.sampled_from(["seat", "unseat", "down", "up", "pick"]), st.integers(0, 3)), max_size=300)


@given(MOVES)
async def test_pick_always_returns_the_least_loaded_engine_that_is_up(moves: list[tuple[str, int]]) -> None:
    async with open_http() as http:
        pool = EnginePool("p")
        members = [
            PoolMember(VllmEngine(EngineSpec(f"e{i}", "http://x", Kind.VLLM, capacity=i + 1), http), pool)
            for i in range(4)
        ]
        for member in members:
            pool.add(member)
        for move, index in moves:
            member = members[index]
            if move == "seat":
                member.seat()
            elif move == "unseat" and member.stats.sessions:
                member.unseat()
            elif move in ("up", "down"):
                member.set_health(Health(move))
            for avoid in ((), (member,)):
                up = [m.load for m in members if m.health is Health.UP and m not in avoid]
                picked = pool.pick(avoid)
                assert (picked.load if picked else None) == (min(up) if up else None)
        assert len(pool._heap) <= 64 + 4 * 4 + 1
