"""Layers by themselves: real folders, and makers that write what a set-up would."""

import asyncio
import gc
import json
import os
import weakref
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from rollyard.core.failure import MemoryLimit, SandboxLost, SandboxStartFailed, SetupFailed
from rollyard.sandbox import layers as layers_module
from rollyard.sandbox.layers import LayerCache, LayerLease, Make

BIG = 1 << 30


class Maker:
    """Counts its makings; waits at a gate if it has one; fails if it is told to."""

    def __init__(self, *, size_bytes: int = 4096, error: Callable[[], Exception] | None = None) -> None:
        self.count = 0
        self.gate: asyncio.Event | None = None
        self.at_gate = asyncio.Event()
        self._size_bytes, self._error = size_bytes, error

    async def __call__(self, target: Path) -> None:
        self.count += 1
        target.mkdir()
        (target / "file").write_bytes(os.urandom(self._size_bytes))
        if self.gate is not None:
            self.at_gate.set()
            await self.gate.wait()
        if self._error is not None:
            raise self._error()


@pytest.fixture
async def layers(tmp_path: Path) -> AsyncGenerator[LayerCache, None]:
    async with LayerCache(tmp_path, BIG) as layers:
        yield layers


async def made(layers: LayerCache, key: str, make: Make | None = None) -> LayerLease:
    lease = await layers.get(key, make or Maker())
    lease.release()
    return lease


async def settled(layers: LayerCache) -> list[str]:
    """What lies in the root once everything that was dropped is deleted."""
    while layers._removals:
        await asyncio.wait(layers._removals)
    return sorted(path.name for path in layers.root.iterdir())


async def test_eight_at_once_make_it_once_and_all_get_it(layers: LayerCache):
    make = Maker()
    leases = await asyncio.gather(*(layers.get("k", make) for _ in range(8)))
    assert make.count == 1
    assert {lease.path for lease in leases} == {layers.root / "k" / "files"}
    assert [lease.is_found for lease in leases].count(False) == 1
    assert (layers.made, layers.found, len(layers)) == (1, 7, 1)
    assert (leases[0].path / "file").is_file()
    assert layers.size_bytes >= 4096


async def test_a_layer_is_found_by_the_next_service(tmp_path: Path):
    async with LayerCache(tmp_path, BIG) as first:
        path = (await made(first, "k")).path
        size_bytes = first.size_bytes
    make = Maker()
    async with LayerCache(tmp_path, BIG) as second:
        lease = await made(second, "k", make)
        assert lease.is_found and lease.path == path and make.count == 0
        assert second.size_bytes == size_bytes


async def test_a_layer_of_before_the_last_boot_is_made_anew(tmp_path: Path):
    async with LayerCache(tmp_path, BIG) as first:
        await made(first, "k")
    label = tmp_path / "k" / "layer.json"
    label.write_text(json.dumps({**json.loads(label.read_text()), "boot_id": "another"}))
    async with LayerCache(tmp_path, BIG) as second:
        assert len(second) == 0
        assert not (await made(second, "k")).is_found
        assert await settled(second) == ["k"]


@pytest.mark.parametrize("harm", ["no label", "half a label", "no files", "another's label"])
async def test_what_is_not_whole_is_swept(tmp_path: Path, harm: str):
    async with LayerCache(tmp_path, BIG) as first:
        await made(first, "k")
    match harm:
        case "no label":
            (tmp_path / "k" / "layer.json").unlink()
        case "half a label":
            (tmp_path / "k" / "layer.json").write_text('{"key": "k", "si')
        case "no files":
            (tmp_path / "k" / "files").rename(tmp_path / "k" / "elsewhere")
        case _:
            (tmp_path / "k").rename(tmp_path / "other")
    (tmp_path / ".making-k-x").mkdir()
    (tmp_path / ".run-x").mkdir()
    async with LayerCache(tmp_path, BIG) as second:
        assert await settled(second) == []
        assert not (await made(second, "k")).is_found


