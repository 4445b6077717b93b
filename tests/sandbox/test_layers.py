"""The layer cache, with real folders and makers that write files as a set-up does."""

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
    """Counts its calls, waits at `gate` if it is set, and raises `error` if there is one."""

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


async def get_and_release(layers: LayerCache, key: str, make: Make | None = None) -> LayerLease:
    lease = await layers.get(key, make or Maker())
    lease.release()
    return lease


async def settled(layers: LayerCache) -> list[str]:
    """Returns the entries of the root once all dropped layers are deleted."""
    while layers._removals:
        await asyncio.wait(layers._removals)
    return sorted(path.name for path in layers.root.iterdir())


async def test_eight_concurrent_callers_make_a_layer_once(layers: LayerCache):
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
        path = (await get_and_release(first, "k")).path
        size_bytes = first.size_bytes
    make = Maker()
    async with LayerCache(tmp_path, BIG) as second:
        lease = await get_and_release(second, "k", make)
        assert lease.is_found and lease.path == path and make.count == 0
        assert second.size_bytes == size_bytes


async def test_a_layer_from_before_the_last_boot_is_made_again(tmp_path: Path):
    async with LayerCache(tmp_path, BIG) as first:
        await get_and_release(first, "k")
    label = tmp_path / "k" / "layer.json"
    label.write_text(json.dumps({**json.loads(label.read_text()), "boot_id": "another"}))
    async with LayerCache(tmp_path, BIG) as second:
        assert len(second) == 0
        assert not (await get_and_release(second, "k")).is_found
        assert await settled(second) == ["k"]


@pytest.mark.parametrize("harm", ["no label", "half a label", "no files", "another's label"])
async def test_incomplete_layers_are_deleted(tmp_path: Path, harm: str):
    async with LayerCache(tmp_path, BIG) as first:
        await get_and_release(first, "k")
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
        assert not (await get_and_release(second, "k")).is_found


async def test_a_failed_set_up_fails_all_callers_after_one_try_each_with_its_own_error(layers: LayerCache):
    make = Maker(error=lambda: SetupFailed("no such package", status=100))
    ends = await asyncio.gather(*(layers.get("k", make) for _ in range(8)), return_exceptions=True)
    assert make.count == 1
    assert len({id(end) for end in ends}) == 8
    for end in ends:
        assert isinstance(end, SetupFailed)
        assert (end.detail, end.data) == ("no such package", {"status": 100})
    assert await settled(layers) == []


async def test_a_cached_failure_holds_no_reference_to_the_failed_set_up(layers: LayerCache):
    refs: list[weakref.ref[Maker]] = []

    async def make(target: Path) -> None:
        sandbox = Maker()  # stands for an object that a set-up uses
        refs.append(weakref.ref(sandbox))
        try:
            raise MemoryLimit("too much")
        except MemoryLimit as error:
            raise SetupFailed("the set-up hit a limit") from error

    with pytest.raises(SetupFailed):
        await layers.get("k", make)
    gc.collect()
    assert refs[0]() is None
    with pytest.raises(SetupFailed, match="hit a limit"):
        await layers.get("k", make)
    assert len(refs) == 1


async def test_a_failure_is_cached_for_the_same_terms_and_expires(layers: LayerCache, monkeypatch: pytest.MonkeyPatch):
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
    assert not (await get_and_release(layers, "i")).is_found, "the cached failure has expired"


async def test_the_number_of_cached_failures_is_bounded(layers: LayerCache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layers_module, "MOST_FAILED", 2)
    make = Maker(error=lambda: SetupFailed("no"))
    for key in ("a", "b", "c"):
        with pytest.raises(SetupFailed):
            await layers.get(key, make)
    with pytest.raises(SetupFailed):
        await layers.get("c", make)
    assert make.count == 3
    assert not (await get_and_release(layers, "a")).is_found, "the oldest was dropped"


async def test_after_an_infrastructure_failure_the_next_caller_makes_the_layer(layers: LayerCache):
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
    assert [type(end).__name__ for end in ends] == ["SandboxLost", "LayerLease", "LayerLease", "LayerLease"]
    assert count == 2


