"""`rollyard bench survive`: what is left of 50 starting sandboxes when their service is killed with SIGKILL.

It repeatedly kills a process that has the runtime open, with 50 starts in progress (`_victim.py`), at a random moment.
With bubblewrap all 50 start at the same time; the other runtimes start four at a time (Apptainer four per image, of
which there are three), and the rest wait.

It then polls until no descendant is left or a time limit is reached (see `_census.py`). `survivors` are processes,
including FUSE helpers, mounts in the host's namespace and running containers. A killed service cannot remove folders,
empty cgroups and ended containers (with the mounts that the engine keeps until they are removed): `swept` is their
number when the runtime was opened again, `left_after_sweep` the number after that.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import tempfile
import time
from pathlib import Path

from bench._census import Census, Count, adopting, control_of
from bench._parts import Images, Missing, forget_image, make_images, make_runtime
from bench.processes import module_argv
from rollyard.cli._console import CommandError, note
from rollyard.core import Json

KILLS, QUICK_KILLS = 60, 5
EXIT_S = 10.0
ENGINE_EXIT_S = 60.0
"""A container engine continues after its caller was killed, and starts containers that then end."""

WITHIN_S = {"bubblewrap": 1.0, "apptainer": 2.0, "oci": 6.0, "local": 1.0}
"""The kill is within this many seconds: from the first starts to the full number of sandboxes."""


async def bench_survive(
    *, quick: bool = False, runtime: str = "bubblewrap", kills: int | None = None
) -> dict[str, Json]:
    if runtime not in WITHIN_S:
        raise CommandError(f"there is no runtime {runtime!r}", f"there are: {', '.join(WITHIN_S)}", 2)
    kills = kills or (QUICK_KILLS if quick else KILLS)
    survivors = swept = leftovers = 0
    exit_s: list[float] = []
    starting: list[int] = []
    dice = random.Random(kills)
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as name, adopting():
        place, root = Path(name), Path(name, "root")
        images = await asyncio.to_thread(make_images, place)
        try:
            make_runtime(runtime, root, images=images)
        except Missing as error:
            raise CommandError("this runtime cannot be measured here", str(error)) from None
        census = Census(runtime, root)
        before = await asyncio.to_thread(census.take)
        for _ in range(kills):
            after_s = dice.uniform(0.0, WITHIN_S[runtime])
            starting.append(await asyncio.to_thread(_kill_one, runtime, root, images, place / "tally", after_s))
            bound_s = ENGINE_EXIT_S if runtime == "oci" else EXIT_S
            now, took_s = await asyncio.to_thread(
                census.settle, lambda count: _survivors(count, before, runtime) == 0, bound_s
            )
            exit_s.append(took_s)
            if more := _survivors(now, before, runtime):
                survivors += more
                note(f"survived: {', '.join(now.names(before)[:20])}")
            swept += _count_leftovers(now, before)
            async with make_runtime(runtime, root, images=images, control=control_of(root)):
                pass  # opening the runtime sweeps
            now = await asyncio.to_thread(census.take)
            if more := _count_leftovers(now, before):
                leftovers += more
                note(f"left after the sweep: {', '.join(now.names(before)[:20])}")
        async with make_runtime(runtime, root, images=images, control=control_of(root)) as opened:
            await forget_image(opened, images)
    metrics: dict[str, Json] = {
        "kills": kills,
        "survivors": survivors,
        "left_after_sweep": leftovers,
        "swept": swept,
        "starting_min": min(starting),
        "gone_max_s": round(max(exit_s), 3),
    }
    return {"metrics": metrics, "versus": {}}


def _kill_one(runtime: str, root: Path, images: Images, tally: Path, after_s: float) -> int:
    """Starts a service, kills it, and returns how many starts were in progress."""
    tally.write_bytes(b"\0")
    argv = module_argv("_victim", runtime, str(root), str(images.folder), str(images.sif or ""), str(tally))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stderr is not None
        if process.stdout.readline() != b"open\n":
            errors = process.stderr.read().decode(errors="replace").strip()
            raise CommandError("the service to be killed did not start", errors.splitlines()[-1] if errors else "")
        time.sleep(after_s)
        if process.poll() is not None:
            errors = process.stderr.read().decode(errors="replace").strip()
            raise CommandError("the service ended before it was killed", errors.splitlines()[-1] if errors else "")
        process.kill()
        process.wait()
    return tally.read_bytes()[0]


def _survivors(now: Count, before: Count, runtime: str) -> int:
    more = now.more(before)
    return more["processes"] + more["running"] + (more["mounts"] if runtime != "oci" else 0)


def _count_leftovers(now: Count, before: Count) -> int:
    more = now.more(before)
    return more["folders"] + more["cgroups"] + more["containers"] + more["mounts"]
