"""Deadlines of benchmarks. An expired one raises an error with the step, what it waited for, and a remedy."""

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
    """Raises `CommandError` if the block takes longer. A callable `waited_for` is called then, to report progress."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():  # a timeout inside the block, with its own message
            raise
        what = waited_for if isinstance(waited_for, str) else waited_for()
        raise CommandError(f"{step}: waited {seconds:g} s for {what}", remedy) from error
