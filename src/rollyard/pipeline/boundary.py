"""Attributes whatever escapes from code that is not ours to the failure that it means there."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

from rollyard.core import RollyardError

log = logging.getLogger("rollyard.pipeline")


@contextmanager
def boundary(error: type[RollyardError], what: str) -> Generator[None, None, None]:
    """An exception from inside becomes `error`; one of our own tree passes through as it is."""
    try:
        yield
    except RollyardError:
        raise
    except Exception as escaped:
        log.exception("escaped", extra={"what": what, "code": error.code})
        raise error(f"{what} raised {type(escaped).__name__}: {escaped}") from escaped
