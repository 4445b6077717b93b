"""Conformance checks of stores for tokens, sign-ins, owners, keys and results.

They are run like those of `store_conformance`.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

from rollyard.core import Ending, Group, Outcome, Position, Run, State, id_of, key_of
from rollyard.core.access import Access, AuditEntry, LoginRecord, TokenRecord
from rollyard.core.failure import InternalError
from rollyard.store.base import ItemKind
from rollyard.store.sql import access
from rollyard.testing.store_conformance import QUEUED, Check, Open, advance, completed, opened, submission

ACCESS_CHECKS: list[Check] = []
"""Every check, in the order of this file."""


def _check(check: Check) -> Check:
    ACCESS_CHECKS.append(check)
    return check


@_check
async def tokens_are_stored_until_they_are_revoked(open_store: Open) -> None:
    first = TokenRecord("t1", Access.TRAINER, "00" * 32, "alice", ("a-*",), ("actor",), 1.5, "admin", 9.5)
    second = TokenRecord("t2", Access.READER, "11" * 32, created_at=1.0)
    async with opened(open_store) as store:
        await store.put_token(first)
        await store.put_token(second)
        await store.put_token(replace(first, digest="22" * 32))
    async with opened(open_store) as store:
        assert list(await store.tokens()) == [second, replace(first, digest="22" * 32)]
        await store.delete_token("t1")
        await store.delete_token("never there")
        assert list(await store.tokens()) == [second]


@_check
async def sign_ins_are_stored_until_they_end(open_store: Open) -> None:
    later, first, other = (
        LoginRecord(digest * 32, "t1", "ff" * 32, created_at, 99.5)
        for digest, created_at in (("00", 2.5), ("11", 1.5), ("22", 3.0))
    )
    async with opened(open_store) as store:
        assert list(await store.logins()) == []
        for record in (later, first, other):
            await store.put_login(record)
    async with opened(open_store) as store:
        assert list(await store.logins()) == [first, later, other], "in order of creation"
        await store.delete_logins([first.digest, "never there", other.digest])
        await store.delete_logins([])
    async with opened(open_store) as store:
        assert list(await store.logins()) == [later]


@_check
async def a_policy_has_one_owner_or_none(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_owner("actor", "t1")
        await store.put_owner("actor", "t2")
        await store.put_owner("critic", "t1")
        await store.put_owner("critic", None)
    async with opened(open_store) as store:
        assert await store.owners() == {"actor": "t2"}


@_check
async def the_audit_log_is_read_newest_first_in_pages(open_store: Open) -> None:
    entries = [AuditEntry(float(n), "t1", "create_token", f"t{n}", {"name": "é"}) for n in range(5)]
    async with opened(open_store) as store:
        for entry in entries:
            await store.add_audit(entry)
    async with opened(open_store) as store:
        first = await store.audit(limit=2)
        second = await store.audit(before=first[-1].seq, limit=10)
        listed = [*first, *second]
        assert [replace(one, seq=0) for one in listed] == entries[::-1]
        assert [one.seq for one in listed] == sorted({one.seq for one in listed}, reverse=True)


@_check
async def the_audit_log_deletes_its_oldest_entries(open_store: Open) -> None:
    with mock.patch.object(access, "AUDIT_ENTRIES", 3):
        async with opened(open_store) as store:
            for number in range(5):
                await store.add_audit(AuditEntry(float(number), "t1", "create_token", f"t{number}"))
            assert [one.target for one in await store.audit(limit=10)] == ["t4", "t3", "t2"]


@_check
async def keys_are_looked_up_with_their_runs(open_store: Open) -> None:
    async with opened(open_store) as store:
        for name in ("a", "b"):
            await store.put_run(Run(name), {})
            await store.submit([submission(f"{name}~r", run=name), submission(f"{name}~only-{name}", run=name)])
            await store.put_groups([(Group(f"{name}~g", name, 1), {})], [])
        keys = ["a~r", "b~r", "a~only-b", "b~only-b", "r"]
        assert await store.runs_of(ItemKind.ROLLOUT, keys) == {"a~r": "a", "b~r": "b", "b~only-b": "b"}
        assert await store.runs_of(ItemKind.GROUP, ["a~g", "g"]) == {"a~g": "a"}
        for kind in (ItemKind.DRAW, ItemKind.EVAL):
            assert await store.runs_of(kind, keys) == {}
        assert await store.runs_of(ItemKind.ROLLOUT, []) == {}
        assert await store.named(ItemKind.ROLLOUT, "r") == {"a~r": "a", "b~r": "b"}
        assert await store.named(ItemKind.ROLLOUT, "only-b") == {"b~only-b": "b"}
        assert await store.named(ItemKind.ROLLOUT, "a~r") == {"a~r": "a"}, "a key also names itself"
        assert await store.named(ItemKind.GROUP, "g") == {"a~g": "a", "b~g": "b"}
        assert await store.named(ItemKind.EVAL, "r") == {}


@_check
async def ids_are_found_by_their_prefix(open_store: Open) -> None:
    """The keys of other runs whose names have the prefix are not found in the default run, however many there are."""
    ids = {"default": ["g-1", "g-2", "gr", "gz", "h"], "gr": [f"g-{n}" for n in range(9)], "gr-2": ["G-1", "g_1"]}
    async with opened(open_store) as store:
        for run, names in ids.items():
            await store.put_run(Run(run), {})
            await store.submit([submission(key_of(run, name), run=run) for name in names])
            await store.put_groups([(Group(key_of(run, "g"), run, 1), {})], [])

        async def found(prefix: str, *runs: str, limit: int = 20) -> list[str]:
            keys = await store.prefixed(ItemKind.ROLLOUT, prefix, runs, limit)
            assert all(key == key_of(run, id_of(key)) for key, run in keys.items())
            return sorted(keys)

        assert await found("g", "default") == ["g-1", "g-2", "gr", "gz"]
        assert await found("g", "default", limit=4) == ["g-1", "g-2", "gr", "gz"]
        assert len(await found("g", "default", limit=3)) == len(await found("g", *ids, limit=3)) == 3
        assert await found("g-1", *ids) == ["g-1", "gr~g-1"]
        assert (await found("gz", *ids), await found("gz", "gr"), await found("gzz", *ids)) == (["gz"], [], [])
        assert await found("g", "gr-2") == ["gr-2~g_1"], "upper and lower case differ"
        assert await found("g") == []
        groups = await store.prefixed(ItemKind.GROUP, "g", list(ids), 20)
        assert sorted(groups) == ["g", "gr-2~g", "gr~g"]
        assert await store.prefixed(ItemKind.DRAW, "g", list(ids), 20) == {}
        assert await store.prefixed(ItemKind.EVAL, "g", list(ids), 20) == {}


@_check
async def the_results_of_a_run_are_counted(open_store: Open) -> None:
    lost = Ending(Outcome.FAILED, failure=InternalError("lost").failure("run"))
    async with opened(open_store) as store:
        for run in ("a", "b", "empty"):
            await store.put_run(Run(run), {})
        await store.submit([submission(f"a~r{n}", run="a", group="a~g" if n else None) for n in range(5)])
        await store.submit([submission("b~r", run="b")])
        assert await store.has_unfinished() and not await store.has_unfinished(["empty"])
        await store.end("a~r0", QUEUED, completed(0.25))
        await store.end("a~r1", QUEUED, completed(0.75))
        await store.end("a~r2", QUEUED, lost)
        await advance(store, "a~r3", State.RUN)
        await store.request_cancel("b~r", "enough")
        results = await store.results_of()
        assert set(results) == {"a", "b"}
        a, b = results["a"], results["b"]
        assert a.states == {State.ENDED: 3, State.RUN: 1, State.QUEUED: 1}
        assert (a.rewarded, a.mean_reward, a.trainable) == (2, 0.5, 2)
        assert (b.states, b.rewarded, b.mean_reward, b.trainable) == ({State.ENDED: 1}, 0, None, 0)
        last = max([(await store.get(f"a~r{n}")).updated_at for n in range(5)])
        assert a.active_at is not None and abs(a.active_at - last) < 0.001
        assert await store.results_of(["a"]) == {"a": a} and await store.results_of(["empty"]) == {}
        assert [await store.has_unfinished(runs) for runs in (None, ["a"], ["b"], ["a", "b"])] == [
            True,
            True,
            False,
            True,
        ]
        assert await store.has_unfinished(None, "g") and not await store.has_unfinished(["b"], "g")
        for number, state in ((3, State.RUN), (4, State.QUEUED)):
            await store.end(f"a~r{number}", Position(state, 1), lost)
        assert not await store.has_unfinished() and not await store.has_unfinished(["a"], "g")


@_check
async def listings_cover_one_run_several_or_none(open_store: Open) -> None:
    async with opened(open_store) as store:
        for name in ("a", "b", "c"):
            await store.put_run(Run(name), {})
            await store.submit([submission(f"{name}~r", run=name, group=f"{name}~g")])

        async def ids(*runs: str) -> list[str]:
            return [rollout.id for rollout in (await store.list(runs=runs)).rollouts]

        assert (await ids("b"), await ids("c", "a"), await ids()) == (["b~r"], ["a~r", "c~r"], [])
        of_group = [rollout.id for rollout in (await store.list(group_named="g")).rollouts]
        assert of_group == ["a~r", "b~r", "c~r"]
        only = await store.list(group_named="g", runs=["b", "c"], limit=1)
        assert [rollout.id for rollout in only.rollouts] == ["b~r"]
        assert (await store.list(group_named="h")).rollouts == ()
