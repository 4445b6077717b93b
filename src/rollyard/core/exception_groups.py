"""The error inside the exception groups that task groups raise."""

from __future__ import annotations

from typing import TypeVar, cast

E = TypeVar("E", bound=BaseException)


def first_error(error: E | BaseExceptionGroup[E]) -> E:
    """Returns the first exception inside nested groups, or the error itself if it is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[E]", error).exceptions[0]
    return error