async def test_a_set_up_that_fails_fails_all_with_one_try_and_each_with_its_own_error(layers: LayerCache):
    make = Maker(error=lambda: SetupFailed("no such package", status=100))
    ends = await asyncio.gather(*(layers.get("k", make) for _ in range(8)), return_exceptions=True)
    assert make.count == 1
    assert len({id(end) for end in ends}) == 8
    for end in ends:
        assert isinstance(end, SetupFailed)
        assert (end.detail, end.data) == ("no such package", {"status": 100})
    assert await settled(layers) == []


async def test_a_remembered_failure_keeps_nothing_of_what_failed_alive(layers: LayerCache):
    left: list[weakref.ref[Maker]] = []

    async def make(target: Path) -> None:
        sandbox = Maker()  # as good as any: what a set-up had in its hands
        left.append(weakref.ref(sandbox))
        try:
            raise MemoryLimit("too much")
        except MemoryLimit as error:
            raise SetupFailed("the set-up hit a limit") from error

    with pytest.raises(SetupFailed):
        await layers.get("k", make)
    gc.collect()
    assert left[0]() is None
    with pytest.raises(SetupFailed, match="hit a limit"):
        await layers.get("k", make)
    assert len(left) == 1


async def test_a_failure_is_remembered_for_the_same_terms_only_and_not_for_ever(
    layers: LayerCache, monkeypatch: pytest.MonkeyPatch
):
    make = Maker(error=lambda: SetupFailed("too slow"))
    for _ in range(3):
        with pytest.raises(SetupFailed):
            await layers.get("k", make, terms="1 s")
    assert make.count == 1
    (await layers.get("k", Maker(), terms="300 s")).release()
    with pytest.raises(SetupFailed):
        await layers.get("j", make)
    monkeypatch.setattr(layers_module, "FAILED_S", 0.0)
    with pytest.raises(SetupFailed):
        await layers.get("i", make)
    assert not (await made(layers, "i")).is_found, "its time was over"


async def test_how_many_failures_are_remembered_is_bounded(layers: LayerCache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layers_module, "MOST_FAILED", 2)
    make = Maker(error=lambda: SetupFailed("no"))
    for key in ("a", "b", "c"):
        with pytest.raises(SetupFailed):
            await layers.get(key, make)
    with pytest.raises(SetupFailed):
        await layers.get("c", make)
    assert make.count == 3
    assert not (await made(layers, "a")).is_found, "the oldest was forgotten"


async def test_an_infrastructure_failure_is_the_makers_own_and_the_next_makes_it(layers: LayerCache):
    errors: list[Exception | None] = [SandboxLost("the host was rebooted"), None]
    count = 0

    async def make(target: Path) -> None:
        nonlocal count
        count += 1
        target.mkdir()
        await asyncio.sleep(0)
        if (error := errors.pop(0)) is not None:
            raise error

    ends = await asyncio.gather(*(layers.get("k", make) for _ in range(4)), return_exceptions=True)
    assert [type(end).__name__ for end in ends] == ["SandboxLost", "Lease", "Lease", "Lease"]
    assert count == 2


async def test_a_maker_that_is_cancelled_hands_over_to_the_next(layers: LayerCache):
    make = Maker()
    make.gate = asyncio.Event()
    first = asyncio.create_task(layers.get("k", make))
    await make.at_gate.wait()
    others = [asyncio.create_task(layers.get("k", make)) for _ in range(3)]
    await asyncio.sleep(0)
    make.at_gate.clear()
    first.cancel()
    await asyncio.wait([first])
    await make.at_gate.wait()  # another one is making it
    assert first.cancelled() and make.count == 2
    make.gate.set()
    leases = await asyncio.gather(*others)
    assert [lease.is_found for lease in leases].count(False) == 1
    assert await settled(layers) == ["k"]


async def test_who_only_waits_may_be_cancelled_and_harms_nobody(layers: LayerCache):
    make = Maker()
    make.gate = asyncio.Event()
    first = asyncio.create_task(layers.get("k", make))
    await make.at_gate.wait()
    waiter = asyncio.create_task(layers.get("k", make))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait([waiter])
    make.gate.set()
    assert not (await first).is_found


