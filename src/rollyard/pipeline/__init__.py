"""Stages, scheduler, lifecycle and deadlines: the way of a rollout from queued to its one terminal record."""

from rollyard.pipeline.artifacts import ArtifactFolder
from rollyard.pipeline.handler import Handler
from rollyard.pipeline.hub import Event, Hub
from rollyard.pipeline.renderers import Renderers
from rollyard.pipeline.settings import PipelineSettings
from rollyard.pipeline.workshop import Workshop
from rollyard.pipeline.yard import Yard

__all__ = ["ArtifactFolder", "Event", "Handler", "Hub", "PipelineSettings", "Renderers", "Workshop", "Yard"]
