"""TRL's samples and rows, from constructed groups. A namespace replaces TRL's `RolloutSample`."""

from types import SimpleNamespace

import numpy as np
import pytest

from rollyard.client import Group, GroupRollout, Record, Trace
from rollyard.core import Sampling
from rollyard.trainers import _trl_samples
from rollyard.trainers._trl_func import rollyard_reward
from rollyard.trainers._trl_samples import RolloutsMissing, SampleBuilder, row_of


@pytest.fixture(autouse=True)
def without_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trl_samples, "sample_type", lambda: SimpleNamespace)


def trace(mask: str, version: int = 3, **fields: object) -> Trace:
    """`mask` has one character per token: 0, 1, or a digit from 2 on, which is sampled by that version."""
    sampled = np.array([char != "0" for char in mask])
    versions = np.where(sampled, [max(int(char), version) if char == "1" else int(char) for char in mask], -1)
    known: dict[str, object] = {
        "token_ids": np.arange(100, 100 + len(mask), dtype=np.int32),
        "mask": sampled.astype(np.uint8),
        "logprobs": np.where(sampled, -0.5, 0.0).astype(np.float32),
        "versions": versions.astype(np.int32),
        "trainable": True,
        **fields,
    }
    return Trace(**known)  # type: ignore[arg-type]


def rollout(index: int, reward: float | None, *traces: Trace, trainable: bool = True, **fields: object) -> GroupRollout:
    id = f"g-{index}"
    record = Record(id=id, reward=reward, trainable=trainable, **fields)  # type: ignore[arg-type]
    return GroupRollout(id, index, reward, trainable, record, traces)


def group(*rollouts: GroupRollout) -> Group:
    return Group("g", stats={"spread": 0.5}, rollouts=rollouts)


def test_a_sample_has_the_mask_logprobs_and_oldest_version_of_its_trace():
    one = trace("000115500071", version=9)
    samples = SampleBuilder("grpo", 1.0, first=2).samples(group(rollout(0, 1.0, one), rollout(1, 0.0, trace("011"))), 7)
    first = samples[0]
    assert first.input_ids.tolist() == one.token_ids.tolist()
    assert first.completion_mask.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1]
    assert first.old_log_probs.tolist() == pytest.approx([0, 0, 0, -0.5, -0.5, -0.5, -0.5, 0, 0, 0, -0.5, -0.5])
    assert (first.input_ids.dtype, first.completion_mask.dtype) == (np.int64, np.int64)
    assert (first.model_version, first.group_id) == (5 - 2, 7)
    assert (first.advantage, samples[1].advantage) == pytest.approx((1.0, -1.0), abs=1e-4)


def test_an_untrainable_rollout_is_in_neither_loss_nor_baseline():
    members = rollout(0, 1.0, trace("01")), rollout(1, 0.0, trace("01")), rollout(2, 0.0, trace("01"), trainable=False)
    samples = SampleBuilder("grpo", 1.0, 0).samples(group(*members), 0)
    assert [sample.advantage for sample in samples] == pytest.approx([1.0, -1.0], abs=1e-4)


def test_every_trace_of_a_forked_rollout_is_a_sample_unless_it_owns_no_token():
    forked = rollout(0, 1.0, trace("0110"), trace("0000"), trace("00011"), trace("01", logprobs=None))
    samples = SampleBuilder("grpo", 1.0, 0).samples(group(forked, rollout(1, 0.0, trace("01"))), 0)
    assert [len(sample.input_ids) for sample in samples] == [4, 5, 2]
    assert samples[0].advantage == samples[1].advantage


def test_metrics_have_the_reward_its_components_and_the_groups_spread():
    scored = rollout(0, 1.0, trace("01"), score={"components": {"tests": 0.25}}, summary={"turns": 4})
    samples = SampleBuilder("grpo", 1.0, 0).samples(group(scored, rollout(1, 0.0, trace("01"))), 0)
    assert samples[0].metrics == {"reward": 1.0, "reward_std": 0.5, "rewards/tests": 0.25, "rollyard/turns": 4.0}
    assert samples[1].metrics == {"reward": 0.0, "reward_std": 0.5}


def test_a_tokenizer_gives_the_logs_their_text():
    class Reader:
        def decode(self, token_ids: list[int], /) -> str:
            return " ".join(map(str, token_ids))

    (sample,) = SampleBuilder("none", 1.0, 0, Reader()).samples(group(rollout(0, 1.0, trace("0010"))), 0)
    assert sample.prompt == [{"role": "user", "content": "100 101"}]
    assert sample.completion == [{"role": "assistant", "content": "102 103"}]


def test_a_trace_sampled_at_another_temperature_is_refused():
    hot = trace("01", sampling=Sampling(temperature=0.7))
    with pytest.raises(ValueError, match=r"at temperature 0\.7, but the trainer computes its logprobs at 1"):
        SampleBuilder("none", 1.0, 0).samples(group(rollout(0, 1.0, hot)), 0)


def test_a_trainable_rollout_without_its_traces_is_an_error():
    with pytest.raises(ValueError, match="is trainable, but has no traces"):
        SampleBuilder("none", 1.0, 0).samples(group(rollout(0, 1.0)), 0)


def test_the_completion_of_a_row_starts_with_the_first_sampled_token():
    row = row_of(rollout(0, 0.5, trace("000110011")))
    assert row.prompt_ids == [100, 101, 102]
    assert row.completion_ids == [103, 104, 105, 106, 107, 108]
    assert row.env_mask == [1, 1, 0, 0, 1, 1]
    assert row.logprobs == pytest.approx([-0.5, -0.5, 0.0, 0.0, -0.5, -0.5])
    assert row.reward == 0.5


@pytest.mark.parametrize("reward", [None, 1.0])
def test_the_row_of_an_untrainable_rollout_is_masked_and_has_no_reward(reward: float | None):
    row = row_of(rollout(0, reward, trace("0011", logprobs=None), trainable=False))
    assert (row.completion_ids, row.env_mask, row.logprobs) == ([102, 103], [0, 0], [0.0, 0.0])
    assert row.reward is None


def test_a_rollout_without_tokens_or_with_a_fork_is_an_error():
    with pytest.raises(RolloutsMissing, match=r"g-0 has no tokens at all \(task_broken\)"):
        row_of(rollout(0, None, trainable=False, failure={"code": "task_broken"}))
    with pytest.raises(ValueError, match="forked into 2 sequences"):
        row_of(rollout(0, 1.0, trace("01"), trace("001")))


def test_the_reward_function_returns_the_environments_rewards():
    assert rollyard_reward(["a", "b"], [1.0, None], prompts=["p", "p"]) == [1.0, None]
    with pytest.raises(ValueError, match="2 completions and 1 rewards"):
        rollyard_reward(["a", "b"], [1.0])
