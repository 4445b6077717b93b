"""Counts the connections and bytes of one attempt, for its record. Its size is bounded."""

from __future__ import annotations

from dataclasses import dataclass

from rollyard.core.json import Json

MOST_ENTRIES = 32
"""Hosts that a record names. Later ones are counted without a name."""

ALLOWED = "allowed"


@dataclass(slots=True)
class EgressEntry:
    """Connections to one host and port with one verdict."""

    host: str
    port: int
    verdict: str
    count: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class EgressLedger:
    """The counts of one attempt. All its sandboxes share a ledger, so that the byte limit applies to their total."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int, str], EgressEntry] = {}
        self.sent_bytes = 0
        self.received_bytes = 0
        self.verdicts: dict[str, int] = {}

    @property
    def failed_connections(self) -> int:
        """Connections to allowed hosts that could not be resolved or reached, because of the network or the host."""
        return self.verdicts.get("dns", 0) + self.verdicts.get("connect", 0)

    @property
    def total_bytes(self) -> int:
        return self.sent_bytes + self.received_bytes

    def enter(self, host: str, port: int, verdict: str) -> tuple[EgressEntry, bool]:
        """Counts a connection. Returns its entry, and whether the entry is new and named in the record."""
        self.verdicts[verdict] = self.verdicts.get(verdict, 0) + 1
        key = (host, port, verdict)
        entry = self._entries.get(key)
        is_new = entry is None and len(self._entries) < MOST_ENTRIES
        if entry is None:
            entry = EgressEntry(host, port, verdict)
            if is_new:
                self._entries[key] = entry
        entry.count += 1
        return entry, is_new

    def add(self, entry: EgressEntry | None, *, sent: int = 0, received: int = 0) -> None:
        self.sent_bytes += sent
        self.received_bytes += received
        if entry is not None:
            entry.sent_bytes += sent
            entry.received_bytes += received

    def summary(self) -> dict[str, Json]:
        """Returns the record's summary; empty if no connection was tried."""
        if not self.verdicts:
            return {}
        hosts: list[Json] = [
            {
                "host": entry.host,
                "port": entry.port,
                "verdict": entry.verdict,
                "count": entry.count,
                "sent_bytes": entry.sent_bytes,
                "received_bytes": entry.received_bytes,
            }
            for entry in self._entries.values()
        ]
        named = sum(entry.count for entry in self._entries.values())
        return {
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.received_bytes,
            "hosts": hosts,
            "unnamed": sum(self.verdicts.values()) - named,
        }
