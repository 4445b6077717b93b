"""The Python SDK: `AsyncClient` and `Client`, alike method for method, and the records that they return."""

from rollyard.client._async import AsyncClient
from rollyard.client._errors import ServiceUnreachable, UnexpectedReply
from rollyard.client._sessions import AsyncSession, Session
from rollyard.client._sync import Client
from rollyard.client.records import Event, Page, Record, Trace, Trajectory

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "Client",
    "Event",
    "Page",
    "Record",
    "ServiceUnreachable",
    "Session",
    "Trace",
    "Trajectory",
    "UnexpectedReply",
]
