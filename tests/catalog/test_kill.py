"""kill -9 in the middle of indexing: the catalog has every rollout of the store once, and nothing else."""

import asyncio
import sqlite3
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from random import Random

import pytest

from rollyard.catalog import Filter
from rollyard.catalog.catalog import FILE
from rollyard.core import State
from tests.catalog.parts import catalog_of, caught_up, end, opened

pytestmark = pytest.mark.slow

VICTIM = Path(__file__).with_name("victim.py")


async def test_the_catalog_matches_the_store_after_kills(tmp_path: Path):
    random = Random()
    for kill in range(3):
        async with opened(tmp_path) as store:
            for number in range(40):
                await end(store, f"k{kill}-{number}", f"word{kill} text")
            if kill:
                await store.acknowledge("run", f"e:{kill * 10}")
        process = await asyncio.create_subprocess_exec(sys.executable, VICTIM, tmp_path, stdout=PIPE)
        assert process.stdout is not None
        while int(await process.stdout.readline()) > random.randint(1, 39):
            pass
        process.kill()
        await process.communicate()
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        await caught_up(catalog)
        page = await catalog.page(Filter(), limit=200)
        ended = await store.list(state=State.ENDED, limit=200, is_newest_first=True)
        assert [(row.seq, row.key) for row in page.rows] == [(one.ended_seq, one.id) for one in ended.rollouts]
    with sqlite3.connect(tmp_path / FILE) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.execute("INSERT INTO words (words) VALUES ('integrity-check')")
        (texts,) = connection.execute("SELECT COUNT(*) FROM texts").fetchone()
        (found,) = connection.execute("SELECT COUNT(*) FROM words WHERE words MATCH 'text'").fetchone()
        assert texts == found
    connection.close()
