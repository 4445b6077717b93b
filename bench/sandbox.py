"""`rollyard bench sandbox`: starts, forks, memory and doorways of sandboxes, all in one run.

- `…_start_p50_ms`: from `runtime.start()` to the output of the first command, one sandbox after another. `bubblewrap`
  has the host's /usr, `…_dir` an image folder, `…_sif` a SIF file of the same image.
- `fork16_s`: a group of 16 whose set-up takes 2 s, from the request until the last member has read a file of the
  set-up.
- `concurrent_200_s`: 200 at once, from the request to the last response; `concurrent_200_ok`: whether all responded.
- `rss_mb_per_sandbox`: of those 200 while they run: the proportional set size (PSS, which counts a page shared by n
  processes as 1/n) of every process below this one, plus the growth of this process, minus the launcher and the
  resource monitor as they were before; divided by 200. For processes that the kernel hides from an ordinary user, it is
  their private memory. Files in the page cache are not counted.
- `doorway_p50_ms`: an HTTP request from inside to an app outside, over one connection, timed by the client inside;
  `doorway_new_p50_ms`: each over a new connection.

A figure that cannot be measured on this machine is null, and `…_null` has the reason. The peers are the same programs
on the command line, from start to output, in the same run.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from bench._by_hand import by_hand
from bench._doorway import measure_doorway
from bench._parts import (
    Images,
    Missing,
    forget_image,
    make_images,
    make_runtime,
    quantiles_ms,
)
from rollyard.core import Json, RollyardError
from rollyard.sandbox import BubblewrapRuntime, Sandbox, SandboxSpec
from rollyard.sandbox.launcher import kernel
from rollyard.sandbox.layers import LayerCache

MANY = 200
MEMBERS = 16
PREPARE = "sleep 2; echo prepared > /workspace/prepared"
LEASE_S = 600.0


async def bench_sandbox(*, quick: bool = False, peers: bool = True) -> dict[str, Json]:
    """Returns `metrics` and `versus`; a peer that cannot be measured is {"error": reason}."""
    count, slow_count = (20, 5) if quick else (200, 40)
    metrics: dict[str, Json] = {}
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as name:
        place = Path(name)
        images = await asyncio.to_thread(make_images, place)
        folder, sif = str(images.folder), str(images.sif or "")
        for runtime, name, image, times in (
            ("bubblewrap", "bubblewrap", None, count),
            ("bubblewrap", "bubblewrap_dir", folder, count),
            ("apptainer", "apptainer_dir", folder, slow_count),
            ("apptainer", "apptainer_sif", sif, slow_count),
            ("oci", "oci", folder, slow_count // 2 + 2),
        ):
            await _try(
                metrics, f"{name}_start_p50_ms", partial(_starts, runtime, name, place / runtime, images, image, times)
            )
        async with BubblewrapRuntime(root=place / "together") as opened:
            await _try(metrics, "fork16_s", partial(_fork, opened))
            await _try(metrics, f"concurrent_{MANY}_ok", partial(_many, opened))
            await _try(metrics, "doorway_p50_ms", partial(measure_doorway, opened, 200 if quick else 2000))
        versus = await asyncio.to_thread(by_hand, images, 10 if quick else 40) if peers else {}
    return {"metrics": metrics, "versus": versus}


async def _try(metrics: dict[str, Json], name: str, work: Callable[[], Awaitable[dict[str, Json]]]) -> None:
    """Runs one part. If this machine lacks it, its metric is null with a reason, and the bench continues."""
    try:
        metrics |= await work()
    except (Missing, RollyardError, OSError, RuntimeError) as error:
        metrics[name] = None
        metrics[f"{name}_null"] = (str(error).splitlines() or [type(error).__name__])[0][:300]


async def _starts(
    runtime: str, name: str, root: Path, images: Images, image: str | None, count: int
) -> dict[str, Json]:
    if image == "":
        raise Missing("no SIF file can be built here; install Apptainer")
    times: list[float] = []
    async with make_runtime(runtime, root, images=images) as opened:
        for _ in range(count + 2):  # the first ones start the launcher and warm up the caches
            started_at = time.perf_counter()
            sandbox = await opened.start(SandboxSpec(image=image, owner="bench"), lease_s=LEASE_S)
            await _answers(sandbox)
            times.append(time.perf_counter() - started_at)
            await sandbox.kill()
        await forget_image(opened, images)
    p50, p99 = quantiles_ms(times[2:])
    return {f"{name}_start_p50_ms": p50, f"{name}_start_p99_ms": p99}


async def _answers(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["echo", "ok"], timeout_s=60.0)
    if result.stdout != b"ok\n":
        raise RuntimeError(f"echo returned {result}")


async def _fork(runtime: BubblewrapRuntime) -> dict[str, Json]:
    """As in the pipeline: the first member creates the layer, the others wait for it, and each starts on it."""

    async def prepare(target: Path) -> None:
        sandbox = await runtime.start(SandboxSpec(owner="bench"), lease_s=LEASE_S)
        try:
            prepared = await sandbox.exec(PREPARE, timeout_s=60.0)
            if prepared.status != 0:
                raise RuntimeError(f"the set-up returned {prepared}")
            await sandbox.freeze(target)
        finally:
            await sandbox.kill()

    async def member(layers: LayerCache) -> tuple[Sandbox, float]:
        lease = await layers.get("bench", prepare)
        spec = SandboxSpec(layers=(lease.path,), owner="bench")
        sandbox = await runtime.start(spec, lease_s=LEASE_S)
        result = await sandbox.exec("cat prepared", timeout_s=60.0)
        if result.stdout != b"prepared\n":
            raise RuntimeError(f"a member of the group read {result}")
        took_s = time.perf_counter() - started_at
        lease.release()
        return sandbox, took_s

    async with LayerCache(runtime.layer_root, 1 << 30, remove=runtime.remove) as layers:
        started_at = time.perf_counter()
        members = await asyncio.gather(*[member(layers) for _ in range(MEMBERS)])
        await asyncio.gather(*[sandbox.kill() for sandbox, _ in members])
    return {"fork16_s": round(max(took_s for _, took_s in members), 3)}


async def _many(runtime: BubblewrapRuntime) -> dict[str, Json]:
    await (await runtime.start(SandboxSpec(owner="bench"), lease_s=LEASE_S)).kill()  # so that the launcher is running

    async def one() -> Sandbox:
        sandbox = await runtime.start(SandboxSpec(owner="bench"), lease_s=LEASE_S)
        await _answers(sandbox)
        return sandbox

    before = await asyncio.to_thread(_pss_bytes)
    started_at = time.perf_counter()
    outcomes = await asyncio.gather(*[one() for _ in range(MANY)], return_exceptions=True)
    took_s = time.perf_counter() - started_at
    sandboxes = [sandbox for sandbox in outcomes if not isinstance(sandbox, BaseException)]
    used = await asyncio.to_thread(_pss_bytes) - before
    # All of them run at the same time, and still respond.
    again = await asyncio.gather(*[_answers(sandbox) for sandbox in sandboxes], return_exceptions=True)
    await asyncio.gather(*[sandbox.kill() for sandbox in sandboxes])
    return {
        f"concurrent_{MANY}_ok": len(sandboxes) == MANY and not any(again),
        f"concurrent_{MANY}_s": round(took_s, 3),
        "rss_mb_per_sandbox": round(used / MANY / 1e6, 3),
    }


def _pss_bytes() -> int:
    """Returns the PSS of this process and all its descendants."""
    pids = {os.getpid()} | kernel.descendants({os.getpid()}, kernel.running_processes())
    return sum(_pss_of(pid) for pid in pids)


def _pss_of(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))
    except (OSError, StopIteration):
        pass
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # it has ended
        return 0
