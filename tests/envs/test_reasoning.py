"""The environment `reasoning_gym`: its data, its answers, and the blame of failures."""

import sys

import pytest
import pytest_asyncio

from rollyard.core import Json
from rollyard.core.failure import SetupDeadline, TaskInvalid, VerifierCrashed
from rollyard.envs.children import Children
from rollyard.envs.reasoning import ReasoningEnvironment
from rollyard.envs.reasoning.environment import COMMAND, last_tagged

from .conftest import context, evidence, task
from .stage_resources import RUNTIMES, open_resources, played, rewards

LEGS: dict[str, Json] = {"family": "leg_counting", "seed": 42, "index": 3}

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gym():
    environment = ReasoningEnvironment()
    yield environment
    await environment.close()


async def known(gym, data) -> str:
    content = (await gym.solve(context(task("reasoning_gym", data)), {})).messages[-1]["content"]
    return str(last_tagged(str(content)))


async def score(gym, data, message="", **info):
    return await gym.eval(context(task("reasoning_gym", data)), evidence(message, **info))


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_the_oracle_scores_1_and_the_no_op_the_familys_score_for_no_answer(runtime):
    lowest = {"leg_counting": 0.0, "rush_hour": 0.0, "countdown": 0.01}
    async with open_resources(runtime) as resources:
        for family, least in lowest.items():
            body = {"environment": "reasoning_gym", "data": {**LEGS, "family": family}}
            assert await rewards(resources, body) == (1.0, least), family


async def test_the_digest_of_the_question_is_passed_to_eval():
    async with open_resources("bubblewrap") as resources:
        result = await played(resources, {"environment": "reasoning_gym", "data": LEGS}, "noop")
    assert result.trajectory is not None
    assert len(str(result.trajectory.info["question_sha256"])) == 64


async def test_the_prompt_explains_the_form_of_the_answer_but_does_not_contain_it(gym):
    assert not gym.plan(task("reasoning_gym", LEGS)).needs_sandbox
    start = await gym.init(context(task("reasoning_gym", LEGS)))
    (message,) = start.messages
    assert "legs" in str(message["content"])
    assert "<answer> and </answer>" in str(message["content"])
    assert await known(gym, LEGS) not in str(start.info)
    start = await gym.init(context(task("reasoning_gym", {**LEGS, "system_prompt": "Count."})))
    assert [message["role"] for message in start.messages] == ["system", "user"]
    assert "<answer>" not in str(start.messages[1]["content"])


async def test_other_data_give_another_question(gym):
    asked = [
        (await gym.init(context(task("reasoning_gym", {**LEGS, **more})))).messages[0]["content"]
        for more in ({}, {"index": 4}, {"seed": 1042}, {"config": {"min_animals": 9}}, {"size": 4})
    ]
    assert len(set(asked)) == 4
    assert asked[4] == asked[0]


async def test_an_answer_in_tags_or_passed_to_finish_is_scored(gym):
    right = await known(gym, LEGS)
    for message, info in [
        (f"<answer>{right}</answer>", {}),
        (f"First <answer>-1</answer>, no: <answer> {right}\n</answer> I say.", {}),
        ("<answer>-1</answer>", {"answer": right}),
        ("", {"answer": f"It is <answer>{right}</answer>"}),
    ]:
        result = await score(gym, LEGS, message, **info)
        assert (result.reward, result.components, result.metrics) == (
            1.0,
            {"score": 1.0},
            {"answered": 1.0, "unscorable": 0.0},
        )
    for message in ("", right, f"<answer>{right}", f"{right}</answer>"):
        result = await score(gym, LEGS, message)
        assert (result.reward, result.metrics["answered"]) == (0.0, 0.0)


async def test_a_partly_right_answer_gets_partial_credit(gym):
    data = {**LEGS, "family": "prime_factorization", "config": {"min_value": 24, "max_value": 24}}
    assert (await score(gym, data, "<answer>2 × 2 × 2 × 3</answer>")).reward == 1.0
    assert (await score(gym, data, "<answer>4 × 6</answer>")).reward == 0.5
    assert (await score(gym, data, "<answer>5</answer>")).reward == 0.01


async def test_an_answer_that_the_scorer_cannot_read_scores_0(gym):
    result = await score(gym, {**LEGS, "family": "prime_factorization"}, "<answer>I do not know</answer>")
    assert (result.reward, result.metrics) == (0.0, {"answered": 1.0, "unscorable": 1.0})
    result = await score(gym, LEGS, "<answer>" + "9" * 100_001 + "</answer>")
    assert (result.reward, result.metrics["unscorable"]) == (0.0, 1.0)
    result = await score(gym, LEGS, "<answer>half a pair: \ud800</answer>")
    assert result.reward == 0.0


async def test_a_different_question_than_in_init_gives_no_score(gym):
    with pytest.raises(VerifierCrashed, match="in INIT these data gave another question"):
        await score(gym, LEGS, "<answer>1</answer>", question_sha256="0" * 64)


