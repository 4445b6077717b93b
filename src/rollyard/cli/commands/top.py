"""`rollyard top`: a live view of the stages. One request to /v1/status per frame; rates are differences of two."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollyard.cli._console import AsJson, Token, Url, connect, number, out, plain, print_json, run, table

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

STAGES = ("queue", "init", "ready", "run", "eval", "live")
BAR = 24


def top(
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two frames.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Watch stages, engines and throughput. Ctrl-C ends it.

    With --json: one status object per frame and line.
    """
    with suppress(KeyboardInterrupt):
        run(_top(interval_s, once, url, token, as_json))


async def _top(interval_s: float, once: bool, url: str | None, token: str | None, as_json: bool) -> None:
    from rich.live import Live

    async with connect(url, token, retry_s=0.0 if once else 60.0) as client:
        rates = Rates()
        status = await client.status()
        if as_json:
            print_json({**status, "rates": rates.update(status)})
            while not once:
                await asyncio.sleep(interval_s)
                status = await client.status()
                print_json({**status, "rates": rates.update(status)})
            return
        first = frame(status, rates.update(status), client.url)
        if once:
            out().print(first)
            return
        with Live(first, console=out(), screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                status = await client.status()
                live.update(frame(status, rates.update(status), client.url), refresh=True)


@dataclass(slots=True)
class Rates:
    """Rates per second since the previous frame: model calls (turns), sampled tokens, ended rollouts.

    The store counts ended rollouts: a sweep or a deleted run lowers the count, which is shown as a rate of 0.
    """

    at: float = 0.0
    counts: Mapping[str, float] | None = None

    def update(self, status: Mapping[str, Any]) -> dict[str, float | None]:
        engines = status.get("engines") or ()
        counts = {
            "turns_per_s": float(sum(engine.get("calls") or 0 for engine in engines)),
            "tokens_per_s": float(sum(engine.get("tokens") or 0 for engine in engines)),
            "rollouts_per_s": float((status.get("states") or {}).get("ended") or 0),
        }
        now, before, since = time.monotonic(), self.counts, self.at
        self.at, self.counts = now, counts
        if before is None or now <= since:
            return dict.fromkeys(counts)
        return {name: round(max(0.0, count - before[name]) / (now - since), 2) for name, count in counts.items()}


def frame(status: Mapping[str, Any], rates: Mapping[str, float | None], url: str) -> Group:
    """Renders one frame."""
    from rich.console import Group

    from rollyard.cli.commands.engines import engine_problems, engines_table
    from rollyard.cli.commands.nodes import nodes_table

    uptime_s = int(status.get("uptime_s") or 0)
    draining = "  [bold red]draining[/]" if status.get("is_draining") else ""
    head = (
        f"[bold]rollyard {status.get('version')}[/]  {url}  up {uptime_s // 3600}:{uptime_s // 60 % 60:02d}{draining}"
    )
    names = {"turns_per_s": "turns/s", "tokens_per_s": "tokens/s", "rollouts_per_s": "rollouts/s"}
    speed = "   ".join(f"{label} {number(rates.get(name))}" for name, label in names.items())
    states = "   ".join(f"{state} {number(count)}" for state, count in (status.get("states") or {}).items())
    engines: list[dict[str, Any]] = list(status.get("engines") or ())
    parts: list[RenderableType] = [
        head,
        "",
        _pools(status.get("pools") or {}),
        f"rollouts: {states or 'none yet'}",
        speed,
        "",
    ]
    for name, runtime in (status.get("runtimes") or {}).items():
        if waiting := runtime.get("waiting_for_room"):
            short = f"{number(waiting)} sandboxes of {plain(name)} wait: the machine is short of memory or disk"
            parts.insert(-1, f"[red]{short}[/]")
    nodes: list[dict[str, Any]] = list(status.get("nodes") or ())
    if nodes:
        parts += [nodes_table(nodes), ""]
    for reason in (status.get("unserved_policies") or {}).values():
        parts += [f"[red]{plain(reason)}[/]", ""]
    if engines:
        parts.append(engines_table(engines))
        parts += [f"[red]{plain(line)}[/]" for line in engine_problems(engines)]
    parts += [
        f"[red]engine {name} was refused: {plain(why)}[/]"
        for name, why in (status.get("refused_engines") or {}).items()
    ]
    return Group(*parts)


def _pools(pools: Mapping[str, Any]) -> RenderableType:
    grid = table("stage", "", "active", "size", "waiting", right=("active", "size", "waiting"))
    for name in STAGES:
        pool = pools.get(name) or {}
        active, size = int(pool.get("active") or 0), int(pool.get("size") or 0)
        filled = min(BAR, -(-BAR * active // size)) if size else 0
        colour = "red" if name in ("queue", "live") and size and active >= size else "cyan"
        bar = f"[{colour}]{'━' * filled}[/][dim]{'─' * (BAR - filled)}[/]"
        stuck = f" [red]+{pool['quarantined']} stuck[/]" if pool.get("quarantined") else ""
        grid.add_row(name, bar, number(active) + stuck, number(size), number(pool.get("waiting")))
    return grid
