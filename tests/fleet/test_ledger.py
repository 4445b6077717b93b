"""The store of a node's pipeline: items are sent in order, once, and kept until the head has them."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.core import Artifact, LostAttempt, Position, Rollout, State, Task
from rollyard.core.failure import NotFound
from rollyard.fleet import ledger as module
from rollyard.fleet.ledger import NodeLedger
from rollyard.fleet.messages import Blob, Ended, Key, Moved, Returned, Saved
from rollyard.pipeline import ArtifactFolder
from rollyard.store.base import Retention, Stale, SweepResult
from rollyard.store.codec import decode_trajectory
from rollyard.testing.store_conformance import completed, trajectory

MANY, LARGE = 100, 1 << 30
LOST = LostAttempt(1, "engine_unavailable", "away")


def rollout(name: str = "r1", attempt: int = 1) -> Rollout:
    return Rollout(name, "run", Task("shell"), position=Position(State.QUEUED, attempt))


class Site:
    """A ledger with some rollouts in RUN, and nothing to send yet."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.news = 0
        self.folder = ArtifactFolder(folder)
        self.ledger = NodeLedger(self.folder, on_news=self._on_news)
        for name in names:
            assert self.ledger.accept(rollout(name))
            self.begin(name)
        self.acknowledge_all()

    def _on_news(self) -> None:
        self.news += 1

    def begin(self, name: str, attempt: int = 1) -> None:
        at = Position(State.QUEUED, attempt)
        for state in (State.INIT, State.READY, State.RUN):
            self.ledger.move(name, at, at.to(state))
            at = at.to(state)

    def acknowledge_all(self, *refused: Key) -> list[object]:
        """Sends what a report would, with an answer of the head. Returns the items."""
        entries = self.ledger.next(MANY, LARGE)
        self.ledger.acknowledge(entries, refused)
        return [entry.item for entry in entries]


RUNNING = Position(State.RUN, 1)


