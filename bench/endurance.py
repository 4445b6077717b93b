"""`rollyard bench endurance`: what ten thousand sandboxes, started and ended, leave behind.

It runs eight at a time, each with a doorway, from the host's /usr, an image folder and a SIF file in turn; each runs
one command. It counts before and after, both while the runtime is open (which includes its launcher and its resource
monitor) and before opening and after closing it; `…_more` is the larger difference. `_census.py` lists what is counted.
`per_s` is the number of sandboxes started and ended per second.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from pathlib import Path

from bench._census import Census, Count, adopting, control_of
from bench._parts import AnyRuntime, Images, Missing, forget_image, make_images, make_runtime
from rollyard.cli._console import CommandError, note
from rollyard.core import Json
from rollyard.sandbox import SandboxSpec

SANDBOXES, QUICK_SANDBOXES = 10_000, 500
AT_A_TIME = 8
WARM_UP = 24
SETTLE_S = 10.0
KINDS = ("processes", "mounts", "descriptors", "folders", "cgroups")


async def bench_endurance(
    *, quick: bool = False, runtime: str = "bubblewrap", sandboxes: int | None = None
) -> dict[str, Json]:
    count = sandboxes or (QUICK_SANDBOXES if quick else SANDBOXES)
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as name, adopting():
        place, root = Path(name), Path(name, "root")
        images = await asyncio.to_thread(make_images, place)
        try:
            created = make_runtime(runtime, root, images=images, control=control_of(root))
        except Missing as error:
            raise CommandError("this runtime cannot be measured here", str(error)) from None
        census = Census(runtime, root)
        closed_before = await asyncio.to_thread(census.take)
        async with created as opened:
            await _cycle(opened, images, WARM_UP)
            open_before, _ = await asyncio.to_thread(census.settle, _same_as(None), 0.0)
            started_at = time.monotonic()
            await _cycle(opened, images, count)
            took_s = time.monotonic() - started_at
            open_after, _ = await asyncio.to_thread(census.settle, _same_as(open_before), SETTLE_S)
            await forget_image(opened, images)
        closed_after, _ = await asyncio.to_thread(census.settle, _same_as(closed_before), SETTLE_S)
    for now, before in ((open_after, open_before), (closed_after, closed_before)):
        if names := now.names(before):
            note(f"more than before: {', '.join(names[:20])}")
    opens, closes = open_after.more(open_before), closed_after.more(closed_before)
    metrics: dict[str, Json] = {"sandboxes": count}
    metrics |= {f"{kind}_more": max(opens[kind], closes[kind]) for kind in KINDS}
    if runtime == "oci":
        metrics["containers_more"] = max(opens["containers"], closes["containers"])
    return {"metrics": {**metrics, "per_s": round(count / took_s, 1)}, "versus": {}}


async def _cycle(runtime: AnyRuntime, images: Images, count: int) -> None:
    choice: list[Path | None]
    match runtime.name:
        case "oci":
            choice = [images.folder]
        case "local":
            choice = [None]
        case _:
            choice = [None, images.folder, *([images.sif] if images.sif else [])]
    image_cycle = itertools.islice(itertools.cycle(choice), count)

    async def work() -> None:
        for image in image_cycle:
            spec = SandboxSpec(image=str(image) if image else None, has_doorway=True, owner="bench")
            sandbox = await runtime.start(spec, lease_s=600.0)
            try:
                result = await sandbox.exec(["echo", "ok"], timeout_s=60.0)
            finally:
                await sandbox.kill()
            if result.stdout != b"ok\n":
                raise RuntimeError(f"echo returned {result}")

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_A_TIME):
            group.create_task(work())


def _same_as(before: Count | None):
    return lambda now: before is None or not any(now.more(before)[kind] for kind in KINDS)
