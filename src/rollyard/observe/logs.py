"""Structured logs with the standard library: a constant message, and fields.

    _log.info("rollout ended", extra={"rollout": rollout.id, "outcome": outcome})

The format is JSON (one object per line), or `time level logger message key=value…` for people. `bound` adds fields to
every line that is logged inside it, in this task and in tasks that it starts.

Invariants. A field whose name looks like a secret is printed as "***"; long values are truncated. A record is always
one line. A value that cannot be encoded is printed as its repr, and never raises an exception in the code that logs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

import orjson

VALUE_CHARS = 2000
"""The limit of one field: a log is not the place for a prompt or a traceback of megabytes."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SECRET = ("token", "secret", "password", "authorization", "api_key", "apikey", "credential", "cookie")
_NOT_SECRET = ("tokens",)  # counts: sampled_tokens, tokens_lost

_bound: ContextVar[Mapping[str, object] | None] = ContextVar("rollyard_log_fields", default=None)


@contextmanager
def bound(**fields: object) -> Generator[None, None, None]:
    """Adds fields to every line logged inside the block. Nested blocks accumulate."""
    reset = _bound.set({**(_bound.get() or {}), **fields})
    try:
        yield
    finally:
        _bound.reset(reset)


class _BindFields(logging.Filter):
    """Adds the bound fields to each record of a handler, unless the record has a field of that name."""

    def filter(self, record: logging.LogRecord) -> bool:
        for name, value in (_bound.get() or {}).items():
            if name not in vars(record):
                setattr(record, name, value)
        return True


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
        except TypeError:  # a lone surrogate, an integer beyond 64 bits, a cycle
            return orjson.dumps({key: ascii(value) for key, value in line.items()}).decode()


class ConsoleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_plain(value)}" for name, value in _fields(record).items())
        message = record.getMessage().replace("\n", "\\n")
        line = f"{_time(record):%H:%M:%S} {record.levelname.lower():7} {record.name} {message}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(
    *, level: str = "INFO", style: Literal["json", "console"] = "json", stream: TextIO | None = None
) -> logging.Handler:
    """Sends every logger's lines to the stream (default: stderr). Replaces an earlier configuration."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else ConsoleFormatter())
    handler.addFilter(_BindFields())
    root = logging.getLogger()
    for old in [old for old in root.handlers if any(isinstance(f, _BindFields) for f in old.filters)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    return handler


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    extra = {name: value for name, value in vars(record).items() if name not in _STANDARD and not name.startswith("_")}
    return {name: "***" if _is_secret(name) else _short(value) for name, value in extra.items()}


def _is_secret(name: str) -> bool:
    name = name.lower()
    return any(word in name for word in _SECRET) and not any(word in name for word in _NOT_SECRET)


def _short(value: object) -> object:
    if isinstance(value, str) and len(value) > VALUE_CHARS:
        return f"{value[:VALUE_CHARS]}… ({len(value)} characters)"
    return value


def _plain(value: object) -> str:
    text = str(value)
    return repr(text) if not text or any(c.isspace() or c in "\"'=" for c in text) else text
