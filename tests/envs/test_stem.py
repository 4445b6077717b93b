import json
import re
from pathlib import Path

import pytest
import pytest_asyncio

from rollyard.core.failure import TaskInvalid
from rollyard.envs.stem.data import StemData
from rollyard.envs.stem.environment import StemEnvironment

from .conftest import context, evidence, task
from .stage_resources import RUNTIMES, open_resources, rewards, to_play

GASES = {"question": "Which gas do plants take in?", "choices": ["oxygen", "carbon dioxide", "argon"], "answer": "B"}
FREE = {"question": "What powers a cell?", "answer": "the mitochondria"}
FALL = {"question": "How fast is it?", "answer": 9.81, "unit": "m/s", "tolerance": 0.01}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stem():
    environment = StemEnvironment()
    yield environment
    await environment.close()


pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_the_oracle_scores_1_and_the_no_op_0(runtime):
    async with open_resources(runtime) as resources:
        for data in (GASES, {**GASES, "seed": 3}, FREE, FALL, {**FREE, "judge": True}):
            body = {"environment": "stem", "data": data, "agent": {"options": {"tools": ["finish"]}}}
            assert await rewards(resources, body) == (1.0, 0.0)
        # with its own tools, one of which needs a sandbox
        assert await rewards(resources, {"environment": "stem", "data": GASES}) == (1.0, 0.0)


async def test_every_example_of_the_how_to_page_is_a_task_with_an_oracle():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "math-and-stem.md"
    bodies = [json.loads(it) for it in re.findall(r"^```json\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)]
    assert len(bodies) == 5
    async with open_resources("bubblewrap") as resources:
        for body in bodies:
            assert await rewards(resources, {**body, "agent": {"options": {"tools": ["finish"]}}}) == (1.0, 0.0)


async def test_only_the_tools_need_a_sandbox(stem):
    async with open_resources("bubblewrap") as resources:
        kinds = resources.resolve(to_play({"environment": "stem", "data": GASES}, "bubblewrap")).tools
    assert [kind.spec.name for kind in kinds] == ["ipython", "finish"]  # type: ignore[union-attr]
    plan = stem.plan(task("stem", GASES))
    assert (plan.needs_sandbox, plan.eval_needs_sandbox) == (False, False)


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("Plants breathe it.\nAnswer: B", 1.0),
        ("**Final Answer:** (b).", 1.0),
        ("Answer: **B**.", 1.0),
        ("Answer: **B.**", 1.0),
        ("> The correct answer: B. Carbon Dioxide", 1.0),
        ("Answer: carbon dioxide", 1.0),
        ("so \\boxed{B}", 1.0),
        ("so $\\boxed{\\text{(B)}}$\nAnswer: B", 1.0),
        ("The mass is \\boxed{44}.\n\nAnswer: option B", 1.0),
        ("Answer: A", 0.0),
        ("Answer: D", 0.0),
        ("I take B", 0.0),
        ("B", 0.0),
        ("Answer: A or B", 0.0),
        ("Answer: AB", 0.0),
        ("Answer: A\nAnswer: B", 0.0),
        ("\\boxed{A} or \\boxed{B}", 0.0),
        ("\\boxed{A}\nAnswer: B", 0.0),
        ("\\boxed{A, B}", 0.0),
        ("Answer: B. oxygen", 0.0),
        ("Answer:", 0.0),
        ("", 0.0),
    ],
)
async def test_the_choice_is_parsed_strictly_from_the_last_message(stem, said, reward):
    assert (await stem.eval(context(task("stem", GASES)), evidence(said))).reward == reward


