"""Stages, scheduler, lifecycle and deadlines: the way of a rollout from queued to its one terminal record."""

from rollyard.pipeline.artifacts import ArtifactFolder
from rollyard.pipeline.event_log import Event, EventLog
from rollyard.pipeline.handler import Handler
from rollyard.pipeline.pipeline import Pipeline
from rollyard.pipeline.renderers import Renderers
from rollyard.pipeline.resources import StageResources
from rollyard.pipeline.settings import PipelineSettings

__all__ = [
    "ArtifactFolder",
    "Event",
    "EventLog",
    "Handler",
    "Pipeline",
    "PipelineSettings",
    "Renderers",
    "StageResources",
]
