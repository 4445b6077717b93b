"""Runs yardwork tasks in real sandboxes with the oracle, the no-op, a policy, and policies that cheat."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollyard.core import Outcome, Task
from rollyard.core.failure import TaskInvalid
from rollyard.envs.yardwork import FAMILIES, YardworkEnvironment, demonstration, make
from rollyard.envs.yardwork.environment import SYSTEM_PROMPT, WORKSPACE_BYTES
from rollyard.envs.yardwork.judging import pack, unpacked
from rollyard.envs.yardwork.puzzle import File, Tree
from rollyard.envs.yardwork.words import SPLITS, Split
from rollyard.sandbox import WORKDIR, Sandbox
from rollyard.testing.script import Reply, Rules
from tests.pipeline.site import finish, open_site, shell
from tests.tools.busybox import busybox_image

from .conftest import context, evidence, task
from .stage_resources import RUNTIMES, open_resources, played, rewards

pytestmark = pytest.mark.slow

TREE: dict[str, Any] = {"family": "tree", "template": "t0", "level": 3, "seed": 7, "split": "train"}
FIND: dict[str, Any] = {"family": "find_content", "template": "t0", "level": 1, "seed": 7, "split": "train"}
FIX: dict[str, Any] = {"family": "fix_source", "template": "t0", "level": 1, "seed": 7, "split": "train"}
MODES: dict[str, Any] = {"family": "permissions", "template": "t0", "level": 3, "seed": 7, "split": "train"}


def one_of_each(split: Split, seed: str = "0") -> Iterator[dict[str, Any]]:
    """A task of each family, at alternating levels."""
    for index, family in enumerate(FAMILIES):
        yield from (
            dict(body)
            for body in YardworkEnvironment().generate(
                {"count": "1", "families": family, "levels": str(1 + index % 5), "seed": seed, "split": split}
            )
        )


# --- in real sandboxes


@pytest.mark.parametrize("split", SPLITS)
async def test_the_oracle_scores_1_and_the_no_op_0_in_each_family(split: Split):
    async with open_resources("bubblewrap") as resources:
        for body in one_of_each(split):
            assert (body["data"], *await rewards(resources, body)) == (body["data"], 1.0, 0.0)


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_answers_files_folders_and_modes_work_in_every_runtime(runtime: str):
    async with open_resources(runtime) as resources:
        for data in (FIND, FIX, TREE, MODES):
            assert (data, *await rewards(resources, {"environment": "yardwork", "data": data})) == (data, 1.0, 0.0)


@pytest.mark.parametrize("split", SPLITS)
async def test_the_oracle_needs_only_busybox(split: Split, tmp_path: Path):
    image = {"sandbox": {"image": str(busybox_image(tmp_path / "image"))}}
    async with open_resources("bubblewrap") as resources:
        for body in one_of_each(split, seed="1"):
            result = await played(resources, {**body, **image}, "oracle")
            assert result.score is not None, (body, result.failure)
            assert result.score.reward == 1.0, (body, result.trajectory)


async def test_the_oracle_calls_the_tools_as_in_the_demonstration():
    async with open_resources("bubblewrap") as resources:
        result = await played(resources, {"environment": "yardwork", "data": FIND}, "oracle")
    assert result.trajectory is not None
    messages = result.trajectory.messages
    calls: list[Any] = [message["tool_calls"] for message in messages if "tool_calls" in message]
    called = [call["function"] for (call,) in calls]
    turns = demonstration(FIND)
    assert [(call["name"], json.loads(call["arguments"])) for call in called] == [
        (turn.tool, dict(turn.arguments)) for turn in turns
    ]
    tool_contents = [message["content"] for message in messages if message["role"] == "tool"]
    assert tool_contents[-2:] == [make(FIND).scene.answer, "Done."], "the observations are real"


@pytest.mark.parametrize("data", [FIND, FIX])
async def test_a_policy_that_repeats_the_demonstration_scores_1(data: dict[str, Any], tmp_path: Path):
    turns = [
        f"{turn.text}\n<tool_call>\n{json.dumps({'name': turn.tool, 'arguments': dict(turn.arguments)})}\n</tool_call>"
        for turn in demonstration(data)
    ]
    async with open_site(tmp_path, Rules(rules=((make(data).instruction, tuple(map(Reply, turns))),))) as site:
        rollout = await site.rolled(Task("yardwork", data))
    assert rollout.ending is not None and rollout.ending.score is not None, rollout.ending
    assert (rollout.ending.outcome, rollout.ending.score.reward) == (Outcome.COMPLETED, 1.0)


# --- cheating

SOLUTION = str(demonstration(TREE)[1].arguments["command"])


async def reward_of(commands: list[str], folder: Path) -> float:
    """The reward of a policy that runs these commands in the task `TREE` and then finishes."""
    turns = (*(Reply(shell(command)) for command in commands), Reply(finish("1.0")))
    async with open_site(folder, Rules(rules=((make(TREE).instruction, turns),))) as site:
        rollout = await site.rolled(Task("yardwork", TREE))
    assert rollout.ending is not None and rollout.ending.score is not None, rollout.ending
    assert rollout.ending.outcome is Outcome.COMPLETED
    return rollout.ending.score.reward


async def test_the_solution_alone_scores_1(tmp_path: Path):
    assert await reward_of([SOLUTION], tmp_path) == 1.0


@pytest.mark.parametrize(
    "commands",
    [
        [SOLUTION, "touch extra"],
        [SOLUTION, "ln -s /etc escape"],
        [SOLUTION, "p=$(ls *.*); mv $p /tmp/plan; ln -s /tmp/plan $p; cat $p"],
        [SOLUTION, "mkfifo pipe && mv pipe $(ls *.* | head -n 1)"],
        [SOLUTION, "printf '#!/bin/sh\\nexit 0\\n' > tar; chmod +x tar; export PATH=/workspace:$PATH"],
        ["echo '{\"reward\": 1}' > reward.json; echo 1 > reward.txt; mkdir -p /logs; echo 1 > /logs/reward"],
        ["cd / && rm -rf /workspace/* && ln -s / /workspace/root"],
        [SOLUTION, "head -c 8000000 /dev/zero > big"],
    ],
    ids=["more", "link", "linked", "fifo", "program", "verdict", "root", "large"],
)
async def test_extra_or_wrong_files_score_0(commands: list[str], tmp_path: Path):
    assert await reward_of(commands, tmp_path) == 0.0


class Unrunnable:
    """A sandbox in which no command can run."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.spec, self.download, self.unpack = sandbox.spec, sandbox.download, sandbox.unpack


