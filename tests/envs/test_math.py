import asyncio
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from rollyard.core.failure import EvalDeadline, TaskInvalid, VerifierCrashed
from rollyard.core.fair_slots import FairSlots
from rollyard.envs.children import WORKERS
from rollyard.envs.math.boxed import all_boxed, last_boxed
from rollyard.envs.math.environment import MathEnvironment
from rollyard.envs.math.judge import MathJudge

from .conftest import context, evidence, task
from .stage_resources import RUNTIMES, open_resources, rewards

DATA = {"question": "What is one half?", "answer": "\\frac{1}{2}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def math():
    environment = MathEnvironment()
    yield environment
    await environment.close()


pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize(
    ("known", "answer", "reward"),
    [
        ("\\frac{1}{2}", "So it is \\boxed{0.5}.", 1.0),
        ("\\frac{1}{2}", "First \\boxed{3}, no: \\boxed{\\dfrac{1}{2}}", 1.0),
        ("\\frac{1}{2}", "\\boxed{2}", 0.0),
        ("\\frac{1}{2}", "It is one half.", 0.0),
        ("\\frac{1}{2}", "\\boxed{\\frac{1}{", 0.0),
        ("\\frac{1}{2}", "\\boxed{}", 0.0),
        ("$x^2+2x+1$", "\\boxed{(x+1)^2}", 1.0),
        ("(1, 2)", "\\boxed{(1,2)}", 1.0),
        ("Paris", "\\boxed{Paris}", 1.0),
        ("Paris", "\\boxed{\\text{paris}}", 1.0),
        ("Paris", "$\\boxed{\\textbf{Paris}.}$", 1.0),
        ("Paris", "\\boxed{Pairs}", 0.0),
        ("Monday Morning", "\\boxed{Morning Monday}", 0.0),
        ("abc", "\\boxed{cab}", 1.0),
        ("\\text{Paris}", "\\boxed{Pairs}", 0.0),
        ("\\text{June 20}", "\\boxed{June 20}", 1.0),
        ("Yes", "\\boxed{Yes.}", 1.0),
        (".5", "\\boxed{5}", 0.0),
        ("18.90", "\\boxed{\\$18.90}", 1.0),
        ("1800", "It costs \\boxed{\\$1,800}.", 1.0),
        ("18", "\\boxed{\\$18 or \\$19}", 0.0),
        ("42", "\\boxed{" + "9" * 20_000 + "}", 0.0),
        # small numbers, and small differences of exact ones
        (r"1-\frac{1}{2025!}", r"\boxed{1-\frac{1}{2024!}}", 0.0),
        (r"\frac{1}{2^{100}}", r"\boxed{\frac{1}{2^{99}}}", 0.0),
        (r"1.6\times10^{-19}", r"\boxed{-9.1\times10^{-31}}", 0.0),
        ("0.0000001", r"\boxed{0.0000003}", 0.0),
        ("1/3", r"\boxed{0.333333}", 1.0),
        (r"10^{-5}", r"\boxed{0.00001}", 1.0),
        (r"\frac{\sqrt{3}}{3}", r"\boxed{\frac{1}{\sqrt{3}}}", 1.0),
        # letters in both cases
        (r"\frac{Mv}{M+m}", r"\boxed{\frac{mv}{M+m}}", 0.0),
        (r"\frac{Mv}{M+m}", r"\boxed{\frac{M v}{m+M}}", 1.0),
        (r"\frac{R}{r}", r"\boxed{1}", 0.0),
        ("1", r"\boxed{\frac{R}{r}}", 0.0),
        ("B", r"\boxed{b}", 1.0),
        # a letter at the end
        (r"\pi r^2 h", r"\boxed{\pi r^2}", 0.0),
        (r"\pi r^2", r"\boxed{\pi r^2 t}", 0.0),
        ("6t", r"\boxed{6}", 0.0),
        ("v = g t", r"\boxed{v = g}", 0.0),
        ("5 m", r"\boxed{5}", 1.0),
        ("5", r"\boxed{5 \text{ m}}", 1.0),
        (r"5\text{ s}", r"\boxed{t = 5 \text{ seconds}}", 1.0),
        ("10", r"\boxed{t = 10 s}", 1.0),
        ("2x", r"\boxed{2x \text{ cm}}", 1.0),
        (r"\pi r^2 h", r"\boxed{\pi r^2 h \text{ cubic units}}", 1.0),
        (r"6t\text{ m}", r"\boxed{6}", 0.0),
        ("a^2+2ab", r"\boxed{a^2+2}", 0.0),
        # zero
        ("0", r"\boxed{\sqrt{4+2\sqrt{3}}-\sqrt{3}-1}", 1.0),
        ("0", r"\boxed{e^{-200}}", 0.0),
        # percent
        ("12.5", r"\boxed{12.5\%}", 1.0),
        (r"12.5\%", r"\boxed{12.5}", 1.0),
        ("12", r"\boxed{12\%}", 1.0),
        ("12", r"\boxed{12 percent}", 1.0),
        (r"12\text{ percent}", r"\boxed{12}", 1.0),
        ("12", r"\boxed{12\text{percent}}", 1.0),
        ("0.125", r"\boxed{12.5\%}", 1.0),
        ("0.5", r"\boxed{5\%}", 0.0),
    ],
)
async def test_the_boxed_answer_is_compared_by_value(math, known, answer, reward):
    math_task = task("math", {**DATA, "answer": known})
    assert (await math.eval(context(math_task), evidence(answer))).reward == reward


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_the_oracle_scores_1_and_the_no_op_0(runtime):
    async with open_resources(runtime) as resources:
        for answer in ("\\frac{1}{2}", "Paris", "\\{1, 2\\}", "$x^2+2x+1$"):
            assert await rewards(resources, {"environment": "math", "data": {**DATA, "answer": answer}}) == (1.0, 0.0)


async def test_the_argument_of_finish_is_the_answer(math):
    score = await math.eval(context(task("math", DATA)), evidence("\\boxed{7}", answer="0.5"))
    assert score.reward == 1.0
    score = await math.eval(context(task("math", DATA)), evidence("\\boxed{7}", answer="It is \\boxed{1/2}"))
    assert score.reward == 1.0


async def test_a_missing_answer_has_the_metric_answered_0(math):
    score = await math.eval(context(task("math", DATA)), evidence("I do not know"))
    assert (score.reward, score.metrics) == (0.0, {"answered": 0.0})


async def test_questions_share_a_few_processes(math):
    eval_context = context(task("math", DATA))
    scores = await asyncio.gather(*(math.eval(eval_context, evidence("\\boxed{0.5}")) for _ in range(8)))
    assert [score.reward for score in scores] == [1.0] * 8
    assert 1 <= len(math._judge.children.idle) <= 2


async def test_the_plan_needs_no_sandbox_and_the_prompt_has_the_hint(math):
    plan = math.plan(task("math", DATA))
    assert not plan.needs_sandbox
    assert not plan.eval_needs_sandbox
    (message,) = (await math.init(context(task("math", DATA)))).messages
    assert message["content"].startswith("What is one half?")
    assert "\\boxed{}" in message["content"]
    start = await math.init(context(task("math", {**DATA, "system_prompt": "Be right."})))
    assert [m["content"] for m in start.messages] == ["Be right.", "What is one half?"]


def child(body: str) -> MathJudge:
    """A judge whose process reports that it is ready and then runs this code."""
    code = f"import socket, time; s = socket.socket(fileno=0); s.sendall(b'ok\\n'); s.recv(999); {body}"
    return MathJudge((sys.executable, "-c", code))


async def test_an_answer_that_hangs_the_verifier_is_the_policys_fault_and_the_process_is_killed():
    judge = child("time.sleep(600)")
    judge.answer_s = 0.2
    with pytest.raises(EvalDeadline, match=r"did not decide within 0\.2 s"):
        await judge.is_same("1", "2")
    assert judge.children.idle == []


async def test_waiting_for_other_answers_is_not_the_policys_fault():
    """As a deadline, it would give 0 to an answer that was never compared."""
    judge = child("time.sleep(600)")
    slow = [asyncio.create_task(judge.is_same("1", "2")) for _ in range(WORKERS)]
    await asyncio.sleep(0)
    with pytest.raises(VerifierCrashed, match=r"free within 0\.1 s"):
        await judge.is_same("1", "2", wait_s=0.1)
    for task_ in slow:
        task_.cancel()
    await asyncio.wait(slow)


async def test_a_verifier_that_dies_gives_no_score():
    with pytest.raises(VerifierCrashed, match="died"):
        await child("s.close()").is_same("1", "2")


async def test_a_verifier_that_returns_nonsense_gives_no_score():
    with pytest.raises(VerifierCrashed, match="died"):
        await child("s.sendall(b'what?\\n'); time.sleep(600)").is_same("1", "2")


async def test_an_exception_in_a_verifier_is_reported_and_the_process_is_reused():
    judge = child(
        's.sendall(b\'{"error": "ValueError: no"}\\n\'); s.recv(999); s.sendall(b\'{"same": true}\\n\'); s.recv(9)'
    )
    with pytest.raises(VerifierCrashed, match="ValueError: no"):
        await judge.is_same("1", "2")
    assert await judge.is_same("1", "2")
    await judge.close()


async def test_a_verifier_that_cannot_start_gives_no_score():
    with pytest.raises(VerifierCrashed, match="did not start"):
        await MathJudge((sys.executable, "-c", "raise SystemExit(1)")).is_same("1", "2")


async def test_a_cancelled_question_leaves_no_process():
    judge = child("time.sleep(600)")
    asked = asyncio.create_task(judge.is_same("1", "2"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asked), 0.5)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert judge.children.idle == []
    assert "600" not in children()


async def test_the_owners_of_questions_take_turns():
    order: list[str] = []

    async def ask(owner: str) -> None:
        await judge.is_same("1", "2", owner=owner)
        order.append(owner)

    judge = child("s.sendall(b'{}\\n'); [s.sendall(b'{}\\n') for _ in iter(lambda: s.recv(999), b'')]")
    judge.children._slots = FairSlots(1)
    await asyncio.gather(*[ask("many") for _ in range(6)], ask("one"))
    await judge.close()
    assert order.index("one") == 2, order


async def test_a_cancelled_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch):
    connecting = asyncio.Event()

    async def never_connected(**_: object) -> None:
        connecting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", never_connected)
    asked = asyncio.create_task(child("time.sleep(601)").is_same("1", "2"))
    await connecting.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert "601" not in children()


