"""The half of the client that samples: groups, draws, evaluations. `AsyncClient` has these methods; so has `Client`.

Ids are made here where the caller gives none, so a call that was dropped is sent again and makes nothing twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollyard.client._bodies import TaskLike, given, part, source_body, task_body
from rollyard.client._draws import AsyncDraw
from rollyard.client._transport import ARROW, Transport
from rollyard.client._waiting import POLL_S
from rollyard.client.groups import Group, GroupRollout, read_group
from rollyard.client.records import Evaluation, JsonObject, Record, read, read_object
from rollyard.core import Json, check_id, new_id

PROGRESS_S = 2.0  # between two looks at an evaluation whose progress somebody watches
Objects = list[JsonObject]


class AsyncSampling:
    """See the module."""

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
        """n rollouts of one task, handed in: it comes back at once, durable; `get_group` waits for its end.

        A spare takes the place of a member that infrastructure failed.
        """
        body = given(
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
        """The group as it stands; with `wait_s`, at its end or when that time is over.

        `traces`: with its members' whole records and traces, for `collate`; else with what the group says of them.
        """
        params = {"wait_s": wait_s or None, "run": run}
        group = read_group(await self._wire.json("GET", f"/groups/{part(id)}", params=params, wait_s=wait_s))
        if not traces:
            return group
        whole = await asyncio.gather(*(self._whole(each, run) for each in group.rollouts))
        return replace(group, rollouts=tuple(whole))

    async def cancel_group(self, id: str, *, run: str | None = None) -> str:
        """Acknowledged when it returns, with the group's state."""
        body = await self._wire.json("DELETE", f"/groups/{part(id)}", params={"run": run})
        return str(read_object(body).get("state", ""))

    async def _whole(self, rollout: GroupRollout, run: str | None) -> GroupRollout:
        from rollyard.client.arrow import read_traces

        path = f"/rollouts/{part(rollout.id)}"
        params = {"run": run}
        record = read(await self._wire.json("GET", path, params=params), Record)
        found: tuple[Any, ...] = ()
        if (record.summary or {}).get("traces"):
            data, _ = await self._wire.call("GET", f"{path}/traces", params=params, accept=ARROW)
            found = tuple(read_traces(data))
        return GroupRollout(record.id, rollout.index, record.reward, record.trainable, record, found)

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

        With the id and the body of one that is there, it goes on with that one. What is not given is the service's
        default: groups of 8, kept where their rewards differ, one version of staleness, `epochs` without end.
        """
        body = given(
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
        """All draws, each as `AsyncDraw.status` has it."""
        body = read_object(await self._wire.json("GET", "/draws"))
        return [read_object(item) for item in body.get("draws") or ()]

    async def get_draw(self, id: str, *, run: str | None = None) -> AsyncDraw:
        """One that is there, to go on with."""
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
        """k samples of each task by one version of the policy, with pass@k; at its end, which may be `failed`.

        `by`, a key of the tasks' data, asks for numbers of each of its values; `defaults` is laid under each task.
        `on_progress` gets it each time that more of it is done. TimeoutError when it has not ended by then; it goes on
        all the same, and the same id and body wait for it again.
        """
        body = given(
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
        found = read(await self._wire.json("POST", "/evals", body=body, is_repeatable=True), Evaluation)
        told = 0
        while True:
            if on_progress is not None and found.done > told:
                told = found.done
                on_progress(found)
            if found.is_ended:
                return found
            if give_up is not None and time.monotonic() >= give_up:
                raise TimeoutError(f"evaluation {found.id} has {found.done} of {found.total} after {timeout_s:g} s")
            wait_s = POLL_S if on_progress is None else PROGRESS_S
            left_s = wait_s if give_up is None else min(wait_s, max(0.0, give_up - time.monotonic()))
            found = await self.get_eval(found.id, wait_s=left_s, run=found.run or None)

    async def get_eval(self, id: str, *, wait_s: float = 0.0, run: str | None = None) -> Evaluation:
        """The evaluation as it stands; with `wait_s`, at its end or when that time is over."""
        params = {"wait_s": wait_s or None, "run": run}
        return read(await self._wire.json("GET", f"/evals/{part(id)}", params=params, wait_s=wait_s), Evaluation)

    async def cancel_eval(self, id: str, *, run: str | None = None) -> str:
        """Acknowledged when it returns, with the evaluation's state."""
        body = await self._wire.json("DELETE", f"/evals/{part(id)}", params={"run": run})
        return str(read_object(body).get("state", ""))
