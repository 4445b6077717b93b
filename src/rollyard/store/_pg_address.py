"""Where a PostgreSQL store is: its URL, and what of it may be shown.

Invariant: a password is never part of a message or a log entry. What is shown is made of the other parts of the URL,
and a URL that could hide a part of its password in them is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn, Self
from urllib.parse import unquote, urlsplit

from rollyard.store.base import StoreUnusable


@dataclass(frozen=True, slots=True)
class Address:
    url: str = field(repr=False)
    shown: str  # without password and options
    user: str
    database: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """`StoreUnusable` for what cannot be one."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            refuse_url()
        # Where a password has one of / # ? or @ in it as it is, part of it would pass for something else.
        is_torn = parts.fragment or "@" in parts.path or "@" in parts.query or parts.netloc.count("@") > 1
        if parts.scheme not in ("postgres", "postgresql") or is_torn:
            refuse_url()
        user, database = unquote(parts.username or ""), unquote(parts.path.lstrip("/"))
        shown = f"postgresql://{f'{user}@' if user else ''}{host}{f':{port}' if port else ''}/{database}"
        return cls(url, shown, user, database)


def refuse_url() -> NoReturn:
    raise StoreUnusable(
        "the store's URL cannot be understood. It is postgresql://USER:PASSWORD@HOST:PORT/DATABASE; in the password, "
        "write / # ? @ and % as %2F %23 %3F %40 and %25"
    ) from None
