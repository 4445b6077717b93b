"""A node's pipeline, which reports that it may have room, so that the head can fill it before the next poll."""

from __future__ import annotations

from collections.abc import Callable

from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import Tracer
from rollyard.pipeline import Pipeline, PipelineSettings, StageResources
from rollyard.store.base import Store


class NodePipeline(Pipeline):
    """A pipeline that calls `on_room` after everything that may free a place: a slot of a pool, the end of an attempt,
    a resize."""

    def __init__(
        self,
        store: Store,
        resources: StageResources,
        settings: PipelineSettings,
        *,
        metrics: Metrics,
        tracer: Tracer,
        on_room: Callable[[], None],
    ) -> None:
        super().__init__(store, resources, settings, metrics=metrics, tracer=tracer)
        self._on_room = on_room

    def _admit(self) -> None:
        super()._admit()
        self._on_room()