async def test_composite_items_are_generated_and_scored_by_their_own_family(gym):
    parts = [{"name": "game_of_life_halting", "weight": 1}, {"name": "boxnet", "weight": 1.0, "config": {}}]
    for index in range(4):
        data: dict[str, Json] = {
            "family": "composite", "seed": 1, "index": index, "config": {"datasets": parts}
        }  # fmt: skip
        assert (await score(gym, data, f"<answer>{await known(gym, data)}</answer>")).reward == 1.0
        assert (await score(gym, data, "<answer>something</answer>")).reward == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>a</answer><answer>b</answer>", "b"),
        ("<answer>a<answer>b</answer>", "b"),
        ("<answer></answer>", ""),
        ("</answer><answer>", None),
        ("<answer>" * 200_000, None),
    ],
)
async def test_the_last_pair_of_tags_counts(text, expected):
    assert last_tagged(text) == expected


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ({"family": "leg_countin"}, "there is no family 'leg_countin'; similar names: leg_counting"),
        ({"config": {"animals": 3}}, r"config\.animals: leg_counting has no such option; it has max_animals, max_inst"),
        ({"config": {"min_animals": 0}}, "config: leg_counting rejects it: AssertionError"),
        (
            {"family": "countdown", "config": {"min_target": 10**9, "max_target": 10**9}},
            "countdown cannot make item 3: ValueError: Failed to generate",
        ),
    ],
)
async def test_an_item_that_cannot_be_generated_is_the_tasks_fault(gym, more, wrong):
    with pytest.raises(TaskInvalid, match=wrong):
        await gym.init(context(task("reasoning_gym", {**LEGS, **more})))


async def test_an_item_without_a_known_answer_has_no_oracle(gym):
    data = {**LEGS, "family": "rubiks_cube", "config": {"cube_size": 4}}
    with pytest.raises(TaskInvalid, match="this item of rubiks_cube has no known answer"):
        await known(gym, data)


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ({"family": None}, r"data\.family: a string was expected"),
        ({"seed": -1}, r"data\.seed: a whole number from 0 to 4294967295 was expected"),
        ({"seed": None}, r"data\.seed"),
        ({"seed": True}, r"data\.seed"),
        ({"index": 500}, r"data\.index: a whole number from 0 to 499 \(below data\.size\) was expected"),
        ({"index": 9, "size": 9}, "from 0 to 8"),
        ({"index": 1.5}, r"data\.index"),
        ({"size": 1_000_001}, r"data\.size: a whole number from 1 to 1000000 was expected"),
        ({"config": []}, r"data\.config: an object was expected"),
        ({"config": {"seed": 1}}, r"data\.config\.seed: nothing \(use data\.seed\) was expected"),
        (
            {"question": "?"},
            r"data\.question: unknown field; there are config, family, index, seed, size, system_prompt",
        ),
    ],
)
async def test_data_that_can_never_work_is_refused_with_the_field(more, wrong):
    with pytest.raises(TaskInvalid, match=wrong):
        ReasoningEnvironment().check(task("reasoning_gym", {**LEGS, **more}))
    ReasoningEnvironment().check(task("reasoning_gym", LEGS))


async def test_without_the_package_a_task_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TaskInvalid, match=r"not installed here: install rollyard\[reasoning\]"):
        ReasoningEnvironment().check(task("reasoning_gym", LEGS))
    with pytest.raises(TaskInvalid, match="not installed"):
        next(ReasoningEnvironment().generate({"family": "all"}))


async def test_a_row_becomes_a_tasks_data():
    row = {**LEGS, "size": None, "config": '{"min_animals": 4}', "split": "train"}
    body = ReasoningEnvironment().from_row(row, {})
    assert body == {"environment": "reasoning_gym", "data": {**LEGS, "config": {"min_animals": 4}}}
    table = {**row, "config": {"min_animals": 4, "min_target": None}}
    assert ReasoningEnvironment().from_row(table, {}) == body
    with pytest.raises(TaskInvalid, match=r"data\.index: a whole number from 0 to 499"):
        ReasoningEnvironment().from_row({**row, "index": 500}, {})
    for name in LEGS:
        with pytest.raises(TaskInvalid, match=f"this row has no '{name}'"):
            ReasoningEnvironment().from_row({**row, name: None}, {})
    with pytest.raises(TaskInvalid, match="config is not JSON"):
        ReasoningEnvironment().from_row({**row, "config": "{"}, {})
    with pytest.raises(TaskInvalid, match="unknown option 'count' of its importer; there are none"):
        ReasoningEnvironment().from_row(row, {"count": "1"})


