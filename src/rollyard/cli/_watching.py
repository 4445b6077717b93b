"""Shows the progress of submitted rollouts until all have ended.

On a terminal: a bar with the number of rollouts in each state. Elsewhere: a line whenever the numbers have changed, at
most every LINE_S. A service that does not answer is reported within seconds, and so is its return.

Invariant. The states are those of the service: its events are followed from before the submit on. A few unfinished
rollouts are also read every POLL_S, and more are listed when a service that did not answer is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollyard.cli._console import connect, err, note
from rollyard.client import ServiceUnreachable
from rollyard.core import RollyardError, State
from rollyard.core.exception_groups import first_error

if TYPE_CHECKING:
    from rollyard.client import AsyncClient, Event, Record

POLL_S = 2.0
LINE_S = 10.0
LISTED = 1000  # rollouts in one listing; of more, only events are shown
FEW = 20  # unfinished rollouts that are read one by one
WAITING = (
    "rollyard: {}, because the service's machine is short of memory or disk (256 MiB and 512 MiB must be free) — free"
    " some of it; the rollouts then continue by themselves"
)

NO_SLOTS = (
    "rollyard: the service has no slots for {}: rollouts wait there until `rollyard pools resize` gives it some, or a"
    " node joins"
)
STAGES = ("init", "run", "eval")


class Progress:
    """The states of the rollouts, and their display."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.states = {record.id: record.state for record in records}
        self._silent_since: float | None = None
        self._is_waiting = False
        self._stopped: Sequence[str] = ()
        self._shown = ""
        self._shown_at = time.monotonic()
        self._bar, self._task = _new_bar(len(records))

    def start(self) -> None:
        if self._bar is not None:
            self._bar.start()
        self.update()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_event(self, event: Event) -> None:
        if event.state:
            self.set(event.rollout, event.state)

    def on_end(self, record: Record) -> None:
        self.set(record.id, record.state)

    @property
    def unfinished(self) -> list[str]:
        return [id for id, state in self.states.items() if state != "ended"]

    def set_all(self, records: Iterable[Record]) -> None:
        for record in records:
            self.set(record.id, record.state)

    def set(self, id: str, state: str) -> None:
        if self.states.get(id) not in (None, "ended"):  # an older event may arrive late
            self.states[id] = state
            self.update()

    def set_answering(self, is_answering: bool) -> None:
        """Records whether the service answers."""
        was_silent = self._silent_since is not None
        if is_answering:
            self._silent_since = None
            if was_silent:
                self._note("rollyard: the service answers again")
        elif not was_silent:
            self._silent_since = time.monotonic()
            self._note("rollyard: the service does not answer; waiting for it")
        self.update()

    def set_waiting(self, count: int) -> None:
        """Records how many sandboxes cannot be started because the machine is short of resources."""
        if count and not self._is_waiting:
            self._say(WAITING.format(f"{count} sandbox{' waits' if count == 1 else 'es wait'}"))
        self._is_waiting = count > 0

    def set_stopped(self, stages: Sequence[str]) -> None:
        """Records which stages have no slots, because they were resized to 0 or no node has joined."""
        if stages and stages != self._stopped:
            self._say(NO_SLOTS.format(" and ".join(stages)))
        self._stopped = stages

    def update(self) -> None:
        counts: dict[str, int] = dict.fromkeys(map(str, State), 0)
        for state in self.states.values():
            counts[state] = counts.get(state, 0) + 1
        text = "  ".join(f"{state} {count}" for state, count in counts.items() if count and state != "ended")
        if self._silent_since is not None:
            text = f"the service does not answer ({time.monotonic() - self._silent_since:.0f} s)"
        if self._bar is not None:
            self._bar.update(self._task, completed=counts["ended"], states=text)
            return
        line = f"{counts['ended']} of {len(self.states)} ended" + (f"; {text}" if text else "")
        if line != self._shown and time.monotonic() - self._shown_at >= LINE_S and self._silent_since is None:
            self._shown, self._shown_at = line, time.monotonic()
            note(line)

    def _note(self, line: str) -> None:
        if self._bar is None:
            note(line)

    def _say(self, line: str) -> None:
        """Writes a line also if there is a bar, above it."""
        if self._bar is None:
            note(line)
        else:
            self._bar.console.print(line, markup=False)


async def watch(
    client: AsyncClient,
    records: Sequence[Record],
    *,
    url: str | None = None,
    token: str | None = None,
    after: str | None = None,
) -> list[Record]:
    """Waits for all rollouts, and shows their progress on stderr. `after` is an event before their submit."""
    run = records[0].run
    if not err().is_terminal:
        note(f"{len(records)} rollout{'s' if len(records) > 1 else ''} submitted to run {run}")
    progress = Progress(records)
    progress.start()
    client_log = logging.getLogger("rollyard.client")
    client_log.addFilter(_is_error)  # the progress reports an outage itself
    try:
        async with asyncio.TaskGroup() as tasks:
            polling = tasks.create_task(_poll(progress, run, url, token))
            ended = await client.wait_all(
                list(progress.states), on_end=progress.on_end, on_event=progress.on_event, run=run, after=after
            )
            polling.cancel()
        return ended
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    finally:
        progress.stop()
        client_log.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def waiting_sandboxes(status: Mapping[str, Any]) -> int:
    return sum(int(runtime.get("waiting_for_room") or 0) for runtime in (status.get("runtimes") or {}).values())


def stopped_stages(status: Mapping[str, Any]) -> list[str]:
    pools = status.get("pools") or {}
    return [name for name in STAGES if name in pools and not pools[name]["size"]]


async def _poll(progress: Progress, run: str, url: str | None, token: str | None) -> None:
    """Calls the service every POLL_S: to notice that it is gone, and to read states whose events were missed."""
    is_stale = False
    async with connect(url, token) as client:  # without retries
        while True:
            try:
                async with asyncio.timeout(2 * POLL_S):
                    status = await client.status()
                    progress.set_waiting(waiting_sandboxes(status))
                    progress.set_stopped(stopped_stages(status))
                    if len(unfinished := progress.unfinished) <= FEW:
                        progress.set_all(await asyncio.gather(*[client.get(id, run=run) for id in unfinished]))
                    elif is_stale and len(progress.states) <= LISTED:
                        progress.set_all((await client.list(run=run, order="newest", limit=LISTED)).rollouts)
                is_stale = False
            except (ServiceUnreachable, TimeoutError, OSError):
                is_stale = True
            except RollyardError:
                pass  # it answers; `wait_all` raises what matters
            progress.set_answering(not is_stale)
            await asyncio.sleep(POLL_S)


def _new_bar(total: int) -> tuple[Any, Any]:
    """A progress bar, and its task; None if stderr is not a terminal."""
    console = err()
    if not console.is_terminal:
        return None, None
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("rollouts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[states]}"),
        console=console,
        transient=True,
    )
    return bar, bar.add_task("", total=total, states="")
