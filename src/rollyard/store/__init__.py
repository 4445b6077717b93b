"""The durable record of everything: the door is `base.Store`, the embedded one is `SqliteStore`."""

from rollyard.store.base import (
    Page,
    QueuedRow,
    Recovered,
    Retention,
    Stale,
    Store,
    StoreLocked,
    StoreUnusable,
    Submission,
)
from rollyard.store.codec import CorruptRecord, decode_trajectory, encode_trajectory
from rollyard.store.sqlite import SqliteStore

__all__ = [
    "CorruptRecord",
    "Page",
    "QueuedRow",
    "Recovered",
    "Retention",
    "SqliteStore",
    "Stale",
    "Store",
    "StoreLocked",
    "StoreUnusable",
    "Submission",
    "decode_trajectory",
    "encode_trajectory",
]
