"""Converts exceptions that escape from an environment, agent, tool or runtime into a `RollyardError`.

Blame follows the traceback: an exception that passed through a plugin's code is the plugin's, and its error names the
package, the file and the line.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

from rollyard.core import RollyardError
from rollyard.plugins import OWN, line_in, package_of, raised

log = logging.getLogger("rollyard.pipeline")

BUGS = (AttributeError, ImportError, NameError, NotImplementedError, SyntaxError, TypeError)
"""Exceptions of wrong code: another try raises them again."""

Suspect = tuple[object, type[RollyardError]]
"""An object whose code runs inside a boundary, and the error for an exception of that code."""


@contextmanager
def boundary(
    error: type[RollyardError] | None, what: str, *suspects: Suspect, bug: type[RollyardError] | None = None
) -> Generator[None, None, None]:
    """Raises `error` for an exception from inside; a `RollyardError` passes through unchanged.

    The first of the suspects that is another package's and has a line in the traceback decides the error instead, and
    its line is in the detail. An OSError (a connection, a disk) does not show that code is wrong: the error stays
    `error`. With `bug`, that is the error for an exception in `BUGS`. If `error` is None, exceptions of no suspect pass
    through, too, and nothing is logged: it is the caller's call that fails.
    """
    try:
        yield
    except RollyardError:
        raise
    except Exception as escaped:
        package, blamed = OWN, error
        for suspect, own_error in suspects:
            if package_of(suspect) != OWN and line_in(escaped, package_of(suspect)):
                package = package_of(suspect)
                blamed = error if error is not None and isinstance(escaped, OSError) else own_error
                break
        if blamed is None:
            raise
        if bug is not None and isinstance(escaped, BUGS):
            blamed = bug
        if error is not None:
            log.exception("unexpected exception", extra={"what": what, "code": blamed.code})
        raise blamed(f"{what} raised {raised(escaped, package)}") from escaped
