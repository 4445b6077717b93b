"""The documentation is correct: its pages match the code, its link targets exist. `tests/docs` runs its examples."""

import ast
import json
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollyard.core import Task
from rollyard.envs import EnvContext, Environment, Environments
from rollyard.service.settings import Settings

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_example_of_an_environment_has_twenty_lines():
    code, *_ = blocks(ROOT / "docs" / "how-to" / "write-an-environment.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 22


def test_the_example_methods_are_methods_of_an_environment():
    names: dict[str, Any] = {}
    for code in blocks(ROOT / "docs" / "how-to" / "write-an-environment.md", "python"):
        if "class Of" in code:
            exec(compile(code, "write-an-environment.md", "exec"), names)

    class Base(Environment):  # a key covers the source of the class, which one made by exec does not have
        async def prepare(self, context: EnvContext) -> None: ...

    assert [field.name for field in names["OfLines"].data_fields] == ["lines", "name"]
    methods = {"layer_key": names["OfRepository"].layer_key, "plan": names["OfWholeSystem"].plan}
    example = type("Example", (Base,), methods)()
    task = Task("example", {"repository": "r", "commit": "c", "instruction": "x"})
    assert (
        example.layer_key(task) == example.layer_key(replace(task, data={**task.data, "instruction": "y"})) is not None
    )
    assert example.layer_key(task) != example.layer_key(replace(task, data={**task.data, "commit": "d"}))
    planned = example.plan(task)
    assert (planned.eval_mode, planned.eval_binds[0].inside, planned.eval_binds[0].is_read_only) == (
        "same",
        "/tests",
        True,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_and_json_examples_are_valid(page: Path):
    for code in blocks(page, "python"):
        compile(textwrap.dedent(code), str(page), "exec")
    for text in blocks(page, "json"):
        json.loads(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_link_targets_exist(page: Path):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_generated_reference_is_up_to_date():
    completed = subprocess.run(
        [sys.executable, ROOT / "scripts" / "reference", "--check"], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_the_steps_of_a_rollout_are_functions_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.findall(r"^(\d+)\. ((?:.|\n   +)+)", text, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, 13))
    for number, step in steps:
        named = re.findall(r"`([\w.]+)` \(`([\w/]+\.py)`\)", step)
        assert named, f"step {number} names no function"
        for name, path in named:
            body: list[ast.stmt] = ast.parse((ROOT / "src" / "rollyard" / path).read_text()).body
            for part in name.split("."):
                nodes = [node for node in body if getattr(node, "name", None) == part]
                assert nodes, f"step {number}: {path} does not define {name}"
                body = getattr(nodes[0], "body", [])


def test_words_to_avoid_are_found_in_prose_and_not_in_code(tmp_path: Path):
    (tmp_path / "scripts").mkdir()
    for name in ("check-words", "words.txt"):
        (tmp_path / "scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())
    (tmp_path / "page.md").write_text("Fine.\nNobody reads `whoever`.\n")
    (tmp_path / "code.py").write_text('told = f"a {told} b"  # begun\nerror = "the client was told"\n')
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    argv = [sys.executable, tmp_path / "scripts" / "check-words"]
    completed = subprocess.run(argv, capture_output=True, text=True, timeout=50)
    assert completed.returncode == 1 and completed.stderr.startswith("3 words")
    words = [line.split(": write")[0] for line in completed.stdout.splitlines()]
    assert words == ["code.py:1: 'begun'", "code.py:2: 'told'", "page.md:2: 'Nobody'"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_vllm_is_started_with_the_same_flags_on_every_page(page: Path):
    flags = ("--enable-scale-out", "--logprobs-mode processed_logprobs", "--enable-prompt-tokens-details")
    for command in re.findall(r"vllm serve [^`]*?(?=`|\n```|\n\n)", page.read_text()):
        if "--" in command:
            assert all(flag in " ".join(command.split()) for flag in flags), command


def test_settings_named_in_the_docs_exist():
    operate = (ROOT / "docs" / "how-to" / "operate.md").read_text()
    for name in (
        "drain_s",
        "max_attempts",
        "token_file",
        "trainer_tokens",
        "run_slots",
        "max_live",
        "retain_s",
        "runtimes",
    ):
        assert name in Settings.model_fields
        assert name in operate


def test_every_example_task_is_valid():
    environments = Environments()
    for line in (ROOT / "examples" / "tasks.jsonl").read_text().splitlines():
        task = msgspec.convert(json.loads(line), Task)
        environments.get(task.environment).check(task)


def test_no_file_names_this_machine_or_a_registry():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    secret = re.compile("/" + "work/|/" + "root/|pypi" + r"\.org|npmjs" + r"\.org|debian" + r"\.org")
    for name in tracked:
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            text = path.read_bytes().decode("utf-8", "ignore")
            assert not secret.search(text), f"{name}: {secret.search(text)}"
