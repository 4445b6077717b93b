"""The operator's limits on what a task may request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollyard.core.failure import TaskInvalid
from rollyard.core.json import Json
from rollyard.core.task import Limits, Task


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The largest values that a task may request. None means no limit."""

    memory_bytes: int | None = None
    disk_bytes: int | None = None
    cpus: float | None = None
    processes: int | None = None
    files: int | None = None
    seconds: float | None = None  # of each stage

    @property
    def defaults(self) -> Mapping[str, Json]:
        """A partial task with the deadlines of tasks that set none, where the usual ones exceed the operator's."""
        usual = {"init_s": Limits().init_s, "run_s": Limits().run_s, "eval_s": Limits().eval_s}
        lowered: dict[str, Json] = {
            name: self.seconds for name, value in usual.items() if self.seconds is not None and value > self.seconds
        }
        return {"limits": lowered} if lowered else {}

    def check(self, task: Task) -> None:
        """Raises `TaskInvalid`, with the name of the limit, if the task requests too much."""
        sandbox, limits = task.sandbox, task.limits
        for name, asked, most in (
            ("sandbox.memory_bytes", sandbox.memory_bytes, self.memory_bytes),
            ("sandbox.disk_bytes", sandbox.disk_bytes, self.disk_bytes),
            ("sandbox.cpus", sandbox.cpus, self.cpus),
            ("sandbox.processes", sandbox.processes, self.processes),
            ("sandbox.files", sandbox.files, self.files),
            ("limits.init_s", limits.init_s, self.seconds),
            ("limits.run_s", limits.run_s, self.seconds),
            ("limits.eval_s", limits.eval_s, self.seconds),
        ):
            if asked is not None and most is not None and asked > most:
                raise TaskInvalid(f"{name}: {asked:g} is more than this service allows a task ({most:g})")
