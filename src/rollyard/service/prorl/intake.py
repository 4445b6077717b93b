"""The intake: whether jobs are accepted, the period, and the version of the weights. All three survive the process.

A period is the time between two `/start` calls, that is, one batch of the trainer. It distinguishes a repeated job from
the same task's job of a later batch, because the trainer sends no job ids. A new period starts with every `/start`,
even one that is refused because the intake is open (the trainer died and was restarted), and with `/clear_llm_server`,
the first call of a trainer.

The trainer changes weights between `/stop` and `/start` and reports no version, so every `/start` sets a new one (see
`jobs.py`).

Invariant: the state in a response is on disk, complete, before the response is sent. The store's lock keeps a second
service from using the file.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from rollyard.core.files import replacing
from rollyard.service.settings import SettingsError

FILE = "prorl.json"  # below data_dir


@dataclass(frozen=True, slots=True)
class Intake:
    is_open: bool = False
    period: int = 0
    version: int = 0  # the last version of the weights that was set here

    def next(self, *, is_open: bool) -> Intake:
        return replace(self, is_open=is_open, period=self.period + 1)


class IntakeFile:
    """The intake's state in a file. `now` is the state on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = asyncio.Lock()
        self.now = self._load()

    async def begin(self) -> bool:
        """Opens the intake, in a new period. Returns False if it was open."""
        async with self._lock:
            was_open = self.now.is_open
            await self._keep(self.now.next(is_open=True))
            return not was_open

    async def name_version(self, version: int) -> None:
        """Stored before the version is used anywhere, so that a version is never used twice."""
        async with self._lock:
            await self._keep(replace(self.now, version=version))

    async def renew(self) -> None:
        """Starts a new period. The intake stays open or closed."""
        async with self._lock:
            await self._keep(self.now.next(is_open=self.now.is_open))

    async def end(self) -> bool:
        """Closes the intake. Returns False if it was closed."""
        async with self._lock:
            was_open = self.now.is_open
            if was_open:
                await self._keep(replace(self.now, is_open=False))
            return was_open

    async def _keep(self, intake: Intake) -> None:
        await asyncio.to_thread(self._write, intake)
        self.now = intake

    def _write(self, intake: Intake) -> None:
        with replacing(self._path, is_durable=True) as file:
            file.write(msgspec.json.encode(intake))

    def _load(self) -> Intake:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Intake)
        except FileNotFoundError:
            return Intake()
        except (OSError, msgspec.DecodeError) as error:
            raise SettingsError(f"{self._path} cannot be read: {error}; delete it to start again") from error
