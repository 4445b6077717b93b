# pyright: reportMissingImports=false
"""The trainer: the loss is independent of micro-batches, and training can be resumed with the same result."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner import Learner, anchors, has_saved, in_rounds, rate
from log import Log, by_lag
from training import pace

from tests.with_torch.parts import prompt_of, tiny

CAP = 1.5
LOW, HIGH = 0.6, 9.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learner") / "tiny"
    tiny().save_pretrained(folder)
    return folder


def learner(model: Path, micro_tokens: int = 4096, *, bf16: bool = False) -> Learner:
    fields = {"model": str(model), "rank": 4, "device": "cpu", "seed": 1, "bf16": bf16}
    return Learner(Namespace(**fields, cap=CAP, clip=(LOW, HIGH), micro_tokens=micro_tokens))


def rows(salt: int = 0) -> list[dict[str, Any]]:
    """Returns rows of different lengths, with sampled spans in the middle and at the end, and inexact logprobs."""
    batch: list[dict[str, Any]] = []
    random = np.random.default_rng(salt)
    for number, length in enumerate((21, 9, 16, 12, 30)):
        mask = np.zeros(length, dtype=np.uint8)
        mask[4:7] = mask[length - 2 :] = 1
        old = np.where(mask, random.uniform(-14, -5, length), 0.0).astype(np.float32)
        ids = np.array(prompt_of(length, 7 * salt + number))
        batch.append({"ids": ids, "mask": mask, "old": old, "advantage": np.float32((-1) ** number * (1 + number))})
    return batch


def demonstrated(salt: int = 0) -> list[dict[str, Any]]:
    return [{"ids": row["ids"], "mask": row["mask"]} for row in rows(salt)]


def anchored(salt: int = 0) -> list[dict[str, Any]]:
    """Returns rollouts, and demonstrations as if they had just been sampled."""
    nothing = [np.full(len(row["ids"]), np.nan, np.float32) for row in demonstrated(salt + 1)]
    more = [{**row, "old": old, "advantage": 1.0} for row, old in zip(demonstrated(salt + 1), nothing, strict=True)]
    return [*rows(salt), *more]


def expected_norm(model: Path, batch: list[dict[str, Any]]) -> float:
    """Returns the norm of the gradient, computed row by row and token by token."""
    mine = learner(model)
    total: Any = 0.0
    for row in batch:
        ids = torch.tensor(row["ids"])[None]
        logprobs = mine.lora.logits(mine.lora.hidden(ids))[0].log_softmax(-1)
        for at in np.flatnonzero(row["mask"]):
            one = logprobs[at - 1, int(row["ids"][at])]
            old = float(row["old"][at]) if "old" in row else math.nan
            ratio = 1.0 if math.isnan(old) else float((one.detach() - old).exp())
            gain = float(row.get("advantage", 1.0))
            if (ratio > 1 - LOW) if gain < 0 else (ratio < 1 + HIGH):  # else it is clipped
                total = total - min(ratio, CAP) * gain * one
    (total / sum(int(row["mask"].sum()) for row in batch)).backward()
    return float(torch.stack([m.grad.norm() for m in mine.lora.parameters() if m.grad is not None]).norm())


@pytest.mark.parametrize("micro_tokens", [4096, 64, 1])
@pytest.mark.parametrize("make", [rows, demonstrated, anchored])
def test_the_loss_is_a_mean_over_tokens_with_capped_weights(model: Path, make: Any, micro_tokens: int):
    norm, logprobs = learner(model, micro_tokens).learn(make(), 1e-3)
    assert norm == pytest.approx(expected_norm(model, make()), rel=1e-4)
    whole = learner(model).learn(make(), 1e-3)[1]
    assert [len(one) for one in logprobs] == [5] * len(make())
    torch.testing.assert_close(logprobs, whole, atol=1e-4, rtol=1e-4)


def test_the_weights_of_only_some_tokens_are_capped(model: Path):
    """Ensures that the test above covers both cases."""
    batch = rows()
    new = torch.cat(learner(model).learn(batch, 0.0)[1]).numpy()
    ratios = np.exp(new - np.concatenate([row["old"][row["mask"] == 1] for row in batch]))
    gains = np.repeat([row["advantage"] for row in batch], 5)
    assert (ratios > CAP).any() and (ratios < CAP).any()
    for is_far in (ratios[gains > 0] > 1 + HIGH, ratios[gains < 0] < 1 - LOW):
        assert is_far.any() and not is_far.all()


def test_rewarded_tokens_become_more_likely_and_others_less(model: Path):
    mine, batch = learner(model), rows()
    for row, now in zip(batch, mine.learn(batch, 0.0)[1], strict=True):
        row["old"][row["mask"] == 1] = now.numpy()
    logprobs = [mine.learn(batch, 1e-3)[1] for _ in range(20)]
    for row, old, new in zip(batch, logprobs[0], logprobs[-1], strict=True):
        assert np.sign(float((new - old).sum())) == np.sign(row["advantage"])


def test_bfloat16_is_not_used_where_the_device_only_emulates_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("learner.can_bf16", lambda device: False)
    exact, emulated = (learner(model, bf16=bf16).learn(demonstrated(), 1e-3)[0] for bf16 in (False, True))
    assert emulated == exact
    assert "using float32, which is faster here" in capsys.readouterr().out


def test_training_resumed_from_a_checkpoint_equals_uninterrupted_training(model: Path, tmp_path: Path):
    whole = learner(model)
    norms = [whole.learn(rows(salt), 1e-2)[0] for salt in range(4)]
    first = learner(model)
    assert [first.learn(rows(salt), 1e-2)[0] for salt in range(2)] == norms[:2]
    first.save(tmp_path / "rl", {"step": 2})
    second = learner(model)
    state = second.load(tmp_path / "rl")
    assert (state["step"], second.busy_s) == (2, first.busy_s)
    assert [second.learn(rows(salt), 1e-2)[0] for salt in range(2, 4)] == norms[2:]
    for mine, its in zip(whole.lora.parameters(), second.lora.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_a_checkpoint_replaces_the_previous_one_completely(model: Path, tmp_path: Path):
    mine = learner(model)
    for name in ("rl.new", "rl.old"):  # left by a process that was killed while saving
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("")
    for step in (1, 2):
        mine.learn(rows(), 1e-2)
        mine.save(tmp_path / "rl", {"step": step})
    assert [folder.name for folder in tmp_path.iterdir()] == ["rl"]
    files = {"adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "state.json"}
    assert {file.name for file in (tmp_path / "rl").iterdir()} == files
    assert json.loads((tmp_path / "rl" / "state.json").read_text())["step"] == 2


def test_a_checkpoint_is_restored_if_its_replacement_was_interrupted(model: Path, tmp_path: Path):
    folder = tmp_path / "rl"
    assert not has_saved(folder)
    mine = learner(model)
    mine.save(folder, {"step": 1})
    folder.rename(tmp_path / "rl.old")  # simulates a kill at this point
    (tmp_path / "rl.new").mkdir()
    assert has_saved(folder) and mine.load(folder)["step"] == 1
    assert not (tmp_path / "rl.old").exists()


# --- log.py


def test_rewind_removes_log_entries_after_the_checkpoint(tmp_path: Path):
    log = Log(tmp_path)
    log.write("warm", 1, loss=2.0)
    log.write("test", 0, what="warm", result={"a": 1})
    for step in (1, 2, 3):
        log.write("rl", step, reward_before=0.5)
    log.rewind("rl", 2)
    log.write("rl", 3, reward_before=0.75)
    assert [(line["phase"], line["step"]) for line in Log(tmp_path).lines()] == [
        ("warm", 1),
        ("test", 0),
        ("rl", 1),
        ("rl", 2),
        ("rl", 3),
    ]
    assert Log(tmp_path).lines()[-1]["reward_before"] == 0.75
    assert log.has_tested("warm") and not log.has_tested("rl")


def test_an_incomplete_line_of_a_killed_process_is_ignored(tmp_path: Path):
    Log(tmp_path).write("warm", 1, loss=2.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "warm", "st')
    Log(tmp_path).write("warm", 2, loss=1.0)
    assert [line["step"] for line in Log(tmp_path).lines()] == [1, 2]


def test_the_gap_to_the_engine_is_reported_by_lag():
    row: dict[str, Any] = {
        "mask": np.array([0, 0, 1, 1, 1]),
        "old": np.array([0, 0, -1.0, -2.0, -3.0], dtype=np.float32),
        "versions": np.array([-1, -1, 4, 4, 5]),
    }
    gaps = by_lag([row], [torch.tensor([-1.5, -2.25, -3.0])], version=5)
    assert {lag: (one["tokens"], one["mean"], one["max"]) for lag, one in gaps.items()} == {
        "0": (1, 0.0, 0.0),
        "1": (2, 0.375, 0.5),
    }


def test_each_round_uses_every_row_once_in_another_order():
    parts = in_rounds(range(10), "7/3", rounds=3, minibatches=4)
    assert [len(part) for part in parts] == [3, 3, 3, 1] * 3
    rounds = [[row for part in parts[start : start + 4] for row in part] for start in (0, 4, 8)]
    assert all(sorted(one) == list(range(10)) for one in rounds)
    assert len({tuple(one) for one in rounds}) == 3
    assert in_rounds(range(10), "7/3", 3, 4) == parts, "the same after a restart"


def test_the_requested_number_of_demonstrations_is_chosen_deterministically():
    known = demonstrated() + demonstrated(1)
    first, again, other = (anchors(known, seed, 4) for seed in ("3/7/0", "3/7/0", "3/7/1"))
    assert len(first) == 4 and all(row["advantage"] == 1.0 and np.isnan(row["old"]).all() for row in first)
    ids = [[row["ids"].tolist() for row in some] for some in (first, again, other)]
    assert ids[0] == ids[1] != ids[2]
    assert len(anchors(known, "3/7/0", 400)) == 10, "each row at most once"
    assert anchors([], "3/7/0", 4) == anchors(known, "3/7/0", 0) == []


def test_the_rate_rises_to_its_maximum_and_falls_until_the_last_step():
    rates = [rate(1e-3, step, 4, 14, 0.1) for step in (1, 2, 4, 9, 14)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 1e-3, 5.5e-4, 1e-4])
    assert [rate(1e-3, step, 4, 14, 1.0) for step in (4, 9, 14)] == [1e-3] * 3
    assert rate(1e-3, 3, 5, 3, 0.1) == pytest.approx(6e-4), "there may be no time to fall"


def test_a_draw_without_staleness_is_strict():
    assert pace(1, oversample=False) == {"max_staleness": 1}, "everything else is the default, as in earlier runs"
    assert pace(0, oversample=False) == {"max_staleness": 0, "on_stale": "wait"}
    assert pace(0, oversample=True) == {"max_staleness": 0, "on_stale": "drop", "surplus": "cancel"}
