"""For tests of servers, which must work on the service's event loop (uvloop) and on asyncio's own."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test on asyncio's own loop and on uvloop."""

    @pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    @functools.wraps(test)
    def both(new_loop: Callable[[], asyncio.AbstractEventLoop], **fixtures: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(90):
                await test(**fixtures)

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(bounded())

    names = [*inspect.signature(test).parameters.values()]
    both.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("new_loop", inspect.Parameter.POSITIONAL_OR_KEYWORD), *names]
    )
    return both