async def test_after_a_cancellation_the_next_caller_makes_the_layer(layers: LayerCache):
    make = Maker()
    make.gate = asyncio.Event()
    first = asyncio.create_task(layers.get("k", make))
    await make.at_gate.wait()
    others = [asyncio.create_task(layers.get("k", make)) for _ in range(3)]
    await asyncio.sleep(0)
    make.at_gate.clear()
    first.cancel()
    await asyncio.wait([first])
    await make.at_gate.wait()  # another caller is making it
    assert first.cancelled() and make.count == 2
    make.gate.set()
    leases = await asyncio.gather(*others)
    assert [lease.is_found for lease in leases].count(False) == 1
    assert await settled(layers) == ["k"]


async def test_cancelling_a_waiting_caller_does_not_affect_the_maker(layers: LayerCache):
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


async def test_the_least_recently_used_are_pruned_first_and_leased_ones_never(tmp_path: Path):
    size_bytes = 1 << 20
    async with LayerCache(tmp_path, int(2.5 * size_bytes)) as layers:
        leased = await layers.get("a", Maker(size_bytes=size_bytes))
        await get_and_release(layers, "b", Maker(size_bytes=size_bytes))
        await get_and_release(layers, "c", Maker(size_bytes=size_bytes))  # above the limit: `a` is older, but leased
        assert await settled(layers) == ["a", "c"]
        assert (leased.path / "file").is_file()
        leased.release()
        leased.release()
        await get_and_release(layers, "c", Maker(size_bytes=size_bytes))
        await get_and_release(layers, "d", Maker(size_bytes=size_bytes))
        assert await settled(layers) == ["c", "d"]
        assert (layers.pruned, len(layers)) == (2, 2)


async def test_layers_of_many_empty_files_are_pruned(tmp_path: Path):
    async def make(target: Path) -> None:
        target.mkdir(parents=True)
        for number in range(600):
            (target / str(number)).touch()

    async with LayerCache(tmp_path, 10 << 20) as layers:  # and 1000 files
        for key in ("a", "b"):
            (await layers.get(key, make)).release()
        assert await settled(layers) == ["b"]
        assert layers.size_bytes < 1 << 20


async def test_the_order_of_use_survives_a_restart(tmp_path: Path):
    size_bytes = 1 << 20
    async with LayerCache(tmp_path, BIG) as layers:
        for key in ("a", "b"):
            await get_and_release(layers, key, Maker(size_bytes=size_bytes))
    os.utime(tmp_path / "b" / "layer.json", (1.0, 1.0))
    async with LayerCache(tmp_path, int(1.5 * size_bytes)) as layers:
        assert await settled(layers) == ["a"]


async def test_a_layer_above_the_limit_serves_its_group_and_is_pruned_by_the_next(tmp_path: Path):
    async with LayerCache(tmp_path, 4096) as layers:
        lease = await layers.get("big", Maker(size_bytes=1 << 20))
        other = await layers.get("big", Maker())
        assert other.is_found and other.path.is_dir()
        lease.release()
        other.release()
        await get_and_release(layers, "next")
        assert "big" not in await settled(layers)


async def test_unwritable_folders_are_deleted(tmp_path: Path):
    async def make(target: Path) -> None:
        (target / "shut" / "deep").mkdir(parents=True)
        (target / "shut" / "deep").chmod(0)
        (target / "shut").chmod(0o500)
        target.chmod(0o500)

    async with LayerCache(tmp_path, 0) as layers:
        await get_and_release(layers, "a", make)
        await get_and_release(layers, "b")
        assert await settled(layers) == ["b"]


async def test_a_layer_deleted_from_disk_is_made_again(layers: LayerCache):
    path = (await get_and_release(layers, "k")).path
    path.rename(path.with_name("elsewhere"))
    assert not (await get_and_release(layers, "k")).is_found


async def test_a_discarded_scratch_layer_is_deleted(layers: LayerCache):
    scratch = layers.scratch()
    scratch.path.mkdir()
    assert scratch.path.is_relative_to(layers.root)
    scratch.discard()
    scratch.discard()
    assert await settled(layers) == []


async def test_a_closed_layer_cache_refuses_calls(tmp_path: Path):
    async with LayerCache(tmp_path, BIG) as layers:
        pass
    with pytest.raises(SandboxStartFailed):
        await layers.get("k", Maker())
    with pytest.raises(SandboxStartFailed):
        layers.scratch()


@pytest.mark.parametrize("key", ["", "../x", "a/b", ".run-x", "a" * 200])
async def test_a_key_that_is_a_path_is_refused(layers: LayerCache, key: str):
    with pytest.raises(ValueError, match="not a layer key"):
        await layers.get(key, Maker())
