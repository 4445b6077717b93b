"""Converts verl's prompts to groups: the task of a row, the number of its rollouts, and their run.

A row's task is its field `rollyard_task`, or the one of that name in its `extra_info`: a task as an object, or as JSON
text (parquet adds the fields of all other rows as nulls, which an environment may reject). Otherwise the environment is
the one in the configuration, and `rollyard.data` maps each field of its data to a path in the row:
`{"question": "raw_prompt.0.content", "answer": "reward_model.ground_truth"}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollyard.core import Json, new_id
from rollyard.trainers._verl_settings import Settings, at

TASK = "rollyard_task"
GREEDY: dict[str, Json] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """A prompt of verl, and its group."""

    uid: str
    group: str  # the group's id
    run: str
    size: int
    task: dict[str, Any]
    fields: Mapping[str, Any]  # of verl, returned with each row
    step: int  # verl's step at the request
    is_validation: bool = False
    is_greedy: bool = False

    @property
    def version(self) -> int:
        """Of the current weights: verl trains step g on samples of step g − 1, and validates after its update."""
        return self.step if self.is_validation else max(0, self.step - 1)


def asks_of_prompts(rows: Sequence[dict[str, Any]], rollout: Any, settings: Settings) -> list[PromptGroup]:
    """For V1: one row for each uid. n is from the configuration, unless the row overrides it."""
    asks: list[PromptGroup] = []
    for row in rows:
        fields = dict(row)
        is_validation = bool(fields.pop("validate", False))
        size = int(fields.pop("__rollout_n__", rollout.val_kwargs.n if is_validation else rollout.n))
        is_greedy = not fields.pop("__do_sample__", True) and not is_validation
        fields.pop("agent_name", None)
        step = int(fields["global_steps"])
        asks.append(_ask(fields, str(fields["uid"]), size, step, settings, is_validation, is_greedy))
    return asks


def asks_of_repeated(prompts: Any, settings: Settings) -> tuple[list[PromptGroup], list[int]]:
    """For the older trainer: a DataProto that has each prompt n times. Also returns the index of each row's group."""
    columns: Mapping[str, Sequence[Any]] = prompts.non_tensor_batch
    is_validation = bool(prompts.meta_info.get("validate", False))
    step = int(prompts.meta_info.get("global_steps", 0))
    rows: dict[tuple[str, bool], list[int]] = {}
    for i in range(len(prompts)):
        uid = str(columns["uid"][i]) if "uid" in columns else new_id("uid")
        is_greedy = not is_validation and "__do_sample__" in columns and not columns["__do_sample__"][i]
        rows.setdefault((uid, is_greedy), []).append(i)
    asks: list[PromptGroup] = []
    place = [0] * len(prompts)
    for (uid, is_greedy), indices in rows.items():
        for i in indices:
            place[i] = len(asks)
        fields = {name: column[indices[0]] for name, column in columns.items()}
        asks.append(_ask(fields, uid, len(indices), step, settings, is_validation, is_greedy))
    return asks, place


def _ask(
    fields: Mapping[str, Any],
    uid: str,
    size: int,
    step: int,
    settings: Settings,
    is_validation: bool,
    is_greedy: bool,
) -> PromptGroup:
    task = task_of(fields, settings)
    if is_greedy:
        task["sampling"] = {**task.get("sampling", {}), **GREEDY}
    run = settings.run + (".val" if is_validation else "")
    # verl makes new uids in every process; a repeated uid names the existing group.
    group = f"{run}-{uid}{'-greedy' if is_greedy else ''}"
    return PromptGroup(uid, group, run, size, task, fields, step, is_validation, is_greedy)


def task_of(row: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Returns the task of one row of verl's data, as described above."""
    task = row.get(TASK)
    if task is None:
        task = at(row, f"extra_info.{TASK}")
    if isinstance(task, str | bytes):
        try:
            task = msgspec.json.decode(task)
        except msgspec.DecodeError as error:
            raise ValueError(f"{TASK} of a row is not JSON: {error}") from None
    if task is None:
        if settings.environment is None:
            raise ValueError(f"a row has no {TASK}, and rollyard.environment is not set")
        data = {name: at(row, place) for name, place in settings.data.items()}
        missing = [settings.data[name] for name, value in data.items() if value is None]
        if missing:
            raise ValueError(f"a row has no {missing[0]!r}, to which rollyard.data refers")
        task = {"environment": settings.environment, "data": data}
    if not isinstance(task, Mapping) or not task.get("environment"):
        raise ValueError(f"{TASK} of a row is not a task: it names no environment")
    return plain(task)


def plain(value: Any) -> Any:
    """Converts a value to JSON types: numpy arrays and numbers become Python's."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if hasattr(value, "tolist"):  # numpy's scalars also have it
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