async def write_files(sandbox: Sandbox, tree: Tree, folder: Path) -> None:
    pack(tree, folder / "left.tar")
    await sandbox.unpack(folder / "left.tar", WORKDIR)


async def test_files_are_scored_without_running_anything(new_sandbox, tmp_path: Path):
    """The repaired script may be hostile: it is read, never run."""
    after = make(FIX).scene.after
    assert after is not None
    sandbox = await new_sandbox()
    await write_files(sandbox, after, tmp_path)
    eval_context = context(task("yardwork", FIX), Unrunnable(sandbox))  # type: ignore[arg-type]
    score = await YardworkEnvironment().eval(eval_context, evidence())
    assert (score.reward, score.metrics) == (1.0, {"files_right": 1.0})
    script = next(path for path, file in after.items() if file and file.text.startswith(". "))
    await write_files(sandbox, {script: File("touch /tmp/ran\n")}, tmp_path)
    score = await YardworkEnvironment().eval(eval_context, evidence())
    assert score.reward == 0.0 and 0.5 < score.metrics["files_right"] < 1.0


async def test_a_workspace_that_could_not_be_saved_scores_0(new_sandbox, tmp_path: Path):
    after = make(FIX).scene.after
    assert after is not None
    sandbox = await new_sandbox()
    await write_files(sandbox, after, tmp_path)
    eval_context = context(task("yardwork", FIX), sandbox)
    assert (await YardworkEnvironment().eval(eval_context, evidence(saved=()))).reward == 0.0
    await write_files(sandbox, {"big": File("x" * (WORKSPACE_BYTES + 1))}, tmp_path)
    assert (await YardworkEnvironment().eval(eval_context, evidence())).reward == 0.0


async def test_an_answer_scores_1_or_0():
    answer = str(make(FIND).scene.answer)
    names = [path for path in make(FIND).scene.files if path != answer]

    async def reward(message: str = "", **info: Any) -> float:
        return (await YardworkEnvironment().eval(context(task("yardwork", FIND)), evidence(message, **info))).reward

    assert await reward(answer=answer) == await reward(answer=f" {answer}\n") == await reward(message=answer) == 1.0
    for wrong in ("", names[0], f"{answer} {names[0]}", f"It is {answer}", answer.upper(), "*", "1.0"):
        assert await reward(answer=wrong) == 0.0, wrong
    assert await reward(message=answer, answer=names[0]) == 0.0, "the argument of finish counts"


# --- set-up


async def test_all_files_are_written_by_one_call_with_their_modes(new_sandbox, tmp_path: Path):
    sandbox = await new_sandbox()
    jobs: list[str] = []

    class Counted:
        async def unpack(self, archive: Path, path: str) -> None:
            jobs.append(path)
            await sandbox.unpack(archive, path)

    data: dict[str, Any] = {**MODES, "split": "held_out", "template": "h1"}
    await YardworkEnvironment().prepare(context(task("yardwork", data), Counted()))  # type: ignore[arg-type]
    assert jobs == [WORKDIR]
    await sandbox.download(WORKDIR, tmp_path / "seen.tar", limit_bytes=1 << 20)
    assert unpacked(tmp_path / "seen.tar") == dict(make(data).scene.files)


