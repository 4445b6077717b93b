"""Conformance checks of stores for tokens, owners and keys. They are run like those of `store_conformance`."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

from rollyard.core import Group, Run
from rollyard.core.access import Access, AuditEntry, TokenRecord
from rollyard.store.base import ItemKind
from rollyard.store.sql import access
from rollyard.testing.store_conformance import Check, Open, opened, submission

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
