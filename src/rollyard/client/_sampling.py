"""Methods of the client for groups, draws and evaluations.

Ids are generated here if the caller passes none, so an interrupted call can be sent again and creates nothing twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollyard.client._bodies import TaskLike, part, source_body, task_body, without_none
from rollyard.client._draws import AsyncDraw
from rollyard.client._transport import ARROW, Transport
from rollyard.client._waiting import POLL_S
from rollyard.client.groups import Group, GroupRollout, read_group
from rollyard.client.records import Evaluation, JsonObject, Record, read, read_object
from rollyard.core import Json, check_id, new_id

PROGRESS_S = 2.0  # polling interval of an evaluation with `on_progress`
Objects = list[JsonObject]


class AsyncSampling:
    """Mixin of `AsyncClient` for groups, draws and evaluations."""

    _wire: Transport

    # --- groups ---------------------------------------------------------------------------------------

    async def group(
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
        """Submits n rollouts of one task as a group. It is durable when it returns; `get_group` waits for its end.

        A spare replaces a member that was lost to infrastructure.
        """
        body = without_none(
            id=check_id(id) if id else new_id("g"),
            run=run,
            task=task_body(task),
            size=size,
            spares=spares,
            min_members=min_members,
            priority=priority,
        )
        reply = read_object(await self._wire.json("POST", "/groups", body=body, is_repeatable=True))
        return read_group(next(iter(reply.get("groups") or ()), None))

    async def get_group(self, id: str, *, wait_s: float = 0.0, traces: bool = False, run: str | None = None) -> Group:
        """The current group; with `wait_s`, the group at its end or after that time.

        `traces`: include the complete records and traces of its members, for `collate`; otherwise only their summary.
        """
        params = {"wait_s": wait_s or None, "run": run}
        group = read_group(await self._wire.json("GET", f"/groups/{part(id)}", params=params, wait_s=wait_s))
        if not traces:
            return group
        whole = await asyncio.gather(*(self._whole(each, run) for each in group.rollouts))
        return replace(group, rollouts=tuple(whole))

    async def cancel_group(self, id: str, *, run: str | None = None) -> str:
        """Cancels a group and returns its state."""
        body = await self._wire.json("DELETE", f"/groups/{part(id)}", params={"run": run})
        return str(read_object(body).get("state", ""))

    async def _whole(self, rollout: GroupRollout, run: str | None) -> GroupRollout:
        from rollyard.client.arrow import read_traces

        path = f"/rollouts/{part(rollout.id)}"
        params = {"run": run}
        record = read(await self._wire.json("GET", path, params=params), Record)
        traces: tuple[Any, ...] = ()
        if (record.summary or {}).get("traces"):
            data, _ = await self._wire.call("GET", f"{path}/traces", params=params, accept=ARROW)
            traces = tuple(read_traces(data))
        return GroupRollout(record.id, rollout.index, record.reward, record.trainable, record, traces)

    # --- draws ----------------------------------------------------------------------------------------

    async def draw(
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
    ) -> AsyncDraw:
        """A stream of useful groups from these tasks, or from a `source` that the service reads.

        With the id and body of an existing draw, continues that draw. Parameters that are not given have the service's
        defaults: groups of 8, kept if their rewards differ, one version of staleness, unlimited `epochs`.
        """
        body = without_none(
            id=check_id(id) if id else new_id("d"),
            run=run,
            source=source_body(tasks, source),
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
        return AsyncDraw(
            self._wire, read_object(await self._wire.json("POST", "/draws", body=body, is_repeatable=True))
        )

    async def draws(self) -> Objects:
        """All draws, each as in `AsyncDraw.status`."""
        body = read_object(await self._wire.json("GET", "/draws"))
        return [read_object(item) for item in body.get("draws") or ()]

    async def get_draw(self, id: str, *, run: str | None = None) -> AsyncDraw:
        """An existing draw, to continue it."""
        return AsyncDraw(
            self._wire, read_object(await self._wire.json("GET", f"/draws/{part(id)}", params={"run": run}))
        )

    # --- evaluations ----------------------------------------------------------------------------------

    async def evaluate(
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
        """Takes k samples of each task by one weight version, and returns the evaluation, with pass@k, at its end. It
        may have `failed`.

        `by`, a key of the tasks' data, adds results per value; `defaults` is a partial task with defaults for each
        task. `on_progress` is called whenever more of it is done. Raises TimeoutError if it has not ended after
        `timeout_s`; it continues, and a call with the same id and body waits for it again.
        """
        body = without_none(
            id=check_id(id) if id else new_id("ev"),
            run=run,
            policy=policy,
            source=source_body(tasks, source),
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
        )
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        evaluation = read(await self._wire.json("POST", "/evals", body=body, is_repeatable=True), Evaluation)
        reported = 0
        while True:
            if on_progress is not None and evaluation.done > reported:
                reported = evaluation.done
                on_progress(evaluation)
            if evaluation.is_ended:
                return evaluation
            if give_up is not None and time.monotonic() >= give_up:
                raise TimeoutError(
                    f"evaluation {evaluation.id} has {evaluation.done} of {evaluation.total} after {timeout_s:g} s"
                )
            wait_s = POLL_S if on_progress is None else PROGRESS_S
            poll_s = wait_s if give_up is None else min(wait_s, max(0.0, give_up - time.monotonic()))
            evaluation = await self.get_eval(evaluation.id, wait_s=poll_s, run=evaluation.run or None)

    async def get_eval(self, id: str, *, wait_s: float = 0.0, run: str | None = None) -> Evaluation:
        """The current evaluation; with `wait_s`, the evaluation at its end or after that time."""
        params = {"wait_s": wait_s or None, "run": run}
        return read(await self._wire.json("GET", f"/evals/{part(id)}", params=params, wait_s=wait_s), Evaluation)

    async def cancel_eval(self, id: str, *, run: str | None = None) -> str:
        """Cancels an evaluation and returns its state."""
        body = await self._wire.json("DELETE", f"/evals/{part(id)}", params={"run": run})
        return str(read_object(body).get("state", ""))
