"""Instances in the format of ProRL Agent's handlers, converted to tasks: rows as in the public datasets."""

import json
from typing import Any

import pytest

from rollyard.core import Task
from rollyard.core.failure import TaskInvalid, UnknownEnvironment
from rollyard.envs.registry import Environments
from rollyard.service.prorl.handlers import Choices, task_body
from rollyard.service.prorl.sampling import task_fields_of
from rollyard.service.schemas.task import merge, to_task

ENVIRONMENTS = Environments()

PATCH = "diff --git a/pkg/a.py b/pkg/a.py\n--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -1 +1 @@\n-a\n+b\n"
TESTS = PATCH.replace("pkg/a.py", "tests/test_a.py")

SWE_GYM: dict[str, Any] = {
    "instance_id": "getmoto__moto-5752",
    "repo": "getmoto/moto",
    "version": "4.0",
    "base_commit": "b2300f1eae1323e3e8bc45f97e530ce129dff12e",
    "problem_statement": "describe_parameters depends on filter order",
    "hints_text": "",
    "created_at": "2022-12-10",
    "patch": PATCH,
    "test_patch": TESTS,
    "FAIL_TO_PASS": ["tests/test_a.py::test_it"],
    "PASS_TO_PASS": ["tests/test_a.py::test_other"],
    "data_kind": "swebench",
    "data_source": "swebench",
    "trajectory_id": 5,
    # columns of the other datasets in the same table
    "docker_image": None,
    "expected_output_json": None,
    "parsed_commit_content": None,
}

R2E: dict[str, Any] = {
    "instance_id": "namanjain12_orange3_final_2d9617bd0cb1f0ba61771258410ab8fae8e7e24d",
    "repo": "namanjain12/orange3_final",
    "repo_name": "orange3",
    "version": "2d9617bd0cb1f0ba61771258410ab8fae8e7e24d",
    "docker_image": "namanjain12/orange3_final:2d9617bd0cb1f0ba61771258410ab8fae8e7e24d",
    "commit_hash": "2d9617bd0cb1f0ba61771258410ab8fae8e7e24d",
    "base_commit": "2d9617bd0cb1f0ba61771258410ab8fae8e7e24d",
    "old_commit": "aaaa",
    "parsed_commit_content": "{}",
    "execution_result_content": "{}",
    "modified_files": ["Orange/a.py"],
    "problem_statement": "[ISSUE]\nIt breaks.\n[/ISSUE]",
    "expected_output_json": json.dumps({"TestIt.test_a": "PASSED"}),
    "prompt": "…",
    "data_kind": "r2egym",
    "data_source": "swebench",
    "trajectory_id": 0,
    "FAIL_TO_PASS": None,
    "PASS_TO_PASS": None,
}

BOXED = " Let's think step by step and output the final answer within \\boxed{}."
CODE = "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."


