"""Shows the progress of a pull on stderr: bars on a terminal, a line per finished step elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rollyard.cli._console import err, note

if TYPE_CHECKING:
    from rollyard.sandbox.images import PullStep

_WORDS = {"download": "downloaded", "unpack": "unpacked"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(value: float) -> str:
    """12 B, 3.4 MiB, 1.2 GiB."""
    unit = 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{value:.0f} B"


class PullBars:
    """Shows the steps of a pull. Use it as a context manager around the pull."""

    def __init__(self) -> None:
        console = err()
        self._bars: Any = None
        self._tasks: dict[tuple[str, str], Any] = {}
        self._reported: set[tuple[str, str]] = set()
        if console.is_terminal:
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
            from rich.progress import Progress as Bars

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bars = Bars(*columns, console=console, transient=True)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def report(self, step: PullStep) -> None:
        name = step.item.removeprefix("sha256:")[:12] if step.item.startswith("sha256:") else step.item
        if self._bars is not None and step.total_bytes is not None:
            key = (step.phase, step.item)
            if key not in self._tasks:
                self._tasks[key] = self._bars.add_task(f"{step.phase} {name}", total=step.total_bytes)
            self._bars.update(self._tasks[key], completed=step.done_bytes)
            return
        line = self._line(step, name)
        if line is None:
            return
        if self._bars is not None:
            self._bars.console.print(line, markup=False)
        else:
            note(line)

    def _line(self, step: PullStep, name: str) -> str | None:
        if step.phase in ("waiting", "note"):
            return name
        if step.phase == "sif":
            return "creating a SIF file"
        if step.total_bytes is None:
            return f"unpacking {name}"
        if step.done_bytes < step.total_bytes or (step.phase, step.item) in self._reported:
            return None
        self._reported.add((step.phase, step.item))
        return f"{_WORDS[step.phase]} {name} ({size(step.total_bytes)})"
