"""The durable record of everything. The interface is `base.Store`; `SqliteStore` is the embedded store, `PostgresStore`
the shared one (imported on first use, since it needs the packages of the extra `postgres`)."""

from typing import TYPE_CHECKING

from rollyard.store.base import (
    EncodedTrajectory,
    LeasedRow,
    Page,
    QueuedRow,
    Recovery,
    Retention,
    Stale,
    Store,
    StoreLocked,
    StoreUnusable,
    Submission,
    SweepResult,
)
from rollyard.store.codec import CorruptRecord, decode_trajectory, encode_trajectory
from rollyard.store.opening import open_store
from rollyard.store.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from rollyard.store.postgres.store import PostgresStore as PostgresStore

__all__ = [
    "CorruptRecord",
    "EncodedTrajectory",
    "LeasedRow",
    "Page",
    "QueuedRow",
    "Recovery",
    "Retention",
    "SqliteStore",
    "Stale",
    "Store",
    "StoreLocked",
    "StoreUnusable",
    "Submission",
    "SweepResult",
    "decode_trajectory",
    "encode_trajectory",
    "open_store",
]


def __getattr__(name: str) -> object:
    if name == "PostgresStore":
        from rollyard.store.postgres.store import PostgresStore

        return PostgresStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
