"""Reads and writes verl's types: its prompts, rows of its TransferQueue, its DataProto.

Besides `verl_sampler.py`, only this module imports verl.

The TransferQueue holds a tag with a prompt's status under its uid, and each row under `{uid}_{session}_{index}`:
session counts the rollouts of the prompt, index the traces of a rollout. verl computes a rollout's advantage from its
last index, and assigns it to all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollyard.trainers._verl_prompts import PromptGroup
from rollyard.trainers._verl_rows import BlankRow, VerlRow

if TYPE_CHECKING:
    from numpy.typing import NDArray


def rows_of(prompts: Any) -> list[dict[str, Any]]:
    """Returns the rows of a TensorDict: tensors, and other values, one per row or the same for all."""
    from tensordict import NonTensorData, NonTensorStack  # type: ignore[import-not-found]

    def value(column: Any, i: int) -> Any:
        if isinstance(column, NonTensorStack):
            return column[i].data
        return column.data if isinstance(column, NonTensorData) else column[i]

    return [{name: value(column, i) for name, column in prompts.items()} for i in range(len(prompts))]


async def put_status(ask: PromptGroup, status: str) -> None:
    """Sets the status: running; at the end finished, or failure if a member is missing."""
    import transfer_queue as tq  # type: ignore[import-not-found]

    # In a thread, not by the async variant: the sockets belong to a loop of the client.
    await asyncio.to_thread(tq.kv_put, key=ask.uid, partition_id=_partition(ask), tag={"status": status})


async def put_rows(ask: PromptGroup, rows: Sequence[tuple[int, VerlRow]]) -> None:
    """Writes rows, each with the number of its rollout among those that count."""
    keys: list[str] = []
    values: list[dict[str, Any]] = []
    tags: list[dict[str, Any]] = []
    counts: dict[int, int] = {}
    for session, row in rows:
        index = counts[session] = counts.get(session, -1) + 1
        keys.append(f"{ask.uid}_{session}_{index}")
        values.append({**_fields(row), **ask.fields, "session_id": session})
        tags.append(
            {
                "status": "success",
                "prompt_len": len(row.prompt_ids),
                "response_len": len(row.response_ids),
                "seq_len": len(row.prompt_ids) + len(row.response_ids),
                "global_steps": ask.step,
                "min_global_steps": row.oldest_version,
                "max_global_steps": row.newest_version,
            }
        )
    await asyncio.to_thread(_put, keys, values, tags, _partition(ask))


def _partition(ask: PromptGroup) -> str:
    return "val" if ask.is_validation else "train"


def _put(keys: list[str], values: list[dict[str, Any]], tags: list[dict[str, Any]], partition: str) -> None:
    import transfer_queue as tq  # type: ignore[import-not-found]
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict  # type: ignore[import-not-found]

    tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(values), tags=tags, partition_id=partition)


def _fields(row: VerlRow) -> dict[str, Any]:
    """Returns the fields as verl's agent loops do: an AgentLoopOutput, and the whole sequence."""
    import torch  # type: ignore[import-not-found]
    from verl.experimental.agent_loop.agent_loop import (  # type: ignore[import-not-found]
        AgentLoopMetrics,
        AgentLoopOutput,
    )

    fields: dict[str, Any] = AgentLoopOutput(
        prompt_ids=row.prompt_ids.tolist(),
        response_ids=row.response_ids.tolist(),
        response_mask=row.mask.tolist(),
        response_logprobs=row.logprobs.tolist(),
        reward_score=row.reward,
        num_turns=row.turns,
        metrics=AgentLoopMetrics(**row.seconds),
        extra_fields={
            "reward_extra_info": row.components,
            "min_global_steps": row.oldest_version,
            "max_global_steps": row.newest_version,
            "rollyard_rollout": row.rollout.id,
        },
    ).as_dict()
    whole = torch.cat((fields["prompts"], fields["responses"]))
    return fields | {
        "loss_mask": fields["response_mask"],
        "input_ids": whole,
        "position_ids": torch.arange(len(whole), dtype=torch.int64),
        "multi_modal_inputs": {},
    }


def data_proto(
    prompts: Any, arrays: Mapping[str, NDArray[Any]], rows: Sequence[VerlRow | BlankRow], figures: Mapping[str, float]
) -> Any:
    """Returns one row per prompt, in order, with the prompts' own fields."""
    import numpy as np
    import torch  # type: ignore[import-not-found]
    from tensordict import TensorDict  # type: ignore[import-not-found]
    from verl.protocol import DataProto  # type: ignore[import-not-found]

    def objects(values: Sequence[object]) -> NDArray[Any]:
        column = np.empty(len(values), dtype=object)
        column[:] = values
        return column

    batch = TensorDict({name: torch.from_numpy(array) for name, array in arrays.items()}, batch_size=len(rows))
    real = [row if isinstance(row, VerlRow) else None for row in rows]
    others = {
        **prompts.non_tensor_batch,
        "__num_turns__": np.array([row.turns if row else 0 for row in real], dtype=np.int32),
        "multi_modal_inputs": objects([{} for _ in real]),
        "min_global_steps": objects([row.oldest_version if row else None for row in real]),
        "max_global_steps": objects([row.newest_version if row else None for row in real]),
        "rollyard_rollout": objects([row.rollout.id if row else None for row in real]),
    }
    meta = {"timing": dict(figures), "reward_extra_keys": []}
    return DataProto(batch=batch, non_tensor_batch=others, meta_info=meta)
