"""Converts exceptions that escape from an environment, agent, tool or runtime into a `RollyardError`."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

from rollyard.core import RollyardError

log = logging.getLogger("rollyard.pipeline")


@contextmanager
def boundary(error: type[RollyardError], what: str) -> Generator[None, None, None]:
    """Raises `error` for an exception from inside; a `RollyardError` passes through unchanged."""
    try:
        yield
    except RollyardError:
        raise
    except Exception as escaped:
        log.exception("unexpected exception", extra={"what": what, "code": error.code})
        raise error(f"{what} raised {type(escaped).__name__}: {escaped}") from escaped