@pytest.mark.parametrize(
    ("given", "reward"),
    [
        ("B", 1.0),
        (" (b) ", 1.0),
        ("B) carbon dioxide", 1.0),
        ("Carbon dioxide.", 1.0),
        ("The answer:\nAnswer: B", 1.0),
        ("\\boxed{B}", 1.0),
        ("A", 0.0),
        ("A B", 0.0),
        ("It is B, I think", 0.0),
        ("", 0.0),
    ],
)
async def test_the_argument_of_finish_takes_precedence_over_the_last_message(stem, given, reward):
    score = await stem.eval(context(task("stem", GASES)), evidence("Answer: B", answer=given))
    assert score.reward == reward
    assert score.components == {"correct": reward}


@pytest.mark.parametrize(
    "said", ["Answer: A\nAnswer: B", "\\boxed{B} \\boxed{A}", "\\boxed{A}\nAnswer: B", "Answer: A, B"]
)
async def test_naming_several_choices_counts_as_no_answer(stem, said):
    for right in ("A", "B"):
        score = await stem.eval(context(task("stem", {**GASES, "answer": right})), evidence(said))
        assert (score.reward, score.metrics) == (0.0, {"answered": 0.0})


@pytest.mark.parametrize(
    ("choices", "given"),
    [
        (["Co", "CO"], "co"),  # matches both
        (["**", "+"], ""),
        (["x" * 3000, "y"], "x" * 3000),
    ],
)
async def test_a_text_that_does_not_match_exactly_one_choice_is_no_answer(stem, choices, given):
    data = {"question": "?", "choices": choices, "answer": 0}
    assert (await stem.eval(context(task("stem", data)), evidence(answer=given))).metrics == {"answered": 0.0}


async def test_an_unreadable_answer_has_the_metric_answered_0(stem):
    score = await stem.eval(context(task("stem", GASES)), evidence("Answer: A or B"))
    assert score.metrics == {"answered": 0.0}
    wrong = await stem.eval(context(task("stem", GASES)), evidence("Answer: A"))
    assert wrong.metrics == {"answered": 1.0}


async def test_a_letter_never_matches_the_text_of_another_choice(stem):
    data = {"question": "Which vitamin?", "choices": ["B", "A", "C"], "answer": 1}
    assert (await stem.eval(context(task("stem", data)), evidence("Answer: A"))).reward == 0.0
    assert (await stem.eval(context(task("stem", data)), evidence("Answer: B"))).reward == 1.0


async def test_texts_of_any_length_are_scanned_once(stem):
    eval_context = context(task("stem", GASES))
    for message in ("Answer:" * 50_000, "Answer: A\n" * 20_000, "answer" + " " * 200_000, "\n" * 200_000):
        assert (await stem.eval(eval_context, evidence(message))).reward == 0.0
    assert (await stem.eval(eval_context, evidence("Answer: B", answer="B" * 200_000))).reward == 0.0
    for data in (FREE, FALL, {**FALL, "unit": None}):
        for answer in (
            "9" * 100_000,
            "9" + " " * 100_000 + "x",
            "9 " * 50_000,
            "\\text{" * 20_000,
            "1e1" * 30_000,
        ):
            assert (await stem.eval(context(task("stem", data)), evidence(answer=answer))).reward == 0.0


@pytest.mark.parametrize("answer", ["b", "carbon dioxide", 1])
@pytest.mark.parametrize("choices", [GASES["choices"], {"c": "argon", "a": "oxygen", "b": "carbon dioxide"}])
async def test_choices_and_the_answer_have_several_forms(stem, choices, answer):
    answer = answer.upper() if answer == "b" and isinstance(choices, list) else answer
    data = StemData.read(task("stem", {**GASES, "choices": choices, "answer": answer}))
    assert data.choices == ("oxygen", "carbon dioxide", "argon")
    assert data.right == 1


async def test_a_seed_shuffles_the_choices_and_the_answer_with_them(stem):
    seen: set[tuple[str, ...]] = set()
    for seed in range(40):
        data = StemData.read(task("stem", {**GASES, "seed": seed}))
        assert data == StemData.read(task("stem", {**GASES, "seed": seed}))
        assert data.choices[data.right] == "carbon dioxide"
        seen.add(data.choices)
    assert len(seen) == 6


