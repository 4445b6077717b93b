"""All families of reasoning-gym: reproducible questions, an oracle that scores 1, and known cheats that fail."""

import functools
import re
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from rollyard.core import Json
from rollyard.envs.children import Children
from rollyard.envs.reasoning import guard
from rollyard.envs.reasoning.environment import COMMAND, ReasoningEnvironment

SEED = 600  # of the seeds tried, the one whose items are generated fastest
INDEX = 1

FOR_NOTHING = {"countdown": 0.01, "fraction_simplification": 0.01, "puzzle24": 0.01}
"""The scores of these families for no answer; all others give 0. As in docs/how-to/reasoning-gym.md."""

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@functools.cache
def families() -> list[str]:
    bodies = ReasoningEnvironment().generate({"family": "all", "count": "1"})
    return [str(body["data"]["family"]) for body in bodies]  # type: ignore[index,call-overload]


@asynccontextmanager
async def one_process():
    children = Children("reasoning-gym", command=COMMAND, workers=1)

    async def ask(do: str, family: str, answer: str | None = None, **more: Json):
        item = {"family": family, "seed": SEED, "index": INDEX, "size": 500, "config": {}, **more}
        return await children.ask({"do": do, **item, "answer": answer}, answer_s=50)

    try:
        yield ask
    finally:
        await children.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ask():
    async with one_process() as asking:
        yield asking


async def test_the_same_data_give_the_same_question_in_another_process_after_others(ask):
    asked = {family: (await ask("make", family))["sha256"] for family in families()}
    async with one_process() as other:
        again = {family: (await other("make", family))["sha256"] for family in reversed(families())}
    assert again == asked
    assert len(set(asked.values())) == len(families())


async def test_every_oracle_scores_1_and_every_no_op_the_familys_score_for_no_answer(ask):
    got: dict[str, tuple[Json, Json]] = {}
    for family in families():
        known = (await ask("solve", family))["answer"]
        assert isinstance(known, str), family
        best, least = await ask("score", family, known), await ask("score", family, None)
        assert (best["why"], least["why"]) == (None, None), family
        got[family] = best["score"], least["score"]
    assert got == {family: (1.0, FOR_NOTHING.get(family, 0.0)) for family in families()}


async def test_no_family_runs_an_answer_as_code_or_accepts_it(ask, tmp_path):
    mark = tmp_path / "mark"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    for family in families():
        verdict = await ask("score", family, code)
        assert isinstance(verdict["score"], float), family
        assert verdict["score"] <= 0.25, family
        assert "Fenced" not in str(verdict["why"]), family  # refused before the fence was needed
    spelt = "exec(" + "+".join(f"chr({ord(letter)})" for letter in code) + ")"
    for family in ("countdown", "intermediate_integration", "polynomial_multiplication", "n_queens"):
        assert (await ask("score", family, spelt))["score"] <= 0.01, family
    assert not mark.exists()


@pytest.mark.parametrize(
    ("family", "cheat"),
    [
        ("game_of_life_halting", "it does or it does not"),
        ("puzzle24", "1*2*3*4"),
        ("puzzle24", "4!*1+5-5"),
        ("puzzle24", "(x-x)*({numbers[0]}+{numbers[1]}+{numbers[2]}+{numbers[3]})+(x/x+x/x+x/x+x/x)!"),
        ("coin_flip", "0"),
        ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "nan+nanj"),
        ("simple_integration", "Integral({integrand}, {variable})"),
        ("simple_integration", "integrate({integrand}, {variable})"),
        ("intermediate_integration", "Integral({integrand}, {variable})"),
        ("string_insertion", "list({answer!r})"),
    ],
)
async def test_an_answer_that_the_scorer_would_compute_is_wrong(ask, family, cheat):
    from reasoning_gym import create_dataset

    entry = create_dataset(family, seed=SEED, size=500)[INDEX]
    verdict = await ask("score", family, cheat.format(answer=entry["answer"], **entry["metadata"]))
    assert verdict["score"] in (0.0, 0.01)


@pytest.mark.parametrize("made", ["{target}e0 + 0e0*({all})", "(x/x)*{target}e0 + (x-x)*({all})"])
async def test_countdown_accepts_only_the_given_numbers(ask, made):
    question = str((await ask("make", "countdown"))["question"])
    numbers, target = re.search(r"[^\d]*([\d, ]+\d)[^\d]+(\d+)", question).groups()  # type: ignore[union-attr]
    answer = made.format(target=target, all=numbers.replace(", ", "+"))
    assert (await ask("score", "countdown", answer))["score"] <= 0.05


@pytest.mark.parametrize("nan", ["NaN", "'nan'", '"\\u006ean"'])
async def test_a_list_of_nans_is_not_sorted(ask, nan):
    known = str((await ask("solve", "number_sorting"))["answer"])
    verdict = await ask("score", "number_sorting", f"[{', '.join([nan] * (known.count(',') + 1))}]")
    assert verdict["score"] == 0.0


async def test_puzzle24_rejects_24_and_a_fraction():
    from reasoning_gym import create_dataset

    dataset, entry = create_dataset("puzzle24", seed=SEED), {"metadata": {"source_dataset": "puzzle24"}}
    for numbers, answer, reward in (([7, 7, 2, 1], "7*7/2*1", 0.01), ([6, 4, 1, 1], "6*4*1*1", 1.0)):
        entry["metadata"]["numbers"] = numbers  # type: ignore[assignment]
        assert guard.score(dataset, entry, answer) == reward


async def test_a_product_that_the_scorer_would_expand_is_wrong(ask):
    """The child generates the item: this process has random hashes and may generate another one."""
    question = str((await ask("make", "polynomial_multiplication"))["question"])
    product = next(line for line in question.splitlines() if ")*(" in line)
    product = product[product.index("(") :]
    assert (await ask("score", "polynomial_multiplication", f"expand({product})"))["score"] == 0.0


async def test_ordinary_expressions_are_still_read(ask):
    known = (await ask("solve", "simple_integration"))["answer"]
    for text in (f"{known}", f"({known}) * 1 + log(2) - sqrt(pi)", f"1e0*({known}) + .5"):
        assert (await ask("score", "simple_integration", text))["score"] == 1.0, text


ATTEMPTS = {
    "os.system('true')": True,
    "subprocess.run(['true'])": True,
    "socket.socket()": True,
    "open('/dev/null', 'w')": True,
    "os.open('/dev/null', os.O_RDWR)": True,
    "os.remove('/nowhere/at/all')": True,
    "os.kill(os.getpid(), 0)": True,
    "open('/dev/null').read()": False,
    "__import__('wave')": False,
}

TRY = """
import os, socket, subprocess, sys
from rollyard.envs.reasoning import guard
guard.fence()
for attempt in sys.argv[1:]:
    try:
        eval(attempt)
        print(attempt, False, sep="\\t")
    except guard.Fenced:
        print(attempt, True, sep="\\t")
"""


async def test_after_the_fence_nothing_can_be_started_sent_or_written():
    completed = subprocess.run([sys.executable, "-B", "-c", TRY, *ATTEMPTS], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    outcomes = [line.split("\t") for line in completed.stdout.splitlines()]
    assert {attempt: is_fenced == "True" for attempt, is_fenced in outcomes} == ATTEMPTS
