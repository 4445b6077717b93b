"""The pipeline: stages, scheduling, retries and deadlines of a rollout, from the queue to its terminal record."""

from rollyard.pipeline.artifacts import ArtifactFolder
from rollyard.pipeline.attempts.storable import storable_message
from rollyard.pipeline.base import Snapshot
from rollyard.pipeline.event_log import Event, EventLog
from rollyard.pipeline.handler import Handler
from rollyard.pipeline.local_executor import LocalExecutor
from rollyard.pipeline.pipeline import Pipeline
from rollyard.pipeline.renderers import Renderers
from rollyard.pipeline.resources import StageResources
from rollyard.pipeline.settings import PipelineSettings

__all__ = [
    "ArtifactFolder",
    "Event",
    "EventLog",
    "Handler",
    "LocalExecutor",
    "Pipeline",
    "PipelineSettings",
    "Renderers",
    "Snapshot",
    "StageResources",
    "storable_message",
]