def prompt(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def task_of(instance: dict[str, Any], choices: Choices | None = None, **params: Any) -> Task:
    body = task_body(instance, ENVIRONMENTS, choices or Choices())
    task = to_task(merge(body, task_fields_of(params)), {}, ("instance",))
    ENVIRONMENTS.get(task.environment).check(task)
    return task


def test_a_row_of_swe_gym():
    task = task_of(SWE_GYM)
    assert (task.environment, task.data["instance_id"]) == ("swe", "getmoto__moto-5752")
    assert task.sandbox.image == "docker://xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752:latest"
    assert not {"trajectory_id", "data_source", "data_kind"} & set(task.data)
    assert not task.agent.options  # the environment's own tools


def test_a_row_of_swe_bench_with_the_operators_images():
    row = {**SWE_GYM, "instance_id": "django__django-1", "repo": "django/django", "version": "4.0"}
    row |= {"environment_setup_commit": "abc", "FAIL_TO_PASS": '["test_a (tests.A)"]', "PASS_TO_PASS": "[]"}
    del row["data_source"]  # the default is swebench
    assert task_of(row).sandbox.image == "docker://swebench/sweb.eval.x86_64.django_1776_django-1:latest"
    assert task_of(row, Choices(images="/sifs")).sandbox.image == "/sifs/django__django-1.sif"


def test_a_row_of_r2e_gym_with_the_columns_of_others():
    task = task_of(R2E)
    assert task.environment == "swe"
    assert task.sandbox.image == f"docker://{R2E['docker_image']}"
    assert task.data["repo_name"] == "orange3"


@pytest.mark.parametrize("is_text", [False, True])
def test_a_row_of_deepscaler(is_text: bool):
    instance: dict[str, Any] = {
        "data_source": "deepscaler",
        "prompt": prompt("What is $6 \\times 7$?" + BOXED),
        "ability": "math",
        "reward_model": {"ground_truth": "42", "style": "rule"},
        "extra_info": {"split": "train", "index": 3, "name": "aime"},
        "trajectory_id": 1,
    }
    if is_text:
        instance |= {name: json.dumps(instance[name]) for name in ("prompt", "reward_model")}
    task = task_of(instance)
    assert (task.environment, dict(task.data)) == ("math", {"question": "What is $6 \\times 7$?", "answer": "42"})
    assert task.agent.options["tools"] == ["ipython", "finish"]
    assert task_of(instance, is_reasoning_task=True).agent.options["tools"] == []


@pytest.mark.parametrize(
    "source", ["deepcoder", "deepcoder_primeintellect", "codecontests", "apps", "codeforces", "taco"]
)
def test_a_row_of_eurus_by_each_of_its_names(source: str):
    truth = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
    instance = {
        "data_source": source,
        "prompt": prompt("Add two numbers." + CODE),
        "reward_model": {"ground_truth": json.dumps(truth), "style": "rule"},
        "trajectory_id": 0,
    }
    task = task_of(instance)
    assert (task.environment, task.data["question"]) == ("code", "Add two numbers.")
    assert task.data["tests"] == [{"input": "1 2\n", "output": "3\n"}, {"input": "3 4\n", "output": "7\n"}]
    assert task.agent.options["tools"] == ["shell", "editor", "ipython", "finish"]


def test_functions_and_lists_of_tests():
    called = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}
    task = task_of({"data_source": "taco", "prompt": prompt("Add."), "reward_model": {"ground_truth": called}})
    assert (task.data["entry_point"], task.data["tests"]) == ("add", [{"input": [1, 2], "outputs": [3]}])
    listed: list[dict[str, Any]] = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    listed[0]["metadata"] = {"func_name": "add"}
    task = task_of({"data_source": "deepcoder", "prompt": prompt("Add."), "reward_model": {"ground_truth": listed}})
    assert (task.data["entry_point"], task.data["tests"]) == ("add", [{"input": [1, 2], "output": 3}])
    plain = json.dumps([{"input": "1 2", "output": "3", "type": "stdin_stdout"}])
    task = task_of({"data_source": "codeforces", "prompt": "Add.", "reward_model": {"ground_truth": plain}})
    assert task.data["tests"] == [{"input": "1 2", "output": "3"}]
    raw = {"data_source": "apps", "question": "Add.", "input_output": {"inputs": ["1"], "outputs": ["1"]}}
    assert task_of(raw).data["question"] == "Add."


def test_questions_of_science():
    free = {"data_source": "stem", "prompt": prompt("How fast?"), "reward_model": {"ground_truth": "9.81"}}
    task = task_of({**free, "trajectory_id": 0})
    assert (task.environment, task.data["question"], task.data["answer"]) == ("stem", "How fast?", "9.81")
    assert dict(task.agent.options) == {"tools": ["ipython", "finish"]}
    chosen = {"data_source": "stem", "question": "Which gas?", "options": ["oxygen", "argon"], "answer": "B"}
    assert task_of(chosen).data["choices"] == ["oxygen", "argon"]
    searching = task_of(chosen, Choices(mcp_servers=("search", "other")))
    assert searching.agent.options["mcp"] == {"search": {"server": "search"}}


def test_any_environment_by_its_own_name():
    task = task_of({"data_source": "math", "question": "1 + 1?", "answer": "2", "instance_id": "x"})
    assert (task.environment, task.data["answer"]) == ("math", "2")
    shell = task_of({"data_source": "shell", "instruction": "do it", "checks": ["true"], "trajectory_id": 2})
    assert dict(shell.data) == {"instruction": "do it", "checks": ["true"]}


@pytest.mark.parametrize(
    ("instance", "error", "message"),
    [
        ({"data_source": "osworld"}, UnknownEnvironment, "osworld"),
        ({}, TaskInvalid, "swe"),
        ({"data_source": "deepscaler", "prompt": prompt("1 + 1?")}, TaskInvalid, "answer"),
        ({"data_source": "deepcoder", "prompt": prompt("Add."), "reward_model": {}}, TaskInvalid, "ground_truth"),
        ({"data_source": "taco", "prompt": [], "reward_model": {"ground_truth": "[]"}}, TaskInvalid, "user message"),
    ],
)
def test_an_invalid_instance_is_refused_with_the_reason(instance: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        task_of(instance)


def test_sampling_and_limits_are_those_requested():
    params = {
        "model": "hosted_vllm/Qwen/Qwen3-8B",
        "api_key": "dummy_key",
        "native_tool_calling": True,
        "token_level_generation": True,
        "custom_tokenizer": "Qwen/Qwen3-8B",
        "ensure_thinking_end_properly": False,
        "temperature": 0.6,
        "top_p": 1,
        "top_k": 0,
        "max_output_tokens": 4096,
        "max_model_len": 32768.0,
        "max_iterations": 35,
        "repetition_penalty": 1.05,
        "seed": None,
    }
    task = task_of({"data_source": "shell", "instruction": "do it", "checks": ["true"]}, **params)
    sampling, limits = task.sampling, task.limits
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.6, 1.0, -1, 4096)
    assert dict(sampling.extra) == {"repetition_penalty": 1.05}
    assert (limits.max_turns, limits.max_context) == (35, 32768)
