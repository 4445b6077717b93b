"""Methods of the client for groups, draws and evaluations, without `await`. `AsyncSampling` documents each method."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from rollyard.client._bodies import TaskLike
from rollyard.client._draws import Draw
from rollyard.client._sampling import Objects
from rollyard.client.groups import Group
from rollyard.client.records import Evaluation
from rollyard.core import Json

if TYPE_CHECKING:
    from rollyard.client._async import AsyncClient

T = TypeVar("T")


class Sampling:
    """Mixin of `Client` for groups, draws and evaluations."""

    if TYPE_CHECKING:
        _pipeline: AsyncClient

        def _run(self, work: Coroutine[object, object, T]) -> T: ...
        def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]: ...

    def group(
        self,
        task: TaskLike,
        *,
        id: str | None = None,
        run: str = "default",
        size: int = 8,
        spares: int | None = None,
        min_members: int | None = None,
        priority: int | None = None,
    ) -> Group:
        return self._run(
            self._client.group(
                task, id=id, run=run, size=size, spares=spares, min_members=min_members, priority=priority
            )
        )

    def get_group(self, id: str, *, wait_s: float = 0.0, traces: bool = False, run: str | None = None) -> Group:
        return self._run(self._client.get_group(id, wait_s=wait_s, traces=traces, run=run))

    def cancel_group(self, id: str, *, run: str | None = None) -> str:
        return self._run(self._client.cancel_group(id, run=run))

    def draw(
        self,
        run: str,
        tasks: Sequence[TaskLike] | None = None,
        *,
        source: Mapping[str, Json] | None = None,
        id: str | None = None,
        group_size: int | None = None,
        spares: int | None = None,
        min_members: int | None = None,
        epochs: int | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        keep: str | Mapping[str, Json] | None = None,
        max_groups_in_flight: int | None = None,
        max_staleness: int | None = None,
        on_stale: str | None = None,
        surplus: str | None = None,
        budget: Mapping[str, Json] | None = None,
        patience: int | None = None,
        priority: int | None = None,
    ) -> Draw:
        return Draw(
            self._run,
            self._iterate,
            self._run(
                self._client.draw(
                    run,
                    tasks,
                    source=source,
                    id=id,
                    group_size=group_size,
                    spares=spares,
                    min_members=min_members,
                    epochs=epochs,
                    shuffle=shuffle,
                    seed=seed,
                    keep=keep,
                    max_groups_in_flight=max_groups_in_flight,
                    max_staleness=max_staleness,
                    on_stale=on_stale,
                    surplus=surplus,
                    budget=budget,
                    patience=patience,
                    priority=priority,
                )
            ),
        )

    def draws(self) -> Objects:
        return self._run(self._client.draws())

    def get_draw(self, id: str, *, run: str | None = None) -> Draw:
        return Draw(self._run, self._iterate, self._run(self._client.get_draw(id, run=run)))

    def evaluate(
        self,
        tasks: Sequence[TaskLike] | None = None,
        *,
        source: Mapping[str, Json] | None = None,
        id: str | None = None,
        run: str | None = None,
        policy: str | None = None,
        k: int = 1,
        samples: int | None = None,
        threshold: float | None = None,
        priority: int | None = None,
        pool_share: float | None = None,
        max_missing: float | None = None,
        on_update: str | None = None,
        seed: int | None = None,
        by: str | None = None,
        defaults: Mapping[str, Json] | None = None,
        on_progress: Callable[[Evaluation], object] | None = None,
        timeout_s: float | None = None,
    ) -> Evaluation:
        return self._run(
            self._client.evaluate(
                tasks,
                source=source,
                id=id,
                run=run,
                policy=policy,
                k=k,
                samples=samples,
                threshold=threshold,
                priority=priority,
                pool_share=pool_share,
                max_missing=max_missing,
                on_update=on_update,
                seed=seed,
                by=by,
                defaults=defaults,
                on_progress=on_progress,
                timeout_s=timeout_s,
            )
        )

    def get_eval(self, id: str, *, wait_s: float = 0.0, run: str | None = None) -> Evaluation:
        return self._run(self._client.get_eval(id, wait_s=wait_s, run=run))

    def cancel_eval(self, id: str, *, run: str | None = None) -> str:
        return self._run(self._client.cancel_eval(id, run=run))