async def test_one_seed_does_not_give_all_questions_the_same_letter(stem):
    """With one order for all questions, a dataset whose right choice comes first would have one right letter."""
    data = {**GASES, "answer": 0, "seed": 7}
    rights = {StemData.read(task("stem", {**data, "question": f"Question {n}?"})).right for n in range(40)}
    assert rights == {0, 1, 2}


async def test_the_order_of_a_seed_never_changes(stem):
    """Tasks may be scored after a restart by a newer version: a letter must still stand for the same choice."""
    choices = StemData.read(task("stem", {**GASES, "seed": 7})).choices
    assert choices == ("argon", "oxygen", "carbon dioxide")


async def test_the_prompt_contains_the_choices_and_how_to_answer(stem):
    (asked,) = (await stem.init(context(task("stem", GASES)))).messages
    assert "A. oxygen\nB. carbon dioxide\nC. argon" in asked["content"]
    assert "finish" in asked["content"] and '"Answer: X"' in asked["content"]
    (asked,) = (await stem.init(context(task("stem", FALL)))).messages
    assert "\\boxed{}" in asked["content"] and "a number in m/s." in asked["content"]
    assert "9.81" not in asked["content"]
    system, asked = (await stem.init(context(task("stem", {**GASES, "system_prompt": "Be right."})))).messages
    assert system == {"role": "system", "content": "Be right."}
    assert "B. carbon dioxide" in asked["content"] and "finish" not in asked["content"]


