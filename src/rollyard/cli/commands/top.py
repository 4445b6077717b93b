"""`rollyard top`: a live view of the stages. One request to /v1/status per frame; rates are differences of two.

The service is asked at least every POLL_S, whatever the interval between two frames is, and has ANSWER_S to answer. So
the view says within two seconds that the service is gone, and that it is back. The last known state stays visible.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollyard.cli._console import (
    AsJson,
    Token,
    Url,
    age,
    connect,
    note,
    number,
    out,
    plain,
    print_json,
    run,
    shorten,
    table,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from rollyard.client import AsyncClient

STAGES = ("queue", "init", "ready", "run", "eval", "live")
BAR = 24
POLL_S = 1.0
ANSWER_S = 1.0
RETURN_S = 10.0  # how long the return of the service is shown
PASSING = (429, 502, 503, 504)  # statuses that end by themselves

Status = Mapping[str, Any]


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

    async with connect(url, token) as client:  # without retries: a service that does not answer is shown at once
        view = View(await client.status(), client.url)
        if as_json:
            print_json(view.as_json())
            while not once:
                await view.next(client, interval_s)
                if view.is_new:
                    print_json(view.as_json())
                elif view.change:
                    note(f"rollyard: {view.change}")
        elif once:
            _print(view)
        else:
            console = out()
            with Live(view.frame(console), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    await view.next(client, interval_s)
                    live.update(view.frame(console), refresh=True)


def _print(view: View) -> None:
    """Prints one frame: as wide as the terminal, or in a pipe as wide as it needs."""
    console = out()
    if console.is_terminal:
        console.print(view.frame(console))
        return
    console.width = 400
    with console.capture() as capture:
        console.print(view.frame(console))
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


class View:
    """The last known status of the service, and whether the service answers."""

    def __init__(self, status: Status, url: str) -> None:
        self.is_new = True  # the last look brought a new frame
        self.change = ""  # what the last look noticed: the service is gone, or back
        self._url = url
        self._rates = Rates()
        self._show(status)
        self._problem = ""
        self._answered_at = time.monotonic()
        self._returned_at: float | None = None
        self._silent_s = 0.0

    def _show(self, status: Status) -> None:
        self._status, self._shown_at = status, time.monotonic()
        self._speed = self._rates.update(status)

    async def next(self, client: AsyncClient, interval_s: float) -> None:
        """Waits, and asks the service once."""
        await asyncio.sleep(min(interval_s, POLL_S))
        answer = await _read_status(client)
        now, was_silent = time.monotonic(), bool(self._problem)
        self.is_new, self.change = False, ""
        if isinstance(answer, str):
            if not was_silent:
                self.change = f"the service does not answer: {answer}"
            self._problem = answer
            self._rates = Rates()  # a restarted service counts from 0
            return
        if was_silent:
            self._returned_at, self._silent_s = now, now - self._answered_at
            self.change = f"the service answers again, after {age(self._silent_s)}"
        self._problem, self._answered_at = "", now
        if was_silent or now - self._shown_at >= 0.9 * interval_s:
            self._show(answer)
            self.is_new = True

    def as_json(self) -> dict[str, Any]:
        return {**self._status, "rates": self._speed}

    def frame(self, console: Console) -> RenderableType:
        from rich.console import Group
        from rich.styled import Styled

        body = frame(self._status, self._speed, self._url, console)
        now = time.monotonic()
        if self._problem:
            silent = f"[bold red]The service has not answered for {age(now - self._answered_at)}:[/]"
            return Group(_line(f"{silent} {plain(self._problem)}"), "Its last known state:", "", Styled(body, "dim"))
        if self._returned_at is not None and now - self._returned_at < RETURN_S:
            back = f"[bold green]The service answers again[/], after {age(self._silent_s)} without an answer."
            return Group(_line(back), body)
        return body


async def _read_status(client: AsyncClient) -> Status | str:
    """Returns the status, or why the service does not answer."""
    from rollyard.client import ServiceUnreachable
    from rollyard.core import RollyardError

    try:
        async with asyncio.timeout(ANSWER_S):
            return await client.status()
    except TimeoutError:
        return f"no answer within {ANSWER_S:g} s"
    except OSError as error:
        return str(error)
    except RollyardError as error:
        if isinstance(error, ServiceUnreachable) or error.status in PASSING:
            return error.detail
        raise


def _line(markup: str) -> RenderableType:
    """Text on one line, with an ellipsis if it is longer."""
    from rich.text import Text

    text = Text.from_markup(markup, overflow="ellipsis")
    text.no_wrap = True
    return text


@dataclass(slots=True)
class Rates:
    """Rates per second since the previous frame: model calls (turns), sampled tokens, ended rollouts.

    Tokens are counted when their call has ended, except at engines that report how many they sample: there, those of
    running calls count, and the rate is that between the service's last two looks at the engine.
    The store counts ended rollouts: a sweep or a deleted run lowers the count, which is shown as a rate of 0.
    """

    at: float = 0.0
    counts: Mapping[str, float] | None = None

    def update(self, status: Mapping[str, Any]) -> dict[str, float | None]:
        engines = status.get("engines") or ()
        counts = {
            "turns_per_s": float(sum(engine.get("calls") or 0 for engine in engines)),
            "tokens_per_s": float(sum(engine.get("tokens") or 0 for engine in engines if not _reports(engine))),
            "rollouts_per_s": float((status.get("states") or {}).get("ended") or 0),
        }
        now, before, since = time.monotonic(), self.counts, self.at
        self.at, self.counts = now, counts
        reported = [engine["tokens_per_s"] for engine in engines if _reports(engine)]
        rates: dict[str, float | None] = dict.fromkeys(counts)
        if before is not None and now > since:
            rates = {name: max(0.0, count - before[name]) / (now - since) for name, count in counts.items()}
        if reported:
            rates["tokens_per_s"] = sum(reported) + (rates["tokens_per_s"] or 0.0)
        return {name: None if rate is None else round(rate, 2) for name, rate in rates.items()}


def _reports(engine: Mapping[str, Any]) -> bool:
    return engine.get("tokens_per_s") is not None


def frame(status: Status, rates: Mapping[str, float | None], url: str, console: Console) -> RenderableType:
    """Renders one frame, with no line longer than the console is wide."""
    from rich.console import Group

    from rollyard.cli.commands.engines import ENGINES_GIVE_WAY, ENGINES_OPTIONAL, engine_problems, engines_table
    from rollyard.cli.commands.nodes import NODES_GIVE_WAY, NODES_OPTIONAL, nodes_table

    uptime_s = int(status.get("uptime_s") or 0)
    draining = "  [bold red]draining[/]" if status.get("is_draining") else ""
    uptime = f"{uptime_s // 3600}:{uptime_s // 60 % 60:02d}"
    names = {"turns_per_s": "turns/s", "tokens_per_s": "tokens/s", "rollouts_per_s": "rollouts/s"}
    speed = "   ".join(f"{label} {number(rates.get(name))}" for name, label in names.items())
    states = "   ".join(f"{state} {number(count)}" for state, count in (status.get("states") or {}).items())
    parts: list[RenderableType] = [
        _line(f"[bold]rollyard {plain(status.get('version'))}[/]  {plain(url)}  up {uptime}{draining}"),
        "",
        _pools(status.get("pools") or {}),
        _line(f"rollouts: {states or 'none yet'}"),
        _line(speed),
    ]
    for name, runtime in (status.get("runtimes") or {}).items():
        if waiting := runtime.get("waiting_for_room"):
            short = f"{number(waiting)} sandboxes of {plain(name)} wait: the machine is short of memory or disk"
            parts.append(_line(f"[red]{short}[/]"))
    parts.append("")
    nodes: list[dict[str, Any]] = list(status.get("nodes") or ())
    if nodes:
        grid = nodes_table(nodes)
        parts += [shorten(grid, console, *NODES_GIVE_WAY, optional=NODES_OPTIONAL), ""]
    for reason in (status.get("unserved_policies") or {}).values():
        parts += [_line(f"[red]{plain(reason)}[/]"), ""]
    engines: list[dict[str, Any]] = list(status.get("engines") or ())
    if engines:
        grid = engines_table(engines)
        parts.append(shorten(grid, console, *ENGINES_GIVE_WAY, optional=ENGINES_OPTIONAL))
        parts += [_line(f"[red]{plain(line)}[/]") for line in engine_problems(engines)]
    parts += [
        _line(f"[red]engine {plain(name)} was refused: {plain(why)}[/]")
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