async def test_the_least_recently_used_go_first_and_a_leased_one_never(tmp_path: Path):
    size_bytes = 1 << 20
    async with LayerCache(tmp_path, int(2.5 * size_bytes)) as layers:
        leased = await layers.get("a", Maker(size_bytes=size_bytes))
        await made(layers, "b", Maker(size_bytes=size_bytes))
        await made(layers, "c", Maker(size_bytes=size_bytes))  # beyond the bound: `a` is older, and leased
        assert await settled(layers) == ["a", "c"]
        assert (leased.path / "file").is_file()
        leased.release()
        leased.release()
        await made(layers, "c", Maker(size_bytes=size_bytes))
        await made(layers, "d", Maker(size_bytes=size_bytes))
        assert await settled(layers) == ["c", "d"]
        assert (layers.pruned, len(layers)) == (2, 2)


async def test_layers_of_many_empty_files_are_bounded_too(tmp_path: Path):
    async def make(target: Path) -> None:
        target.mkdir(parents=True)
        for number in range(600):
            (target / str(number)).touch()

    async with LayerCache(tmp_path, 10 << 20) as layers:  # and 1000 files
        for key in ("a", "b"):
            (await layers.get(key, make)).release()
        assert await settled(layers) == ["b"]
        assert layers.size_bytes < 1 << 20


async def test_the_order_of_use_outlives_the_service(tmp_path: Path):
    size_bytes = 1 << 20
    async with LayerCache(tmp_path, BIG) as layers:
        for key in ("a", "b"):
            await made(layers, key, Maker(size_bytes=size_bytes))
    os.utime(tmp_path / "b" / "layer.json", (1.0, 1.0))
    async with LayerCache(tmp_path, int(1.5 * size_bytes)) as layers:
        assert await settled(layers) == ["a"]


async def test_one_beyond_the_bound_alone_serves_its_group_and_goes_with_the_next(tmp_path: Path):
    async with LayerCache(tmp_path, 4096) as layers:
        lease = await layers.get("big", Maker(size_bytes=1 << 20))
        other = await layers.get("big", Maker())
        assert other.is_found and other.path.is_dir()
        lease.release()
        other.release()
        await made(layers, "next")
        assert "big" not in await settled(layers)


async def test_unwritable_folders_are_deleted_too(tmp_path: Path):
    async def make(target: Path) -> None:
        (target / "shut" / "deep").mkdir(parents=True)
        (target / "shut" / "deep").chmod(0)
        (target / "shut").chmod(0o500)
        target.chmod(0o500)

    async with LayerCache(tmp_path, 0) as layers:
        await made(layers, "a", make)
        await made(layers, "b")
        assert await settled(layers) == ["b"]


async def test_a_layer_that_somebody_deleted_is_made_again(layers: LayerCache):
    path = (await made(layers, "k")).path
    path.rename(path.with_name("elsewhere"))
    assert not (await made(layers, "k")).is_found


async def test_what_one_rollout_left_is_gone_when_it_is_discarded(layers: LayerCache):
    scratch = layers.scratch()
    scratch.path.mkdir()
    assert scratch.path.is_relative_to(layers.root)
    scratch.discard()
    scratch.discard()
    assert await settled(layers) == []


async def test_closed_layers_take_nothing_more(tmp_path: Path):
    async with LayerCache(tmp_path, BIG) as layers:
        pass
    with pytest.raises(SandboxStartFailed):
        await layers.get("k", Maker())
    with pytest.raises(SandboxStartFailed):
        layers.scratch()


@pytest.mark.parametrize("key", ["", "../x", "a/b", ".run-x", "a" * 200])
async def test_a_key_is_no_path(layers: LayerCache, key: str):
    with pytest.raises(ValueError, match="not a layer key"):
        await layers.get(key, Maker())
