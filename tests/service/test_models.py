"""Request bodies: what is accepted, and the messages of refusals."""

from typing import Any

import pytest

from rollyard.core import Limits, Sampling, Task
from rollyard.core.failure import InvalidRequest, MalformedId
from rollyard.service.schemas.body import check_body
from rollyard.service.schemas.engine import EngineBody, engine_id
from rollyard.service.schemas.requests import RolloutBody, RunBody, SubmitBody
from rollyard.service.schemas.task import merge, to_task


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_a_minimal_task_gets_the_defaults_of_core() -> None:
    assert to_task({"environment": "shell"}, {}) == Task("shell")


def test_integers_of_any_size_are_preserved() -> None:
    assert to_task({"environment": "e", "data": {"n": 2**70}}, {}).data["n"] == 2**70


def test_a_task_is_merged_over_defaults_key_by_key() -> None:
    defaults = {"environment": "shell", "limits": {"run_s": 5, "max_turns": 3}, "data": {"setup": ["a"], "x": {"y": 1}}}
    task = to_task({"limits": {"max_turns": 9}, "data": {"setup": ["b"], "x": {"z": 2}}}, defaults)
    assert task.environment == "shell"
    assert task.limits == Limits(run_s=5, max_turns=9)
    assert task.data == {"setup": ["b"], "x": {"y": 1, "z": 2}}


def test_merging_changes_neither_side() -> None:
    under, over = {"a": {"b": 1}}, {"a": {"c": 2}}
    assert merge(under, over) == {"a": {"b": 1, "c": 2}}
    assert (under, over) == ({"a": {"b": 1}}, {"a": {"c": 2}})


@pytest.mark.parametrize(
    ("task", "path", "problem"),
    [
        ({}, "environment", "required"),
        ({"environment": "e", "limit": {}}, "limit", "unknown field"),
        ({"environment": "e", "limits": {"run": 3}}, "limits.run", "unknown field"),
        ({"environment": "e", "limits": {"run_s": 0}}, "limits.run_s", "greater than 0"),
        ({"environment": "e", "limits": {"run_s": float("inf")}}, "limits.run_s", "finite"),
        ({"environment": "e", "limits": {"run_s": "5"}}, "limits.run_s", "number"),
        ({"environment": "e", "limits": {"max_turns": True}}, "limits.max_turns", "integer"),
        ({"environment": "e", "limits": {"max_turns": 1.5}}, "limits.max_turns", "integer"),
        ({"environment": "e", "sampling": {"temperature": -1}}, "sampling.temperature", "greater"),
        ({"environment": "e", "sampling": {"top_p": 0}}, "sampling.top_p", "greater than 0"),
        ({"environment": "e", "sandbox": {"memory_bytes": -1}}, "sandbox.memory_bytes", "greater"),
        ({"environment": "e", "agent": "native"}, "agent", "object|dictionary|instance"),
        ({"environment": "e", "data": nested(300)}, "data", "nested too deeply"),
    ],
)
def test_an_invalid_field_is_reported_with_its_path(task: dict[str, Any], path: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        to_task(task, {}, ("rollouts", 3, "task"))
    fields: Any = caught.value.data["fields"]
    assert fields[0]["path"].startswith(f"rollouts[3].task.{path}")
    assert caught.value.detail.startswith(fields[0]["path"])


def test_only_the_first_of_many_errors_are_reported() -> None:
    with pytest.raises(InvalidRequest, match=r"and 49 more") as caught:
        check_body({"rollouts": [{"task": {}, **{f"x{number}": 1 for number in range(50)}}]}, SubmitBody)
    assert len(caught.value.data["fields"]) == 20  # type: ignore[arg-type]


def test_a_submit_has_at_least_one_rollout() -> None:
    with pytest.raises(InvalidRequest, match="rollouts: "):
        check_body({"rollouts": []}, SubmitBody)


def test_the_identity_of_a_body_is_the_fields_that_were_sent() -> None:
    plain = check_body({"id": "a", "task": {"environment": "e"}}, RolloutBody)
    other = check_body({"id": "b", "task": {"environment": "e"}}, RolloutBody)
    explicit = check_body({"id": "a", "task": {"environment": "e"}, "priority": 1}, RolloutBody)
    assert plain.identity() == other.identity() == {"task": {"environment": "e"}}
    assert explicit.identity() != plain.identity()


def test_a_runs_defaults_are_checked_as_a_partial_task() -> None:
    run = check_body({"defaults": {"limits": {"run_s": 3}}, "mode": "eval"}, RunBody).to_run("me", 1.0)
    assert (run.mode, run.owner, run.created_at) == ("eval", "me", 1.0)
    with pytest.raises(InvalidRequest, match=r"^defaults.limits.run: unknown field"):
        check_body({"defaults": {"limits": {"run": 3}}}, RunBody).to_run("me", 1.0)


def test_malformed_ids_have_their_own_code() -> None:
    for bad in ("", "-a", "a/b", "a" * 129, "ü"):
        with pytest.raises(MalformedId):
            check_body({"id": bad}, RunBody).to_run("", 0.0)
        with pytest.raises(MalformedId):
            check_body({"id": bad, "url": "http://e"}, EngineBody).to_spec()


def test_an_engine_without_an_id_gets_one_from_its_address() -> None:
    assert engine_id("http://gpu1:8000") == "gpu1:8000"
    assert engine_id("https://user:pass@gpu1:8000/base/") == "gpu1:8000-base"
    assert check_body({"url": "http://[::1]:80/"}, EngineBody).to_spec().id == "1-:80"


def test_the_defaults_of_bodies_are_those_of_core() -> None:
    task = to_task({"environment": "e", "sampling": {}, "limits": {}, "sandbox": {}, "agent": {}}, {})
    assert (task.sampling, task.limits) == (Sampling(), Limits())
