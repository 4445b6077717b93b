"""Deadlines of benchmarks: one that passes is an error that names the step, what it waited for, and what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from rollyard.cli._console import CommandError

REMEDY = "stop other programs on this machine and run it again, or try --quick"


@asynccontextmanager
async def within(
    seconds: float, step: str, waited_for: str | Callable[[], str], *, remedy: str = REMEDY
) -> AsyncGenerator[None, None]:
    """Trouble when the block takes longer. A callable is asked at that time: how far it got."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():  # of something inside: it names itself
            raise
        what = waited_for if isinstance(waited_for, str) else waited_for()
        raise CommandError(f"{step}: waited {seconds:g} s for {what}", remedy) from error
