"""Entry point: runs a command and returns its exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted.

Invariant: a user's error is one line on stderr, "rollyard: what was wrong — what to do". A traceback is a bug.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from traceback import walk_tb

from rollyard.cli._completion import complete_for
from rollyard.cli._console import CommandError, as_clause
from rollyard.cli._extras import extra_of, missing
from rollyard.core.failure import RollyardError

USAGE = 2
INTERRUPTED = 130

DISK_ERRORS = {
    errno.ENOSPC: "free some space on that disk, and run the command again",
    errno.EDQUOT: "free some space or raise the quota, and run the command again",
    errno.EROFS: "give a folder that can be written",
}
"""Errors of the system that any command may meet, and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    from typer.main import get_command

    from rollyard.cli.app import app_for

    arguments = sys.argv[1:] if argv is None else argv
    command = get_command(app_for(arguments))
    if logging.lastResort is not None:  # prints warnings of commands that do not configure logging
        logging.lastResort.setFormatter(_Lines())
        logging.lastResort.filters = [_Once()]
    try:
        if complete_for(arguments):
            return 0
        status = command.main(args=list(arguments), prog_name="rollyard", standalone_mode=False)
        sys.stdout.flush()
    except CommandError as trouble:
        return complain(trouble.what, trouble.remedy, trouble.status)
    except RollyardError as error:
        return complain(error.detail, error.remedy)
    except TimeoutError as error:
        return complain(str(error) or "timed out")
    except ModuleNotFoundError as error:
        if error.name is None or extra_of(error.name) is None:
            raise
        trouble = missing(error.name)
        return complain(trouble.what, trouble.remedy, trouble.status)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `rollyard … | head`: the reader has closed the pipe
        _forget_stdout()
        return 0
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        _forget_stdout()
        return complain(f"{error.filename or 'a file'} cannot be written: {error.strerror}", DISK_ERRORS[error.errno])
    except Exception as error:
        return _settings_error(error) or _usage(error)
    return status if isinstance(status, int) else 0


class _Lines(logging.Formatter):
    """Formats a warning as a command's other lines, with the part of Rollyard or of a plugin that it is about."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        what = getattr(record, "what", "")
        return f"rollyard: {record.getMessage()}" + (f" in {what}" if what else "")


class _Once(logging.Filter):
    """Passes one traceback for each line that raises: a command that runs many tasks may meet it in all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, int]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        frames = list(walk_tb(record.exc_info[2])) if record.exc_info else []
        if not frames:
            return True
        frame, line = frames[-1]
        place = (frame.f_code.co_filename, line)
        is_new = place not in self._seen
        self._seen.add(place)
        return is_new


def _forget_stdout() -> None:
    """Discards what is buffered for stdout: Python would try to write it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(what: str, remedy: str = "", status: int = 1) -> int:
    """Writes one line to stderr and returns the exit status."""
    line = f"rollyard: {what.strip()}" + (f" — {as_clause(remedy)}" if remedy.strip() else "")
    sys.stderr.write(" ".join(line.split()) + "\n")
    return status


def _settings_error(error: Exception) -> int:
    """Reports an invalid setting; returns 0 for any other error. Does not import the service package: the error can
    only occur if it is already imported."""
    module = sys.modules.get("rollyard.service.settings")
    if module is None or not isinstance(error, module.SettingsError):
        return 0
    return complain(str(error), "" if getattr(error, "remedy", "") else "see `rollyard config`")


def _usage(error: Exception) -> int:
    """Reports typer's errors in Rollyard's format and raises any other error again.

    Typer's errors are recognized by their attributes: newer versions bundle click and do not export its errors.
    """
    from typer import Abort

    if isinstance(error, Abort):
        return INTERRUPTED
    format_message = getattr(error, "format_message", None)
    if format_message is None or not hasattr(error, "exit_code"):
        raise error
    if type(error).__name__ == "NoArgsIsHelpError":  # `rollyard`, `rollyard runs`: its text is the help
        sys.stderr.write(f"{format_message()}\n")
        return USAGE
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "rollyard"
    return complain(format_message(), f"see `{path} --help`", USAGE)
