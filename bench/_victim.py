"""The service that `rollyard bench survive` kills, run as a module with RUNTIME ROOT FOLDER SIF TALLY.

It keeps AT_ONCE starts in progress until it is killed. Each started sandbox runs a daemon that would outlive it, and is
ended while the next one starts. The file TALLY, mapped into memory, always contains the number of starts in progress,
so that it can be read after the kill.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import sys
from pathlib import Path

from bench._census import control_of
from bench._parts import AT_ONCE, Images, make_runtime
from rollyard.sandbox import Sandbox, SandboxSpec

MOST_LIVE = 2 * AT_ONCE
DAEMON = "sleep 100000 </dev/null >/dev/null 2>&1 &"


def mapped(file: Path) -> mmap.mmap:
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), 1)


async def main(name: str, root: str, folder: str, sif: str, tally: str) -> None:
    images = Images(Path(folder), Path(sif) if sif else None)
    choice: list[str | None] = [folder] if name == "oci" else [None, folder, *([sif] if sif else [])]
    image_cycle = itertools.cycle(choice)
    live = asyncio.Semaphore(MOST_LIVE)
    shared = mapped(Path(tally))
    async with (
        make_runtime(name, Path(root), images=images, control=control_of(Path(root))) as runtime,
        asyncio.TaskGroup() as group,
    ):

        async def end(sandbox: Sandbox) -> None:
            try:
                await sandbox.exec(DAEMON, timeout_s=60.0)
                await sandbox.kill()
            finally:
                live.release()

        async def start() -> None:
            while True:
                await live.acquire()
                shared[0] += 1
                spec = SandboxSpec(image=next(image_cycle), has_doorway=True, owner="bench")
                sandbox = await runtime.start(spec, lease_s=600.0)
                shared[0] -= 1
                group.create_task(end(sandbox))

        for _ in range(AT_ONCE):
            group.create_task(start())
        await asyncio.sleep(0)  # each task runs until it has requested a start
        sys.stdout.write("open\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
