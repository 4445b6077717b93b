"""The Python SDK: `AsyncClient` and `Client`, with the same methods, and the records that they return.

`rollyard.client.batching` converts groups for a trainer: advantages, padded arrays, importance weights.
"""

from rollyard.client._async import AsyncClient
from rollyard.client._draws import AsyncDraw
from rollyard.client._errors import DrawEnded, ServiceUnreachable, UnexpectedReply
from rollyard.client._policies import AsyncPolicy, AsyncUpdate
from rollyard.client._sessions import AsyncSession
from rollyard.client._sync import Client, Draw, Policy, Session, Update
from rollyard.client.groups import Batch, Group, GroupRollout
from rollyard.client.records import Evaluation, Event, Page, Record, TaskCheck, TaskProblem, Trace, Trajectory

__all__ = [
    "AsyncClient",
    "AsyncDraw",
    "AsyncPolicy",
    "AsyncSession",
    "AsyncUpdate",
    "Batch",
    "Client",
    "Draw",
    "DrawEnded",
    "Evaluation",
    "Event",
    "Group",
    "GroupRollout",
    "Page",
    "Policy",
    "Record",
    "ServiceUnreachable",
    "Session",
    "TaskCheck",
    "TaskProblem",
    "Trace",
    "Trajectory",
    "UnexpectedReply",
    "Update",
]