def children() -> str:
    """The command lines of all child processes of this process, including zombies."""
    ids = [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    return " ".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in ids)


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        ({"question": "?"}, "math: data.answer: a string was expected"),
        ({"answer": "1"}, "data.question"),
        ({**DATA, "answer": 42}, "data.answer"),
        ({**DATA, "hint": "x"}, "data.hint: unknown field; there are answer, question, system_prompt"),
    ],
)
async def test_data_that_can_never_work_is_refused_with_the_field(data, wrong):
    with pytest.raises(TaskInvalid, match=wrong):
        MathEnvironment().check(task("math", data))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{a{b}c} \\boxed{d", "a{b}c"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("boxed{x}", None),
        ("", None),
    ],
)
async def test_the_last_box_with_matching_braces_counts(text, expected):
    assert last_boxed(text) == expected


async def test_unclosed_boxes_are_scanned_once():
    """A model in a loop writes thousands of them; scanning from each to the end would block the event loop."""
    assert last_boxed("\\boxed{" * 200_000) is None
    assert last_boxed("\\boxed{7}" + "\\boxed{" * 200_000) == "7"
    assert all_boxed("\\boxed{" * 200_000 + "7" + "}" * 200_000) == ["7"]


@pytest.mark.parametrize(
    ("known", "answer", "is_same"),
    [
        ("9.81", "9.8", True),
        ("9.81", "9.5", False),
        ("1.571", "\\pi/2", True),
        ("5", "x = 5.01", True),
        ("5", "-5", False),
        ("5", "x", False),
        ("5", "5, 6", False),
        ("5", "5i", False),
        ("5", "\\infty", False),
        ("5", "\\frac{1}{0}", False),
    ],
)
async def test_with_a_tolerance_numbers_are_compared_by_value(math, known, answer, is_same):
    assert await math._judge.is_same(known, answer, tolerance=0.01) == is_same
