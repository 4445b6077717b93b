"""Indexes a store until it is killed. `victim.py FOLDER`; see test_kill.py. Each line on stdout is a number of rollouts
that are not in the catalog yet."""

import asyncio
import os
import sys
from pathlib import Path

from rollyard.catalog import Catalog, catalog
from rollyard.store import open_store


async def main(folder: Path) -> None:
    catalog.BATCH = 3
    catalog.CHECK_S = 0.0
    async with (
        await open_store(str(folder / "rollyard.db")) as store,
        Catalog(folder, store, is_busy=lambda: False) as followed,
    ):
        while True:
            os.write(1, b"%d\n" % await followed.behind())
            followed.wake()
            await asyncio.sleep(0.001)


asyncio.run(main(Path(sys.argv[1])))