@pytest.mark.parametrize(
    ("data", "given", "reward"),
    [
        ({"answer": "the mitochondria"}, "The  Mitochondria.", 1.0),
        ({"answer": "the mitochondria"}, "\\text{the mitochondria}", 1.0),
        ({"answer": "the mitochondria"}, "the chloroplast", 0.0),
        ({"answer": "DNA"}, "AND", 0.0),
        ({"answer": "CO"}, "Co", 0.0),
        ({"answer": "H2O"}, "O2H", 0.0),
        ({"answer": "H2O"}, "H2O", 1.0),
        ({"answer": "5 km"}, "5 m", 0.0),
        ({"answer": "5 m"}, "5 s", 0.0),
        ({"answer": "5 km"}, "$5\\,\\text{km}$", 1.0),
        ({"answer": 0.5}, "\\frac{1}{2}", 1.0),
        ({"answer": "3e8"}, "3 \\times 10^{8}", 1.0),
        ({"answer": "3e8"}, "300,000,000", 1.0),
        ({"answer": "-2"}, "−2", 1.0),
        ({"answer": "v = \\sqrt{2gh}"}, "\\sqrt{2hg}", 1.0),
        ({"answer": "3x^2"}, "3x^{2}", 1.0),
        ({"answer": 9.81}, "9.8", 0.0),
        ({"answer": 9.81, "tolerance": 0.01}, "9.8", 1.0),
        ({"answer": 9.81, "tolerance": 0.01}, "9.5", 0.0),
        ({"answer": 9.81, "tolerance": 0.01}, "about ten", 0.0),
        ({"answer": 9.81, "tolerance": 0.01}, "9.81, 9.5", 0.0),
        ({"answer": "6.02e23", "tolerance": 0.01}, "6.0 × 10^23", 1.0),
        ({"answer": 9.81, "tolerance": 0.01, "unit": "m/s^2"}, "9.8 m/s²", 1.0),
        ({"answer": 9.81, "tolerance": 0.01, "unit": "m/s^2"}, "9.8\\,\\mathrm{m/s^{2}}", 1.0),
        ({"answer": 9.81, "tolerance": 0.01, "unit": "m/s^2"}, "9.8", 1.0),
        ({"answer": 9.81, "tolerance": 0.01, "unit": "m/s^2"}, "9.8 km/s^2", 0.0),
        ({"answer": 5, "unit": "%"}, "5\\%", 1.0),
        ({"answer": 5, "unit": "\\%"}, "5 %", 1.0),
        ({"answer": 5, "unit": "m"}, "5 mm", 0.0),
        ({"answer": 5, "unit": "m"}, "5 km", 0.0),
        ({"answer": 5, "unit": "m"}, "\\frac{10}{2} m", 1.0),
        ({"answer": 5, "unit": "m"}, "\\frac{10}{2} mm", 0.0),
        ({"answer": 5, "unit": "m"}, "\\frac{10}{2}\\,\\text{kg}", 0.0),
        ({"answer": "42"}, "4" * 20_000, 0.0),
    ],
)
async def test_free_answers_are_compared_as_text_or_by_value(stem, data, given, reward):
    stem_task = task("stem", {"question": "?", **data})
    assert (await stem.eval(context(stem_task), evidence(answer=given))).reward == reward


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("\\boxed{1}, no: \\boxed{the mitochondria}", 1.0),
        ("Answer: glucose\nAnswer: **the mitochondria**", 1.0),
        ("\\boxed{glucose}\nAnswer: the mitochondria", 0.0),
        ("the mitochondria", 0.0),
        ("Answer: ", 0.0),
    ],
)
async def test_a_free_answer_is_in_the_last_box_or_the_last_line(stem, said, reward):
    assert (await stem.eval(context(task("stem", FREE)), evidence(said))).reward == reward


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        ({"answer": "x"}, "stem: data.question: a string was expected"),
        ({"question": "?"}, "data.answer: a string or a number"),
        ({**FREE, "answer": True}, "data.answer"),
        ({**FREE, "judge": "yes"}, "data.judge: true or false"),
        ({**FREE, "tolerance": 0.1}, "data.answer: a number, since there is a tolerance or a unit"),
        ({**FREE, "answer": "5 km", "unit": "km"}, "data.answer: a number"),
        ({**FREE, "answer": 5, "tolerance": -1}, "data.tolerance: a number above 0"),
        ({**FREE, "answer": 5, "unit": " "}, "data.unit: a string"),
        ({**FREE, "answer": 5, "judge": True, "unit": "m"}, "either a judge or a tolerance"),
        ({**FREE, "seed": 1}, "data.seed: nothing, since there are no choices"),
        ({**FREE, "hint": 1}, "data.hint: unknown field; there are answer, choices, judge"),
        ({**GASES, "choices": "AB"}, "data.choices: a list or an object of strings"),
        ({**GASES, "choices": ["one"]}, "data.choices: 2 to 26 choices"),
        ({**GASES, "choices": ["x"] * 27}, "data.choices: 2 to 26 choices"),
        ({**GASES, "choices": ["a", None]}, r"data.choices\['B'\]: a string or a number"),
        ({**GASES, "answer": "D"}, "data.answer: the letter, the index or the text of a choice"),
        ({**GASES, "answer": 3}, "data.answer: an index from 0 to 2"),
        ({**GASES, "answer": -1}, "data.answer: an index from 0 to 2"),
        ({**GASES, "answer": None}, "data.answer"),
        ({**GASES, "choices": ["B", "A"], "answer": "A"}, "data.answer: an index, since this is the letter of one"),
        ({**GASES, "choices": ["a", "b", "b"], "answer": 1}, "data.choices: a right choice that occurs only once"),
        ({**GASES, "seed": "x"}, "data.seed: a whole number"),
        ({**GASES, "seed": True}, "data.seed: a whole number"),
        ({**GASES, "judge": True}, "data.judge: nothing, since there are choices"),
        ({**GASES, "tolerance": 0.1}, "data.tolerance: nothing, since there are choices"),
        ({**GASES, "unit": "m"}, "data.unit: nothing, since there are choices"),
    ],
)
async def test_data_that_can_never_work_is_refused_with_the_field(data, wrong):
    with pytest.raises(TaskInvalid, match=wrong):
        StemEnvironment().check(task("stem", data))
