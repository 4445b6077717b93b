"""Adapter for verl: `RollyardAgentLoopManager` replaces verl's agent loops.

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollyard.trainers.verl.RollyardAgentLoopManager

verl passes prompts, each with its task; prompts with the same `uid` are one group. Its trainer (0.9, "V1") reads the
results from its TransferQueue: any number of rows for each prompt, including all traces of a rollout. Its older trainer
takes a `DataProto` of exactly as many rows as it passed, in their order. The type of the prompts selects between them.

Invariants. A rollout that infrastructure failed is never a row with a reward of its own. An untrainable rollout is in
no loss and does not change the baseline. Nothing is sampled while verl updates weights (`_verl_service.py`). Versions
are verl's `global_steps`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from rollyard.client.groups import Group
from rollyard.core.group import mean_of
from rollyard.trainers._verl_prompts import PromptGroup, asks_of_prompts, asks_of_repeated
from rollyard.trainers._verl_rows import GroupRows, VerlRow, fill, group_rows_of, padded
from rollyard.trainers._verl_service import VerlService
from rollyard.trainers._verl_settings import read_settings, refuse

__all__ = ["RollyardAgentLoopManager"]

log = logging.getLogger(__name__)

PAD_ID = 0  # where verl's attention mask is 0


class RollyardAgentLoopManager:
    """Runs verl's prompts as groups. `config` is verl's whole configuration; `_verl_settings.py` reads Rollyard's part.

    verl's other arguments for agent loops (teachers, reward workers) are ignored.
    """

    def __init__(self, config: Any, llm_client: Any = None, **_: Any) -> None:
        refuse(config)
        self._settings = read_settings(config)
        self._rollout = config.actor_rollout_ref.rollout
        self._service = VerlService(config, self._settings, llm_client)
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: Exception | None = None  # why a group in the background was lost

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> RollyardAgentLoopManager:
        """Called by verl. The service must be reachable now; verl's servers, with the first prompts."""
        manager = cls(*args, **kwargs)
        manager._service.start()
        return manager

    def close(self) -> None:
        """For callers other than verl, whose processes just end."""
        self._service.stop()

    def generate_sequences(self, prompts: Any) -> Any:
        """Returns a `DataProto` for a `DataProto`. For a `TensorDict`, returns None: rows go into the TransferQueue.

        Some of verl's trainers await the result, others do not: if the caller is a coroutine, returns an awaitable.
        """
        if self._broken is not None:
            raise RuntimeError(f"rollouts of an earlier batch were lost: {self._broken}") from self._broken
        if not hasattr(prompts, "non_tensor_batch"):
            return self._service.call(self._into_queue(prompts))
        future = self._service.submit(self._as_data_proto(prompts))
        if sys._getframe(1).f_code.co_flags & inspect.CO_COROUTINE:
            return asyncio.wrap_future(future)
        return future.result()

    # --- V1: into the TransferQueue -------------------------------------------------------------------

    async def _into_queue(self, prompts: Any) -> None:
        from rollyard.trainers._verl_types import rows_of

        asks = asks_of_prompts(rows_of(prompts), self._rollout, self._settings)
        await self._service.begin(asks)
        for ask in asks:
            task = asyncio.create_task(self._deliver(ask))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _deliver(self, ask: PromptGroup) -> None:
        """Writes a group's rows, then its status, also after an error: verl waits for the status without a limit.

        For verl, a group with a missing member is a failure: depending on its settings, verl replaces it or uses its
        rows. A group with a single row is not written: verl would use that row's reward as its advantage.
        """
        from rollyard.trainers._verl_types import put_rows, put_status

        status = "failure"
        try:
            await put_status(ask, "running")
            async with self._service.ended(ask) as group:
                group_rows = self._rows_of_group(ask, group)
                if len(group_rows.members) >= (1 if ask.is_validation else min(2, ask.size)):
                    await put_rows(ask, group_rows.rows)
                    status = "failure" if group_rows.lost else "finished"
        except Exception as error:
            log.exception("rollyard.group_lost %s", ask.group)
            self._broken, status = error, "failure"
        await put_status(ask, status)

    # --- the older trainer: a DataProto ---------------------------------------------------------------

    async def _as_data_proto(self, prompts: Any) -> Any:
        from rollyard.trainers._verl_types import data_proto

        started = time.monotonic()
        asks, place = asks_of_repeated(prompts, self._settings)
        await self._service.begin(asks)
        groups = await asyncio.gather(*(self._collect(ask) for ask in asks))
        if not any(each.members for each in groups):
            raise RuntimeError(f"no group of {len(asks)} has a rollout to learn from: {groups[0].reason}")
        filled = [fill(each, PAD_ID, score) for each, score in zip(groups, _means(asks, groups), strict=True)]
        of_ask = [iter(rows) for rows, _ in filled]
        rows = [next(of_ask[ask]) for ask in place]
        left_out = [row for _, more in filled for row in more]
        arrays = padded(rows, int(self._rollout.prompt_length), int(self._rollout.response_length), PAD_ID)
        figures = {
            **_seconds([row for row in rows if isinstance(row, VerlRow)]),
            "agent_loop/rollyard/batch": time.monotonic() - started,
            # Counts, in the only place that this trainer reads from a manager.
            "agent_loop/rollyard/blank_rows": float(sum(not isinstance(row, VerlRow) for row in rows)),
            "agent_loop/rollyard/lost_members": float(sum(each.lost for each in groups)),
            "agent_loop/rollyard/traces_left_out": float(len(left_out)),
            "agent_loop/rollyard/tokens_left_out": float(sum(row.sampled_tokens for row in left_out)),
        }
        return data_proto(prompts, arrays, rows, figures)

    async def _collect(self, ask: PromptGroup) -> GroupRows:
        async with self._service.ended(ask) as group:
            return self._rows_of_group(ask, group)

    def _rows_of_group(self, ask: PromptGroup, group: Group) -> GroupRows:
        temperature = None if ask.is_validation or ask.is_greedy else float(self._rollout.temperature)
        group_rows = group_rows_of(group, ask.size, is_training=not ask.is_validation, temperature=temperature)
        if group_rows.lost or group_rows.untrainable:
            facts = {
                "group": group.id,
                "lost": group_rows.lost,
                "untrainable": group_rows.untrainable,
                "reason": group_rows.reason,
            }
            log.warning("rollyard.short_group", extra=facts)
        return group_rows


def _means(asks: Sequence[PromptGroup], groups: Sequence[GroupRows]) -> list[float]:
    """Returns for each ask the mean of the groups of its data source, by which verl groups its validation figures; if
    all of that source are lost, the mean of all groups."""
    means: dict[str | None, list[float]] = {}
    for ask, each in zip(asks, groups, strict=True):
        if each.mean is not None:
            for source in (str(ask.fields.get("data_source")), None):
                means.setdefault(source, []).append(each.mean)
    chosen = [means.get(str(ask.fields.get("data_source"))) or means.get(None) or [] for ask in asks]
    return [mean_of(each) or 0.0 for each in chosen]


def _seconds(rows: Sequence[VerlRow]) -> dict[str, float]:
    """Returns durations, under the names that verl logs."""
    figures: dict[str, float] = {}
    for name in ("generate_sequences", "tool_calls", "compute_score"):
        seconds = [row.seconds[name] for row in rows]
        figures |= {f"agent_loop/{name}/{what}": of(seconds) for what, of in (("min", min), ("max", max))}
        figures[f"agent_loop/{name}/mean"] = sum(seconds) / len(seconds)
    return figures