async def test_a_lease_that_comes_twice_is_accepted_once(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert site.ledger.accept(rollout()) and not site.ledger.accept(rollout())
    assert site.ledger.holds == [Key("r1", 1)]
    assert site.ledger.accept(rollout(attempt=3)), "another attempt is another lease"
    assert not site.ledger.accept(rollout(attempt=2))
    assert site.ledger.holds == [Key("r1", 3)]
    assert (await site.ledger.get("r1")).attempt == 3
    with pytest.raises(NotFound):
        await site.ledger.get("r2")


async def test_all_changes_are_sent_in_order_and_once(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.ledger.accept(rollout())
    site.begin("r1")
    await site.ledger.save_run("r1", RUNNING, trajectory("r1"), {"key": 1})
    ending = asyncio.create_task(site.ledger.end("r1", RUNNING.to(State.EVAL), completed()))
    await asyncio.sleep(0)
    items = site.acknowledge_all()
    assert [type(item) for item in items] == [Moved, Moved, Saved, Ended], "the lease implies INIT"
    assert [item.state for item in items if isinstance(item, Moved)] == [State.READY, State.RUN]
    assert site.news >= 4
    ended = await ending
    assert ended.state is State.ENDED and ended.ending == completed()
    assert site.ledger.holds == [] and site.acknowledge_all() == []


async def test_unanswered_items_are_sent_again(tmp_path: Path) -> None:
    site = Site(tmp_path, "r1", "r2")
    first = site.ledger.requeue("r1", RUNNING, LOST)
    entries = site.ledger.next(MANY, LARGE)
    site.ledger.requeue("r2", RUNNING, LOST)
    assert site.ledger.next(MANY, LARGE)[:1] == entries and not first.done()
    site.ledger.acknowledge(entries, ())
    assert first.done() and [item.key.id for item in site.acknowledge_all() if isinstance(item, Returned)] == ["r2"]


async def test_a_report_is_bounded_but_never_empty(tmp_path: Path) -> None:
    names = [f"r{number}" for number in range(5)]
    site = Site(tmp_path, *names)
    for name in names:
        site.ledger.requeue(name, RUNNING, LOST)
    assert len(site.ledger.next(3, LARGE)) == 3
    assert len(site.ledger.next(MANY, 1)) == 1, "one that is too large by itself goes alone"


async def test_a_refused_attempt_is_stale_and_not_held(tmp_path: Path) -> None:
    site = Site(tmp_path, "r1", "r2")
    mine, refused = site.ledger.requeue("r1", RUNNING, LOST), site.ledger.requeue("r2", RUNNING, LOST)
    site.acknowledge_all(Key("r2", 1))
    assert mine.result() is None
    with pytest.raises(Stale):
        refused.result()
    assert site.ledger.holds == []


async def test_a_refusal_of_an_old_attempt_leaves_the_new_one(tmp_path: Path) -> None:
    site = Site(tmp_path, "r1")
    site.ledger.requeue("r1", RUNNING, LOST)
    assert site.ledger.accept(rollout(attempt=2))
    site.acknowledge_all(Key("r1", 1))
    assert site.ledger.holds == [Key("r1", 2)]
    with pytest.raises(Stale):
        site.ledger.move("r1", RUNNING, RUNNING.to(State.EVAL))


async def test_a_dropped_attempt_is_not_sent(tmp_path: Path) -> None:
    site = Site(tmp_path, "r1", "r2")
    dropped, pending = site.ledger.requeue("r1", RUNNING, LOST), site.ledger.requeue("r2", RUNNING, LOST)
    in_flight = site.ledger.next(MANY, LARGE)
    site.ledger.drop(Key("r1", 1))
    with pytest.raises(Stale):
        dropped.result()
    site.ledger.acknowledge(in_flight, ())
    assert pending.result() is None and len(site.ledger) == 0
    with pytest.raises(Stale):
        await site.ledger.end("r1", RUNNING, completed())


async def test_a_closed_ledger_fails_all_waiters(tmp_path: Path) -> None:
    site = Site(tmp_path, "r1", "r2")
    before = site.ledger.requeue("r1", RUNNING, LOST)
    site.ledger.close()
    for future in (before, site.ledger.requeue("r2", RUNNING, LOST)):
        with pytest.raises(Stale):
            future.result()
    assert len(site.ledger) == 0


async def test_a_trajectory_is_sent_when_it_is_saved_or_else_at_the_end(tmp_path: Path) -> None:
    site = Site(tmp_path, "r1", "r2")
    await site.ledger.save_run("r1", RUNNING, trajectory("r1"), {})
    ends = [
        asyncio.create_task(site.ledger.end("r1", RUNNING.to(State.EVAL), completed())),
        asyncio.create_task(site.ledger.end("r2", RUNNING, completed(), trajectory("r2"))),
    ]
    await asyncio.sleep(0)
    items = {(type(item), item.key.id): item for item in site.acknowledge_all() if isinstance(item, Saved | Ended)}
    await asyncio.gather(*ends)
    first, second = items[Ended, "r1"], items[Ended, "r2"]
    assert isinstance(first, Ended) and first.data is None
    assert isinstance(second, Ended) and second.data is not None
    assert decode_trajectory(second.data).rollout_id == "r2"


async def test_artifacts_are_sent_unless_they_exceed_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, "r1", "r2")
    data = b"what it left"
    artifact = Artifact("file", "/workspace/file", len(data), hashlib.sha256(data).hexdigest())
    for name in ("r1", "r2"):
        await site.folder.receive("file", data, name, 1)
    await site.ledger.save_run("r1", RUNNING, replace(trajectory("r1"), artifacts=(artifact,)), {})
    monkeypatch.setattr(module, "MOST_ARTIFACT_BYTES", len(data) - 1)
    await site.ledger.save_run("r2", RUNNING, replace(trajectory("r2"), artifacts=(artifact,)), {})
    artifacts = [item.artifacts for item in site.acknowledge_all() if isinstance(item, Saved)]
    assert artifacts == [[Blob("file", data)], []]


async def test_the_sweep_deletes_artifacts_of_attempts_without_an_end(tmp_path: Path) -> None:
    site = Site(tmp_path, "r1", "r2", "r3")
    site.ledger.drop(Key("r1", 1))
    site.ledger.drop(Key("r2", 1))
    site.ledger.accept(rollout("r2", attempt=2))
    end = asyncio.create_task(site.ledger.end("r3", RUNNING, completed()))
    await asyncio.sleep(0)
    site.acknowledge_all()
    await end
    assert await site.ledger.sweep(Retention(3600.0)) == SweepResult(("r1",)), (
        "r2 is here again, r3 has cleaned up itself"
    )
    assert await site.ledger.sweep(Retention(3600.0)) == SweepResult()
    site.ledger.drop(Key("r2", 2))
    assert await site.ledger.sweep(Retention(3600.0)) == SweepResult(("r2",))


async def test_rollouts_that_have_not_started_are_given_back_or_cancelled_by_the_head(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.ledger.accept(rollout("r1"))
    site.ledger.accept(rollout("r2"))
    site.ledger.give_back(Key("r1", 1))
    site.ledger.cancelled(Key("r2", 1), "asked")
    assert site.ledger.holds == [Key("r1", 1), Key("r2", 1)], "until the head has answered"
    returned, ended = site.acknowledge_all()
    assert isinstance(returned, Returned) and returned.is_excused and returned.lost.code == "drained"
    assert isinstance(ended, Ended) and '"cancelled"' in ended.ending
    assert site.ledger.holds == []
