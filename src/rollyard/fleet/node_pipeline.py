"""A node's yard: one that tells when it may have room, so that the head need not wait for the next poll to fill it."""

from __future__ import annotations

from collections.abc import Callable

from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import Tracer
from rollyard.pipeline import Pipeline, PipelineSettings, StageResources
from rollyard.store.base import Store


class NodePipeline(Pipeline):
    """See the module. Whatever frees a place wakes the yard: a slot of a pool, the end of an attempt, a resize."""

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