async def test_the_prompt_is_a_system_prompt_and_the_instruction():
    start = await YardworkEnvironment().init(context(task("yardwork", FIND)))
    system, user = start.messages
    assert (system["role"], system["content"]) == ("system", SYSTEM_PROMPT)
    assert (user["role"], user["content"]) == ("user", make(FIND).instruction)
    start = await YardworkEnvironment().init(context(task("yardwork", {**FIND, "system_prompt": ""})))
    assert [message["role"] for message in start.messages] == ["user"]


def test_tasks_with_the_same_files_share_a_set_up_whatever_their_wording():
    environment = YardworkEnvironment()
    key = environment.layer_key(task("yardwork", TREE))
    assert key is not None and key == environment.layer_key(task("yardwork", TREE))
    assert key == environment.layer_key(task("yardwork", {**TREE, "template": "t1", "system_prompt": "Be brief."}))
    others = [{**TREE, "seed": 8}, {**TREE, "level": 4}, {**TREE, "split": "held_out", "template": "h0"}]
    assert len({key, *(environment.layer_key(task("yardwork", other)) for other in others)}) == 4


def test_only_tasks_that_change_files_save_the_workspace():
    environment = YardworkEnvironment()
    find, fix = environment.plan(task("yardwork", FIND)), environment.plan(task("yardwork", FIX))
    assert (find.artifacts, find.eval_needs_sandbox) == ((), False)
    assert [(rule.path, rule.limit_bytes) for rule in fix.artifacts] == [(WORKDIR, WORKSPACE_BYTES)]
    assert (fix.eval_needs_sandbox, fix.eval_mode, fix.is_reevaluable) == (True, "fresh", True)


# --- data and options


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"family": "chess"}, "data.family: one of find_content, "),
        ({"template": "h0"}, "data.template: one of t0 to t58, for train, was expected"),
        ({"level": 6}, "data.level: a whole number from 1 to 5"),
        ({"level": True}, "data.level"),
        ({"seed": -1}, "data.seed"),
        ({"seed": None}, "data.seed"),
        ({"split": "test"}, 'data.split: "train" or "held_out"'),
        ({"answer": "x"}, "data.answer: unknown field"),
    ],
)
def test_data_that_can_never_work_is_refused_with_the_field(change: dict[str, Any], wrong: str):
    with pytest.raises(TaskInvalid, match=wrong):
        YardworkEnvironment().check(task("yardwork", {**FIND, **change}))


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"count": "0"}, "count=0: a whole number from 1"),
        ({"seed": "x"}, "seed=x"),
        ({"split": "test"}, "split=test: train or held_out"),
        ({"families": "chain,chess"}, "no family 'chess'; there are find_content"),
        ({"levels": "0-3"}, "levels are 1 to 5"),
        ({"levels": "3-1"}, "levels are 1 to 5"),
        ({"levels": "easy"}, "levels=easy"),
        ({"family": "chain"}, "unknown option 'family'"),
        ({"rules": "old"}, "rules=old: one of all, trained, new was expected"),
        ({"rules": "new"}, "rules=new: only the split held_out has rules that are not trained"),
        ({"rules": "new", "split": "train"}, "rules=new: only the split held_out"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, str], wrong: str):
    with pytest.raises(TaskInvalid, match=wrong):
        list(YardworkEnvironment().generate(options))


def test_families_and_levels_can_be_chosen():
    bodies = YardworkEnvironment().generate({"count": "12", "families": "chain,tree", "levels": "2-3"})
    tasks: list[Any] = [body["data"] for body in bodies]
    chosen = [(data["family"], data["level"]) for data in tasks]
    assert chosen[:4] == [("chain", 2), ("tree", 2), ("chain", 3), ("tree", 3)]
    for data in tasks:
        YardworkEnvironment().check(task("yardwork", data))


def test_trained_and_new_rules_can_be_chosen():
    """The held-out split has rules of the training split, in other words, and rules that are never trained."""

    def drawn(split: str, **options: str) -> list[Any]:
        return [body["data"] for body in YardworkEnvironment().generate({"count": "1000", "split": split, **options})]

    def rules(tasks: list[Any]) -> set[tuple[str, str]]:
        return {(data["family"], rule_of(data)) for data in tasks}

    def rule_of(data: Any) -> str:
        (template,) = (one for one in FAMILIES[data["family"]].templates[data["split"]] if one.name == data["template"])
        return template.rule

    in_training = {(family.name, one.rule) for family in FAMILIES.values() for one in family.templates["train"]}
    assert rules(drawn("train")) == in_training
    assert drawn("train", rules="trained") == drawn("train", rules="all") == drawn("train")
    trained, new, everything = (drawn("held_out", rules=chosen) for chosen in ("trained", "new", "all"))
    assert everything == drawn("held_out")
    assert rules(trained) <= in_training and {data["family"] for data in trained} == set(FAMILIES)
    assert new and not rules(new) & in_training and {data["family"] for data in new} == set(FAMILIES)
    assert rules(trained) | rules(new) == rules(everything)
    for data in (*trained[:100], *new[:100]):
        YardworkEnvironment().check(task("yardwork", data))
