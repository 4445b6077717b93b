"""Rollouts that wait because the machine is short of memory or disk are reported everywhere."""

import asyncio
from io import StringIO
from pathlib import Path

from rich.console import Console

from rollyard.cli.commands.top import frame
from tests.service.site import engine_table, open_site, scripted


async def test_waiting_for_room_is_reported(tmp_path: Path) -> None:
    async with (
        scripted() as engine,
        open_site(tmp_path, runtimes=["bubblewrap"], engines=[engine_table(engine)]) as site,
    ):
        runtime = site.served.app_state.resources.runtimes["bubblewrap"]
        runtime._limiter._on_pressure(True, {})  # type: ignore[attr-defined]
        await site.submit("r1")
        async with asyncio.timeout(30):
            while (await site.get("/readyz", token="")).body["waiting_for_room"] != 1:
                await asyncio.sleep(0.02)
        status = (await site.get("/v1/status")).body
        assert status["runtimes"]["bubblewrap"]["waiting_for_room"] == 1
        assert b'rollyard_waiting_for_room{runtime="bubblewrap"} 1.0' in (await site.get("/metrics")).body
        console = Console(width=120, file=StringIO())
        with console.capture() as shown:
            console.print(frame(status, {}, site.url, console))
        assert "1 sandboxes of bubblewrap wait" in shown.get()
        runtime._limiter._on_pressure(False, {})  # type: ignore[attr-defined]
        assert (await site.ended("r1"))["reward"] == 1.0
        assert (await site.get("/readyz", token="")).body["waiting_for_room"] == 0
