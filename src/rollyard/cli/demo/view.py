"""Shows the demo: the rollouts while they run, a table of results, and one rollout token by token.

On a terminal, the rollouts are shown in a live table; elsewhere, each turn is one line, and so is each end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from rollyard.cli._console import number, seconds, shorten, table
from rollyard.cli._token_view import counts, legend, show_trace, some
from rollyard.cli.demo.result import DemoResult
from rollyard.client import AsyncClient, Event, Record

if TYPE_CHECKING:
    from types import TracebackType

FRAMES_PER_S = 4
NAME_CHARS = 36

_STATES = {"queued": "dim", "init": "cyan", "ready": "cyan", "run": "bold yellow", "eval": "magenta"}


def task_name(task: Mapping[str, Any]) -> str:
    """Returns the family of a generated task; of another one, the start of its text."""
    data = task["data"]
    if "family" in data:
        return f"{data['family']} (level {data['level']})"
    text = f"{task['environment']}: {data.get('instruction') or data.get('question')}"
    return text if len(text) <= NAME_CHARS else f"{text[: NAME_CHARS - 1]}…"


def waiting(console: Console, what: str) -> AbstractContextManager[object]:
    """Shows what the demo waits for: on a terminal until the block ends, elsewhere as one line."""
    if console.is_terminal:
        return console.status(what)
    console.print(f"{what}.")
    return nullcontext()


class DemoBoard:
    """Shows the rollouts while they run. Use it as a context manager."""

    def __init__(self, console: Console, tasks: Mapping[str, Mapping[str, Any]]) -> None:
        self._console = console
        self._names = {id: task_name(task) for id, task in tasks.items()}
        self._states = dict.fromkeys(tasks, "queued")
        self._since = dict.fromkeys(tasks, time.monotonic())
        self._actions: dict[str, list[str]] = {id: [] for id in tasks}  # one for each turn
        self._records: dict[str, Record] = {}
        self._finished: set[str] = set()
        self._started = time.monotonic()
        self._turns = self._tokens = 0
        self._live = Live(get_renderable=self._frame, console=console, refresh_per_second=FRAMES_PER_S, transient=True)

    def __enter__(self) -> DemoBoard:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def unread(self) -> list[tuple[str, bool]]:
        """Returns the rollouts that may have turns not shown yet, and whether each has ended."""
        return [
            (id, state == "ended")
            for id, state in self._states.items()
            if state in ("run", "eval", "ended") and id not in self._finished
        ]

    def add_turn(self, id: str, action: str) -> None:
        """Adds a turn of a running rollout: what the model did."""
        self._actions[id].append(action)
        if not self._console.is_terminal:
            turn = f"turn {len(self._actions[id])}: {action}"
            self._console.print(f"{self._at()}  {self._names[id]}, {turn}", markup=False, soft_wrap=True)

    def moved(self, event: Event) -> None:
        if event.state and event.rollout in self._states and event.state != "ended":
            self._states[event.rollout] = event.state
            self._since[event.rollout] = time.monotonic()

    def ended(self, record: Record) -> None:
        self._states[record.id] = "ended"
        self._records[record.id] = record

    def finished(self, id: str) -> None:
        """Called when a rollout has ended and all of its turns are shown."""
        self._finished.add(id)
        if not self._console.is_terminal:
            record = self._records[id]
            turns, tokens = _counts(record)
            result = f"{_end(record)}, reward {_reward(record)}, {some(turns, 'turn')}, {some(tokens, 'token')}"
            self._console.print(f"{self._at()}  {self._names[id]}: {result}", markup=False, soft_wrap=True)

    def _at(self) -> str:
        took_s = time.monotonic() - self._started
        return f"{seconds(took_s):>7}  {len(self._finished):>2} of {len(self._names)} ended"

    def sampled(self, turns: int, tokens: int) -> None:
        """Sets the totals of all rollouts so far."""
        self._turns, self._tokens = turns, tokens

    def _frame(self) -> RenderableType:
        now = time.monotonic()
        grid = table("task", "state", "turns", "tokens", "reward", "last turn", right=("turns", "tokens", "reward"))
        for id, name in self._names.items():
            record, state, actions = self._records.get(id), self._states[id], self._actions[id]
            last = Text(actions[-1] if actions else "", "dim")
            if record is None:
                shown = Text(f"{state} {seconds(now - self._since[id])}", style=_STATES.get(state, ""))
                grid.add_row(name, shown, str(len(actions) or ""), "", "", last)
            else:
                turns, tokens = _counts(record)
                grid.add_row(name, _end(record), str(turns), str(tokens), _coloured(record), last)
        grid = shorten(grid, self._console, "last turn", "task")
        took_s = now - self._started
        sums = f"{len(self._records)} of {len(self._names)} ended, {some(self._turns, 'turn')} started, "
        speed = f"{number(self._tokens)} tokens, {self._tokens / max(took_s, 1e-9):.0f} tokens/s, {seconds(took_s)}"
        return Group(grid, Text(sums + speed))


def show_results(console: Console, played: DemoResult) -> None:
    """Prints a table of rewards, and the totals."""
    columns = ("task", "outcome", "reward", "turns", "tokens", "init", "run", "eval")
    grid = table(*columns, title="Rewards", right=columns[2:])
    for record in played.records:
        timings = record.timings or {}
        spent = (seconds(timings.get(name)) for name in ("init_s", "run_s", "eval_s"))
        grid.add_row(task_name(record.task), _end(record), _coloured(record), *map(str, _counts(record)), *spent)
    console.print(grid)
    scored = [record for record in played.records if record.reward is not None]
    share = f"{played.solved / len(scored):.0%}" if scored else "–"
    console.print(
        f"[bold]{played.solved} of {len(played.records)} solved ({share})[/]: {some(played.turns, 'turn')}, "
        f"{number(played.sampled_tokens)} tokens sampled in {seconds(played.took_s)}, "
        f"{played.tokens_per_s:.0f} tokens/s"
    )


def show_page(console: Console, page: Path) -> None:
    """Prints where the rollouts can be looked at, as the last line of a demo."""
    console.print(f"\nLook at these rollouts: {page.as_uri()}", markup=False, soft_wrap=True)


async def show_best(console: Console, client: AsyncClient, played: DemoResult) -> None:
    """Prints one rollout as a trainer gets it: the task, then each turn's tokens with logprobs and the replies."""
    record = max(played.records, key=lambda one: (one.reward or 0.0, min(_counts(one)[0], 4)))  # the first of equals
    trajectory = await client.trajectory(record.id)
    if not trajectory.traces:
        return
    trace, (texts, *_) = trajectory.traces[0], await client.token_texts(record.id)
    console.print(f"\n[bold]One trajectory[/]: {task_name(record.task)}, reward {_reward(record)}")
    console.print(f"{counts(trace)}.")
    console.print(legend())
    show_trace(console, trace, texts, trajectory.messages)


def _counts(record: Record) -> tuple[int, int]:
    summary = record.summary or {}
    return int(summary.get("turns") or 0), int(summary.get("sampled_tokens") or 0)


def _end(record: Record) -> str:
    return str(record.failure["code"] if record.failure else record.outcome)


def _reward(record: Record) -> str:
    return "–" if record.reward is None else f"{record.reward:g}"


def _coloured(record: Record) -> Text:
    return Text(_reward(record), "bold green" if record.reward == 1.0 else "red" if record.reward == 0.0 else "dim")
