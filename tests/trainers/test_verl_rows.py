"""verl's rows, from constructed groups and prompts. test_verl.py uses verl itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollyard.client import Group, GroupRollout, Record, Trace
from rollyard.core import Sampling
from rollyard.trainers._verl_prompts import PromptGroup, asks_of_prompts, asks_of_repeated, task_of
from rollyard.trainers._verl_rows import BlankRow, GroupRows, VerlRow, fill, group_rows_of, padded
from rollyard.trainers._verl_settings import Settings, defaults_of, read_settings, refuse
from rollyard.trainers.verl import _means

TASK = {"environment": "shell", "data": {"instruction": "x"}}


def trace(mask: str, **fields: object) -> Trace:
    """One character per token: 0 was not sampled, a digit was sampled by that version."""
    digits = np.array([int(char) for char in mask])
    sampled = digits > 0
    known: dict[str, Any] = {
        "token_ids": np.arange(100, 100 + len(mask), dtype=np.int32),
        "mask": sampled.astype(np.uint8),
        "logprobs": np.where(sampled, -0.1 * np.arange(len(mask)), 0.0).astype(np.float32),
        "versions": np.where(sampled, digits, -1).astype(np.int32),
        "trainable": True,
    }
    return Trace(**{**known, **fields})


def rollout(index: int, reward: float | None, *traces: Trace, trainable: bool = True, **fields: Any) -> GroupRollout:
    record = Record(id=f"g-{index}", reward=reward, trainable=trainable, **fields)
    return GroupRollout(record.id, index, reward, trainable, record, traces)


def reap(*rollouts: GroupRollout, size: int | None = None, is_training: bool = True, **fields: Any) -> GroupRows:
    group = Group("g", rollouts=rollouts, **fields)
    return group_rows_of(group, len(rollouts) if size is None else size, is_training=is_training, temperature=1.0)


def test_a_response_starts_at_the_first_sampled_token_and_ends_with_the_last():
    group_rows = reap(rollout(0, 0.5, trace("0003300040"), summary={"turns": 2}, timings={"model_s": 1.5}))
    ((row,),) = group_rows.members
    assert row.prompt_ids.tolist() == [100, 101, 102]
    assert row.response_ids.tolist() == [103, 104, 105, 106, 107, 108]
    assert row.mask.tolist() == [1, 1, 0, 0, 0, 1]
    assert row.logprobs.tolist() == pytest.approx([-0.3, -0.4, 0, 0, 0, -0.8])
    assert (row.reward, row.turns, row.oldest_version, row.newest_version) == (0.5, 2, 3, 4)
    assert row.seconds == {"generate_sequences": 1.5, "tool_calls": 0.0, "compute_score": 0.0}


def test_an_untrainable_rollout_has_a_row_only_in_validation():
    members = (
        rollout(0, 1.0, trace("01")),
        rollout(1, 0.0, trace("01"), trainable=False),
        rollout(2, None, trace("01")),
        rollout(3, 0.0, trace("00")),
        rollout(4, 0.0, trace("01", logprobs=None)),
        rollout(5, 0.0),
    )
    trained = reap(*members)
    assert [row.rollout.index for _, row in trained.rows] == [0]
    assert (trained.lost, trained.untrainable) == (0, 5)
    validated = reap(*members, is_training=False)
    assert [row.rollout.index for _, row in validated.rows] == [0, 1, 4]
    assert validated.members[2][0].logprobs.tolist() == [0.0]


def test_members_that_infrastructure_failed_are_counted_and_have_no_rows():
    group_rows = reap(rollout(0, 1.0, trace("01")), size=4, reason="short_of_members")
    assert (len(group_rows.rows), group_rows.lost, group_rows.untrainable, group_rows.reason) == (
        1,
        3,
        0,
        "short_of_members",
    )


def test_every_trace_of_a_forked_rollout_is_a_row_of_one_member():
    group_rows = reap(rollout(0, 1.0, trace("0110"), trace("0000"), trace("000111")), rollout(1, 0.0, trace("01")))
    assert [(member, len(row.response_ids)) for member, row in group_rows.rows] == [(0, 2), (0, 3), (1, 1)]


def test_a_trace_sampled_at_another_temperature_is_refused():
    with pytest.raises(ValueError, match=r"at temperature 0\.7, but verl computes its logprobs at 1 "):
        reap(rollout(0, 1.0, trace("01", sampling=Sampling(temperature=0.7))))


def test_names_that_verl_uses_are_no_components():
    score = {"components": {"tests": 0.5, "acc": 1.0, "reward": 3.0}}
    ((row,),) = reap(rollout(0, 1.0, trace("01"), score=score)).members
    assert row.components == {"tests": 0.5}


def test_a_blank_row_replaces_a_missing_member_with_the_mean_of_the_others():
    group_rows = reap(
        rollout(0, 1.0, trace("001")), rollout(1, 0.0, trace("001"), trainable=False), rollout(2, 0.5, trace("01"))
    )
    rows, left_out = fill(group_rows, pad_id=9)
    assert [type(row) for row in rows] == [VerlRow, VerlRow, BlankRow]
    assert rows[2].reward == 0.75
    assert rows[2].prompt_ids.tolist() == [100, 101]
    assert not left_out
    blanks, _ = fill(reap(size=2), 9, 0.75)
    assert [(row.reward, row.prompt_ids.tolist()) for row in blanks] == [(0.75, [9]), (0.75, [9])]


def test_a_lost_sample_does_not_count_as_wrong_in_validation():
    asks = [
        PromptGroup(uid, uid, "v", 1, TASK, {"data_source": source}, 1, True)
        for uid, source in zip("abcd", "xxyz", strict=True)
    ]
    good, half = reap(rollout(0, 1.0, trace("01"))), reap(rollout(0, 0.5, trace("01")))
    groups = [good, reap(size=1), half, reap(size=1)]
    means = _means(asks, groups)
    assert means[1] == 1.0, "of its own data source"
    assert means[3] == 0.75, "of all: its source has no other"
    rows = [row for each, mean in zip(groups, means, strict=True) for row in fill(each, 0, mean)[0]]
    assert [row.reward for row in rows] == [1.0, 1.0, 0.5, 0.75]


def test_the_row_of_a_forked_rollout_is_the_trace_that_owns_most_tokens():
    rows, left_out = fill(reap(rollout(0, 1.0, trace("00000110"), trace("0111"))), pad_id=0)
    assert [row.sampled_tokens for row in rows if isinstance(row, VerlRow)] == [3]
    assert [row.sampled_tokens for row in left_out] == [2]


def test_prompts_are_padded_on_the_left_and_responses_on_the_right():
    rows, _ = fill(reap(rollout(0, 1.0, trace("00101")), size=2), pad_id=7)
    arrays = padded(rows, prompt_length=3, response_length=4, pad_id=7)
    assert arrays["prompts"].tolist() == [[7, 100, 101], [7, 100, 101]]
    assert arrays["responses"].tolist() == [[102, 103, 104, 7], [7, 7, 7, 7]]
    assert arrays["response_mask"].tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]
    assert arrays["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0, 0]]
    assert arrays["position_ids"][0].tolist() == [0, 0, 1, 2, 3, 4, 4]
    assert arrays["rollout_log_probs"][0].tolist() == pytest.approx([-0.2, 0, -0.4, 0])
    assert arrays["rm_scores"].tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
    assert arrays["input_ids"][0].tolist() == [7, 100, 101, 102, 103, 104, 7]


def test_a_longer_row_widens_the_arrays_and_is_never_cut():
    rows, _ = fill(reap(rollout(0, 1.0, trace("000111"))), pad_id=0)
    arrays = padded(rows, prompt_length=1, response_length=1, pad_id=0)
    assert (arrays["prompts"].shape, arrays["responses"].shape) == ((1, 3), (1, 3))


# --- prompts and settings


def config(**rollyard: object) -> Any:
    rollout = SimpleNamespace(
        n=4,
        temperature=1.0,
        top_p=0.9,
        top_k=-1,
        prompt_length=100,
        response_length=200,
        val_kwargs=SimpleNamespace(n=2, temperature=0, top_p=1.0, top_k=-1),
    )
    return SimpleNamespace(get={"rollyard": rollyard}.get, actor_rollout_ref=SimpleNamespace(rollout=rollout))


def test_a_prompt_is_a_group_of_n_in_the_run_of_its_kind():
    rollout = config().actor_rollout_ref.rollout
    rows = [
        {"uid": "a", "rollyard_task": TASK, "global_steps": 3, "agent_name": "x"},
        {"uid": "b", "rollyard_task": TASK, "global_steps": 3, "__rollout_n__": 1, "__do_sample__": False},
        {"uid": "c", "rollyard_task": TASK, "global_steps": 3, "validate": True},
    ]
    plain, greedy, validation = asks_of_prompts(rows, rollout, Settings(run="r"))
    assert (plain.group, plain.run, plain.size, plain.version, plain.task) == ("r-a", "r", 4, 2, TASK)
    assert plain.fields == {"uid": "a", "rollyard_task": TASK, "global_steps": 3}
    assert (greedy.group, greedy.size, greedy.task["sampling"]["temperature"]) == ("r-b-greedy", 1, 0.0)
    assert (validation.group, validation.run, validation.size, validation.version) == ("r.val-c", "r.val", 2, 3)


def test_rows_with_one_uid_are_one_group_in_any_order():
    class Prompts:
        def __init__(self, **columns: list[Any]) -> None:
            self.non_tensor_batch = {name: np.array(values, dtype=object) for name, values in columns.items()}
            self.meta_info = {"global_steps": 1}

        def __len__(self) -> int:
            return 4

    asks, place = asks_of_repeated(Prompts(uid=[*"abab"], rollyard_task=[TASK] * 4), Settings())
    assert [(ask.uid, ask.size) for ask in asks] == [("a", 2), ("b", 2)]
    assert place == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "row",
    [
        {"rollyard_task": TASK},
        {"extra_info": {"rollyard_task": '{"environment": "shell", "data": {"instruction": "x"}}'}},
        {"raw_prompt": np.array([{"content": "x"}], dtype=object)},
    ],
)
def test_a_row_names_its_task_as_an_object_as_text_or_by_the_settings(row: dict[str, Any]):
    assert task_of(row, Settings(environment="shell", data={"instruction": "raw_prompt.0.content"})) == TASK


@pytest.mark.parametrize(
    ("row", "settings", "says"),
    [
        ({}, Settings(), "rollyard.environment is not set"),
        ({}, Settings(environment="math", data={"answer": "reward_model.ground_truth"}), "has no 'reward_model"),
        ({"rollyard_task": "{"}, Settings(), "is not JSON"),
        ({"rollyard_task": {"data": {}}}, Settings(), "names no environment"),
    ],
)
def test_a_row_without_a_task_is_refused(row: dict[str, Any], settings: Settings, says: str):
    with pytest.raises(ValueError, match=says):
        task_of(row, settings)


def test_verls_sampling_and_lengths_are_defaults_that_settings_override():
    verl = config()
    settings = read_settings(config(defaults={"limits": {"max_turns": 5}, "agent": {"name": "native"}}))
    defaults = defaults_of(verl.actor_rollout_ref.rollout, settings, is_validation=False)
    assert defaults["sampling"] == {"temperature": 1.0, "top_p": 0.9, "top_k": -1, "max_tokens": 200}
    assert defaults["limits"] == {"max_context": 300, "max_turns": 5}
    assert defaults["agent"] == {"name": "native"}
    judged = defaults_of(verl.actor_rollout_ref.rollout, settings, is_validation=True)
    assert judged["sampling"] == {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": 200}


def test_unknown_settings_are_refused():
    assert read_settings(config()) == Settings()
    with pytest.raises(ValueError, match=r"rollyard\.urll is not a setting"):
        read_settings(config(urll="x"))
    with pytest.raises(ValueError, match="spares"):
        read_settings(config(spares="many"))


@pytest.mark.parametrize(
    ("verl", "says"),
    [
        ({"trainer": {"use_v1": True, "v1": {"trainer_mode": "separate_async"}}}, "use sync"),
        ({"trainer": {"use_v1": True, "v1": {"trainer_mode": "colocate_async"}}}, "custom_sampler"),
        ({"reward": {"reward_model": {"enable": True}}}, "rewards come only from Rollyard"),
        ({"distillation": {"enabled": True}}, "teacher"),
    ],
)
def test_unsupported_settings_of_verl_are_refused(verl: dict[str, Any], says: str):
    refuse({"trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}}})
    with pytest.raises(ValueError, match=says):
        refuse(verl)
