"""Opens a store by its name: a `postgresql://` URL, or the path of a SQLite file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollyard.store.base import StoreUnusable
from rollyard.store.postgres.address import Address
from rollyard.store.sql.sql_store import SqlStore
from rollyard.store.sqlite.store import SqliteStore

SCHEMES = ("postgresql://", "postgres://")


def is_url(name: Path | str) -> bool:
    """Whether the name is a server's URL. Raises `StoreUnusable` for any other URL, which would be a strange path."""
    if isinstance(name, Path):
        return False
    if name.startswith(SCHEMES):
        return True
    if "://" in name:  # not shown: it may contain a password
        raise StoreUnusable("a store is a postgresql:// URL or the path of a SQLite file; this URL is neither")
    return False


async def open_store(
    name: Path | str,
    *,
    max_attempts: int = 3,
    can_reevaluate: Callable[[str], bool] = lambda _: True,
    keeps_leases: bool = False,
    on_commit: Callable[[float, int], None] = lambda _seconds, _operations: None,
) -> SqlStore:
    """Opens the store of that name; the arguments are those of `SqliteStore.open`."""
    if not is_url(name):
        opened = SqliteStore.open
    else:
        try:
            from rollyard.store.postgres.store import PostgresStore
        except ModuleNotFoundError as error:
            raise StoreUnusable(
                f"a store in PostgreSQL needs the package {error.name}: pip install 'rollyard[postgres]'"
            ) from None
        opened = PostgresStore.open
    return await opened(
        str(name),
        max_attempts=max_attempts,
        can_reevaluate=can_reevaluate,
        keeps_leases=keeps_leases,
        on_commit=on_commit,
    )


def shown(name: Path | str) -> str:
    """Returns the name as it may be shown and logged: a URL without its password."""
    if not is_url(name):
        return str(name)
    return Address.parse(str(name)).shown
