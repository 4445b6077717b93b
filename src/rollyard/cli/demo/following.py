"""Runs the rollouts of a demo, and shows on its board what they do until all have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from rollyard.cli.demo.turns import TurnReader
from rollyard.cli.demo.view import DemoBoard
from rollyard.client import AsyncClient, Record

POLL_S = 0.5  # between two polls of the turns and the number of tokens
RUN = "demo"


async def follow(
    console: Console, client: AsyncClient, tasks: Sequence[Mapping[str, Any]], within_s: float
) -> list[Record]:
    """Submits the tasks to the run `RUN`, and returns their records. The ids are the same in each demo."""
    ids = [f"{RUN}-{number}" for number in range(1, len(tasks) + 1)]
    before = await _sampled(client)
    with DemoBoard(console, dict(zip(ids, tasks, strict=True))) as board:
        submitted = await client.submit(tasks, run=RUN, ids=ids)
        reader = TurnReader(client)
        polling = asyncio.ensure_future(_poll_turns(client, board, reader, before))
        try:
            records = await client.wait_all(
                [record.id for record in submitted], on_end=board.ended, on_event=board.moved, timeout_s=within_s
            )
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
        await _read_turns(board, reader)
        return records


async def _poll_turns(client: AsyncClient, board: DemoBoard, reader: TurnReader, before: tuple[int, int]) -> None:
    """Polls what no event reports: the turns of the rollouts, and the engine's tokens."""
    while True:
        await _read_turns(board, reader)
        turns, tokens = await _sampled(client)
        board.sampled(turns - before[0], tokens - before[1])
        await asyncio.sleep(POLL_S)


async def _read_turns(board: DemoBoard, reader: TurnReader) -> None:
    for id, has_ended in board.unread():
        for action in await reader.read(id):
            board.add_turn(id, action)
        if has_ended:
            board.finished(id)


async def _sampled(client: AsyncClient) -> tuple[int, int]:
    engines = (await client.status())["engines"]
    return sum(one.get("calls") or 0 for one in engines), sum(one.get("tokens") or 0 for one in engines)
