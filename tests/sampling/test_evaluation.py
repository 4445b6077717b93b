"""Which samples count, which are missing, and the figures computed from them."""

from math import comb
from typing import Any

import pytest

from rollyard.sampling import estimates, evaluation
from rollyard.sampling.estimates import pass_curve
from rollyard.sampling.evaluation import Rules, Sample, TaskSamples, label_of, placed
from rollyard.sampling.membership import MemberFate


def scored(index: int, reward: float, version: int = 0) -> Sample:
    return Sample(index, f"r-{index}", reward, "completed", oldest_version=version, newest_version=version, turns=2)


def lost(index: int, code: str = "engine_unavailable") -> Sample:
    return Sample(index, f"r-{index}", code=code, fate=MemberFate.LOST)


def rewards(task: TaskSamples) -> list[float | None]:
    return [sample.reward for sample in task.samples]


def test_a_spare_takes_the_place_of_a_lost_sample():
    places = placed([scored(3, 0.5), scored(0, 1.0), lost(1), scored(2, 0.0)], 3, 0)
    assert [sample.index for sample in places.samples] == [0, 2, 3]
    assert rewards(places) == [1.0, 0.0, 0.5]


def test_a_lost_sample_without_a_spare_is_missing_once():
    task = placed([scored(0, 1.0), lost(1, "stalled"), lost(2), lost(3)], 3, 0)
    assert task.size == 3 and task.rewards == (1.0,)
    assert task.missing == {"engine_unavailable": 2}


def test_a_spare_that_was_not_needed_does_not_count():
    assert rewards(placed([scored(index, 1.0) for index in range(4)], 3, 0)) == [1.0] * 3


def test_all_samples_of_an_impossible_task_are_missing_even_scored_ones():
    hopeless = Sample(1, "r-1", code="setup_failed", fate=MemberFate.HOPELESS)
    cancelled = Sample(2, "r-2", code="cancelled", fate=MemberFate.CANCELLED)
    task = placed([scored(0, 1.0), hopeless, cancelled], 4, 0)
    assert task.rewards == () and task.missing == {"setup_failed": 4}


def test_a_sample_of_other_weights_is_missing():
    """Whether they sampled all of its tokens, or only the last."""
    mixed = Sample(2, "r-2", 1.0, oldest_version=3, newest_version=4)
    silent = Sample(3, "r-3", 0.0)  # nothing was sampled: no version
    task = placed([scored(0, 1.0, 3), scored(1, 1.0, 4), mixed, silent], 4, 3)
    assert task.rewards == (1.0, 0.0) and task.missing == {"version_changed": 2}


def test_samples_that_have_not_started_are_missing():
    assert placed([], 2, 0).missing == {"not_begun": 2}
    assert placed([scored(0, 1.0)], 2, 0, "version_changed").missing == {"version_changed": 1}


def test_samples_that_have_not_started_are_counted_without_being_made():
    """An evaluation of 2,000,000 tasks with 4096 samples each, which failed before anything ran: its samples would not
    fit into memory, and the numbers of its tasks for each k would take minutes."""
    never = placed([], 4096, 0, environment="math")
    assert never.samples == ()
    result = evaluated([never] * 200_000, Rules(4096, 4096))
    assert result["missing"] == {"not_begun": 200_000 * 4096} and result["missing_share"] == 1
    assert (result["all"]["tasks"], result["all"]["samples"]) == (200_000, 0)
    assert result["all"]["missing"] == 200_000 * 4096 and result["all"]["pass_at"]["4096"] is None


def tasks_of(*skills: int, n: int = 4, environment: str = "math", label: str = "") -> list[TaskSamples]:
    return [
        TaskSamples(environment, tuple(scored(index, float(index < skill)) for index in range(n)), label)
        for skill in skills
    ]


def evaluated(tasks: list[TaskSamples], rules: Rules, **options: bool) -> dict[str, Any]:
    return evaluation.evaluated(tasks, rules, **options)


def by_hand(n: int, skills: tuple[int, ...], k: int) -> float:
    return sum(1 - comb(n - c, k) / comb(n, k) for c in skills) / len(skills)


def test_pass_at_k_is_computed_for_each_part_and_overall():
    tasks = [*tasks_of(2, 4, 0, label="a"), *tasks_of(1, environment="code", label="b")]
    result = evaluated(tasks, Rules(4, 4), has_labels=True)
    pass_at = {name: part["pass_at"] for name, part in result["environments"].items()}
    assert pass_at["math"]["3"]["mean"] == pytest.approx(by_hand(4, (2, 4, 0), 3), abs=1e-12)
    assert pass_at["code"]["1"]["mean"] == 0.25
    assert result["all"]["pass_at"]["2"]["mean"] == pytest.approx(by_hand(4, (2, 4, 0, 1), 2))
    assert result["by"]["a"] == result["environments"]["math"]
    assert (result["missing"], result["missing_share"]) == ({}, 0.0)


def test_missing_samples_are_in_no_figure():
    short = placed([scored(0, 1.0), lost(1), lost(2)], 2, 0, environment="math")
    forgotten = placed([], 2, 0, "forgotten", environment="math")
    result = evaluated([*tasks_of(1, n=2), short, forgotten], Rules(2, 2))
    part = result["all"]
    assert result["missing"] == {"forgotten": 2, "engine_unavailable": 1} and result["missing_share"] == 0.5
    assert (part["tasks"], part["samples"], part["missing"], part["turns"]) == (3, 3, 3, 2.0)
    one, two = part["pass_at"]["1"], part["pass_at"]["2"]
    assert (one["mean"], one["tasks"], one["missing"]) == (0.75, 2, 1)
    assert (two["mean"], two["tasks"], two["missing"]) == (1.0, 1, 2)
    nothing = evaluated([forgotten], Rules(2, 2))["all"]
    assert nothing["reward"] is None and nothing["pass_at"] == {"1": None, "2": None}


def test_the_same_samples_give_the_same_numbers_in_any_order():
    tasks = tasks_of(*(number % 5 for number in range(40)))
    rules = Rules(4, 4, seed=7)
    assert evaluated(tasks, rules) == evaluated(tasks[::-1], rules)
    assert evaluated(tasks, rules)["all"] != evaluated(tasks, Rules(4, 4, seed=8))["all"]


def test_all_k_share_one_bootstrap(monkeypatch: pytest.MonkeyPatch):
    """A separate one for each of 64 k took a minute for 5,000 tasks."""
    calls: list[int] = []
    once = estimates._bootstrap

    def counted(values: Any, level: float, seed: int) -> tuple[Any, Any]:
        calls.append(values.shape[1])
        return once(values, level, seed)

    monkeypatch.setattr(estimates, "_bootstrap", counted)
    part = evaluated(tasks_of(*(number % 65 for number in range(500)), n=64), Rules(64, 64))["all"]
    assert sorted(calls) == [1, 64]  # the rewards, and every pass@k
    curve = pass_curve([(64, number % 65) for number in range(500)], [1, 8, 64])
    for k, estimate in curve.items():
        assert estimate is not None and estimate.interval is not None
        reported = part["pass_at"][str(k)]
        assert (reported["low"], reported["high"]) == pytest.approx(estimate.interval)


def test_a_label_is_a_value_of_the_tasks_data():
    assert [label_of({"family": "gcd", "n": 3}, key) for key in ("family", "n", "none")] == ["gcd", "3", ""]
