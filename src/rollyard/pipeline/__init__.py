"""The pipeline: stages, scheduling, retries and deadlines of a rollout, from the queue to its terminal record."""

from rollyard.pipeline.artifacts import ArtifactFolder
from rollyard.pipeline.base import MessagePage, Snapshot
from rollyard.pipeline.event_log import Event, EventLog
from rollyard.pipeline.handler import Handler
from rollyard.pipeline.local_executor import LocalExecutor
from rollyard.pipeline.message_page import page_of
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
    "MessagePage",
    "Pipeline",
    "PipelineSettings",
    "Renderers",
    "Snapshot",
    "StageResources",
    "page_of",
]
