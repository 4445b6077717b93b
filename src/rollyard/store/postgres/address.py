"""The URL of a PostgreSQL store, and the form of it that may be shown.

Invariant: a password is never part of a message or a log entry. The shown form consists of the other parts of the URL,
and a URL whose other parts could contain a part of its password is refused.
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
        """Raises `StoreUnusable` for an invalid URL."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            refuse_url()
        # With an unescaped / # ? or @ in a password, a part of it would be taken for another part of the URL.
        is_torn = parts.fragment or "@" in parts.path or "@" in parts.query or parts.netloc.count("@") > 1
        if parts.scheme not in ("postgres", "postgresql") or is_torn:
            refuse_url()
        user, database = unquote(parts.username or ""), unquote(parts.path.lstrip("/"))
        shown = f"postgresql://{f'{user}@' if user else ''}{host}{f':{port}' if port else ''}/{database}"
        return cls(url, shown, user, database)


def refuse_url() -> NoReturn:
    raise StoreUnusable(
        "the store's URL is invalid. Its form is postgresql://USER:PASSWORD@HOST:PORT/DATABASE; in the password, "
        "write / # ? @ and % as %2F %23 %3F %40 and %25"
    ) from None