async def test_tasks_are_generated_family_by_family():
    def generated(**options: str) -> list[Json]:
        return [body["data"] for body in ReasoningEnvironment().generate(options)]

    assert generated(family="leg_counting", count="2", seed="7") == [
        {"family": "leg_counting", "seed": 7, "index": 0},
        {"family": "leg_counting", "seed": 7, "index": 1},
    ]
    assert len(generated(family="gcd, lcm")) == 200
    assert generated(family="gcd", count="501")[-1] == {"family": "gcd", "seed": 0, "index": 500, "size": 501}
    assert generated(family="gcd", count="1", config='{"min_numbers": 3}')[0]["config"] == {"min_numbers": 3}  # type: ignore[index]
    every = generated(family="all", count="1")
    assert len(every) > 100
    assert "composite" not in [data["family"] for data in every]  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({}, "family: give one family, several separated by commas, or all"),
        ({"family": "leg_countng,gcd"}, "there is no family 'leg_countng'; similar names: leg_counting"),
        ({"family": "zzzzzz"}, "there is no family 'zzzzzz'"),
        ({"family": "gcd", "count": "0"}, "count=0: a whole number from 1 to 1000000 was expected"),
        ({"family": "gcd", "seed": "x"}, "seed=x: a whole number from 0 to 4294967295 was expected"),
        ({"family": "gcd", "n": "1"}, "unknown option 'n' of its importer; there are config, count, family, seed"),
        ({"family": "gcd,lcm", "config": "{}"}, "config applies to one family, not to 2"),
        ({"family": "gcd", "config": "[]"}, "config: an object was expected"),
    ],
)
async def test_invalid_options_are_refused(options, wrong):
    with pytest.raises(TaskInvalid, match=wrong):
        list(ReasoningEnvironment().generate(options))


# --- scorers that misbehave ---------------------------------------------------------------------------

ODD = """
import os, time
from dataclasses import dataclass
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import register_dataset
from rollyard.envs.reasoning import child

@dataclass
class Config:
    seed: int = 0
    size: int = 500

class Odd(ProceduralDataset):
    def __init__(self, config):
        super().__init__(config, config.seed, config.size)

    def __getitem__(self, index):
        return {"question": "?", "answer": "right", "metadata": {"source_dataset": "odd"}}

    def score_answer(self, answer, entry):
        if answer == "raise": raise ValueError("no")
        if answer == "leave": raise SystemExit
        if answer == "die": os.abort()
        if answer == "spin":
            while True: pass
        if answer == "memory": return len(b"x" * (3 << 30))
        if answer == "spoil": entry["answer"] = "spoilt"; self.score_answer = None
        if answer == "shout": return 7
        if answer == "nothing": return float("nan")
        if answer == "shell": os.system("true"); return 1
        if answer == "write": open("/dev/null", "w"); return 1
        return float(answer == entry["answer"])

class Broken(Odd):
    def score_answer(self, answer, entry):
        raise ValueError("always")

register_dataset("odd", Odd, Config)
register_dataset("broken", Broken, Config)
child.SCORE_CPU_S = 1
child.main()
"""

ODD_DATA: dict[str, Json] = {"family": "odd", "seed": 1, "index": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def odd():
    environment = ReasoningEnvironment()
    environment.children = Children("reasoning-gym", command=(*COMMAND[:4], "-c", ODD), workers=1)
    yield environment
    await environment.close()


@pytest.mark.parametrize("answer", ["raise", "leave", "die", "spin", "memory", "nothing", "shell", "write"])
async def test_an_answer_that_breaks_the_scorer_scores_0_and_the_next_one_is_scored(odd, answer):
    result = await score(odd, ODD_DATA, f"<answer>{answer}</answer>")
    assert (result.reward, result.metrics["unscorable"]) == (0.0, 1.0)
    assert (await score(odd, ODD_DATA, "<answer>right</answer>")).reward == 1.0


async def test_an_answer_does_not_affect_the_next_one(odd):
    await score(odd, ODD_DATA, "<answer>spoil</answer>")
    assert (await score(odd, ODD_DATA, "<answer>right</answer>")).reward == 1.0
    assert (await score(odd, ODD_DATA, "<answer>spoilt</answer>")).reward == 0.0


async def test_a_score_is_at_most_1(odd):
    assert (await score(odd, ODD_DATA, "<answer>shout</answer>")).reward == 1.0


async def test_a_scorer_that_also_fails_on_the_known_answer_gives_no_score(odd):
    with pytest.raises(VerifierCrashed, match="also fails on the known answer: ValueError: always"):
        await score(odd, {**ODD_DATA, "family": "broken"}, "<answer>right</answer>")


async def test_an_item_that_hangs_is_the_tasks_fault_in_init_and_gives_no_score_in_eval():
    environment = ReasoningEnvironment()
    sleeps = "import socket, time; s = socket.socket(fileno=0); s.sendall(b'ok\\n'); time.sleep(600)"
    environment.children = Children("reasoning-gym", command=(sys.executable, "-c", sleeps))
    environment.child_s = 0.2
    with pytest.raises(SetupDeadline, match=r"did not decide within 0\.2 s"):
        await environment.init(context(task("reasoning_gym", LEGS)))
    with pytest.raises(VerifierCrashed, match=r"did not decide within 0\.2 s"):
        await score(environment, LEGS, "<answer>1</answer>")


async def test_an_item_that_cannot_be_generated_again_gives_no_score(gym):
    with pytest.raises(VerifierCrashed, match="cannot be made again: there is no family 'gone'"):
        await score(gym, {**LEGS, "family": "gone"}, "<answer>1</answer>")
