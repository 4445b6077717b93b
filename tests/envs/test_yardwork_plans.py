"""Yardwork's tasks without a sandbox: reproducible, disjoint by split, and solvable from what the agent has seen."""

import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollyard.envs.yardwork import FAMILIES, Puzzle, YardworkEnvironment, demonstration, make
from rollyard.envs.yardwork.judging import is_answer, pack, share_right, unpacked
from rollyard.envs.yardwork.puzzle import LEVELS, File, whole
from rollyard.envs.yardwork.words import POOLS, SPLITS, Split, is_held_out

pytestmark = pytest.mark.slow

WORDS = 60
LINES = 16
"""The limits of an instruction and of an output."""


def data_of(family: str, template: str, level: int, seed: int, split: Split) -> dict[str, Any]:
    return {"family": family, "template": template, "level": level, "seed": seed, "split": split}


def every(split: Split, seeds: Iterable[int], levels: Iterable[int] = LEVELS) -> list[dict[str, Any]]:
    """Tasks of each family, rule and level, with one template per rule: its templates have the same scene."""
    return [
        data_of(family.name, template.name, level, seed, split)
        for family in FAMILIES.values()
        for template in {template.rule: template for template in family.templates[split][::-1]}.values()
        for level in levels
        for seed in seeds
    ]


def instructions_of(data: dict[str, Any]) -> list[str]:
    """The instructions of all templates of the task's rule."""
    templates = FAMILIES[data["family"]].templates[data["split"]]
    (rule,) = (template.rule for template in templates if template.name == data["template"])
    slots = make(data).scene.slots
    return [template.text.format(**slots) for template in templates if template.rule == rule]


def generated(**options: str) -> list[dict[str, Any]]:
    bodies: list[Any] = list(YardworkEnvironment().generate(options))
    return [body["data"] for body in bodies]


def in_words(puzzle: Puzzle) -> str:
    """All text that an agent can see."""
    return "\n".join([puzzle.instruction, *(f"{path}\n{file.text if file else ''}" for path, file in tree_of(puzzle))])


def tree_of(puzzle: Puzzle) -> list[tuple[str, File | None]]:
    return list(whole(puzzle.scene.files).items())


def carried_out(puzzle: Puzzle, folder: Path) -> tuple[list[str], dict[str, File | None] | None]:
    """Runs the solution's commands in this machine's sh. Returns the output of each, and the files after."""
    work, archive = folder / "work", folder / "files.tar"
    work.mkdir(parents=True)
    pack(puzzle.scene.files, archive)
    with tarfile.open(archive) as packed:
        packed.extraction_filter = lambda member, _: member  # newer Pythons would remove modes that they find unsafe
        packed.extractall(work)
    script = "".join(f"{step.command}\nprintf '\\000'\n" for step in puzzle.scene.steps)
    completed = subprocess.run(
        ["sh"], input=script, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    with tarfile.open(archive, "w") as packed:
        for path in sorted(work.rglob("*")):
            packed.add(path, str(path.relative_to(work)), recursive=False)
    return completed.stdout.split("\0")[:-1], unpacked(archive)


def facts(text: str, split: Split) -> list[str]:
    """The parts of a command that must have been seen: the pool's words, and numbers of several digits."""
    pool = POOLS[split]
    known = {*pool.words, *pool.columns, *pool.endings, *pool.variables}
    return [token for token in re.findall(r"[A-Za-z]+|\d+", text) if token in known or re.fullmatch(r"\d\d+", token)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_solution_uses_only_what_it_has_seen(family: str, split: Split, tmp_path: Path):
    for number, data in enumerate(d for d in every(split, seeds=[11]) if d["family"] == family):
        puzzle = make(data)
        scene = puzzle.scene
        outputs, files = carried_out(puzzle, tmp_path / str(number))
        assert len(outputs) == len(scene.steps) <= 6, data
        observed, looked = puzzle.instruction, ""
        for step, output in zip(scene.steps, outputs, strict=True):
            unseen = [fact for fact in facts(f"{step.text} {step.command}", split) if fact not in observed]
            assert not unseen, (data, step, "it has not been seen")
            looked += " ".join(fact for fact in facts(step.command, split) if fact not in puzzle.instruction)
            assert output.count("\n") <= LINES, (data, step, output)
            observed += f"\n{output}"
        if scene.answer is not None:
            assert scene.answer in re.findall(r"[\w./]+", outputs[-1].replace("./", "")), (data, outputs)
        else:
            assert looked, (data, "the instruction contains everything: no exploration is needed")
            assert files is not None and scene.after is not None
            assert share_right(scene.after, files, checks_modes=scene.checks_modes) == 1.0, (data, files)


def test_no_task_is_solved_initially_or_by_its_instruction():
    for split in SPLITS:
        for data in every(split, seeds=range(5)):
            puzzle = make(data)
            scene = puzzle.scene
            assert (scene.answer is None) != (scene.after is None), data
            if scene.answer is not None:
                assert not [text for text in instructions_of(data) if scene.answer in re.findall(r"[\w./]+", text)], (
                    data
                )
                assert not is_answer(scene.answer, "")
            if scene.after is not None:
                assert share_right(scene.after, whole(scene.files), checks_modes=scene.checks_modes) < 1.0, data


def test_instructions_commands_and_files_are_short():
    for split in SPLITS:
        for data in every(split, seeds=range(3)):
            puzzle = make(data)
            assert not [text for text in instructions_of(data) if len(text.split()) >= WORDS], data
            assert all(len(step.command) <= 120 for step in puzzle.scene.steps), data
            assert sum(len(file.text) for _, file in tree_of(puzzle) if file) < 4000, data


def test_a_higher_level_is_more_work():
    def size(level: int) -> float:
        puzzles = [make(data) for data in every("train", seeds=range(3), levels=[level])]
        return sum(len(in_words(puzzle)) + 40 * len(puzzle.scene.steps) for puzzle in puzzles) / len(puzzles)

    sizes = [size(level) for level in LEVELS]
    assert sizes == sorted(sizes) and sizes[-1] > 2 * sizes[0]


def test_the_same_data_give_the_same_task_in_every_process():
    """The digest covers this version's tasks: a change of it means that the same data give other tasks."""
    code = (
        "import hashlib; from rollyard.envs.yardwork import YardworkEnvironment, make\n"
        "bodies = YardworkEnvironment().generate({'count': '230', 'seed': '5', 'split': 'SPLIT'})\n"
        "text = repr([(make(b['data']).instruction, list(make(b['data']).scene.files.items())) for b in bodies])\n"
        "print(hashlib.sha256(text.encode()).hexdigest()[:16])"
    )
    digests = {
        split: {
            subprocess.run(
                [sys.executable, "-c", code.replace("SPLIT", split)],
                env={"PYTHONHASHSEED": hash_seed, "LC_ALL": "C"},
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for hash_seed in ("1", "2")
        }
        for split in SPLITS
    }
    assert digests == {"train": {"f64ba64548699bdd"}, "held_out": {"8aa8840535255444"}}


def test_a_seed_gives_thousands_of_different_tasks():
    for split in SPLITS:
        tasks = generated(count="5000", seed="1", split=split)
        assert len({str(data) for data in tasks}) == 5000
        assert len({in_words(make(data)) for data in tasks}) == 5000
        assert {data["family"] for data in tasks} == set(FAMILIES)
        assert {data["level"] for data in tasks} == set(LEVELS)
        many = generated(count="30000", seed="1", split=split)
        assert {(data["family"], data["template"]) for data in many} == {
            (family.name, template.name) for family in FAMILIES.values() for template in family.templates[split]
        }
    easy = generated(count="5000", seed="1", levels="1")
    assert len({in_words(make(data)) for data in easy}) == 5000


def test_two_seeds_have_no_task_in_common():
    one, two = ({str(data) for data in generated(count="2000", seed=seed)} for seed in ("1", "2"))
    assert not one & two


def test_the_pools_are_disjoint_and_no_word_is_part_of_another():
    train, held_out = POOLS["train"], POOLS["held_out"]
    for name in ("words", "columns", "endings", "variables"):
        train_values, held_out_values = getattr(train, name), getattr(held_out, name)
        assert len(set(train_values)) == len(train_values) and len(set(held_out_values)) == len(held_out_values)
        assert not set(train_values) & set(held_out_values)
    words = [*train.words, *held_out.words]
    assert not [(one, other) for one in words for other in words if one != other and one in other]
    template_text = " ".join(
        template.text for family in FAMILIES.values() for split in SPLITS for template in family.templates[split]
    )
    assert not set(re.findall(r"\w+", template_text.lower())) & set(words)


def test_the_splits_share_no_template_no_word_no_number_and_no_instruction():
    texts: dict[Split, set[str]] = {
        split: {template.text for family in FAMILIES.values() for template in family.templates[split]}
        for split in SPLITS
    }
    names = {
        split: {
            f"{family.name}.{template.name}" for family in FAMILIES.values() for template in family.templates[split]
        }
        for split in SPLITS
    }
    assert not texts["train"] & texts["held_out"] and not names["train"] & names["held_out"]
    assert sum(map(len, texts.values())) == sum(map(len, names.values())), "each wording occurs once"
    instructions: dict[Split, set[str]] = {split: set() for split in SPLITS}
    for split, other in (SPLITS, SPLITS[::-1]):
        pool = POOLS[other]
        foreign = {*pool.words, *pool.columns, *pool.endings, *pool.variables}
        for data in generated(count="2000", seed="3", split=split):
            puzzle = make(data)
            text = in_words(puzzle)
            assert not foreign & set(re.findall(r"[A-Za-z]+", text)), data
            numbers = re.findall(r"\d+", text.removeprefix(puzzle.instruction))
            assert all(is_held_out(int(number)) == (split == "held_out") for number in numbers), data
            instructions[split].add(puzzle.instruction)
    assert not instructions["train"] & instructions["held_out"]


def test_some_rules_are_never_trained():
    for family in FAMILIES.values():
        trained = {template.rule for template in family.templates["train"]}
        assert {template.rule for template in family.templates["held_out"]} - trained, family.name
        assert len(family.templates["train"]) >= 3 and len(family.templates["held_out"]) >= 2


def test_a_demonstration_is_the_solution_and_ends_with_finish():
    turns = demonstration(data_of("chain", "t0", 2, 7, "train"))
    assert [turn.tool for turn in turns] == ["shell"] * 3 + ["finish"]
    commands = [str(turn.arguments["command"]) for turn in turns[:-1]]
    assert all(command.startswith("cat ") for command in commands)
    assert turns[-1].arguments == {"answer": make(data_of("chain", "t0", 2, 7, "train")).scene.answer}
    assert demonstration(data_of("tree", "t0", 1, 7, "train"))[-1].arguments == {}


def test_files_are_compared_exactly():
    expected = {"a.txt": File("one\ntwo\n"), "b/c.sh": File("x\n", 0o755), "d": None}
    right = whole(expected)

    def share(**changes: File | None) -> float:
        return share_right(expected, {**right, **changes}, checks_modes=False)

    assert share() == share(**{"a.txt": File("one\ntwo")}) == share(**{"b/c.sh": File("x\n")}) == 1.0
    assert share(**{"a.txt": File("one\n\ntwo\n")}) == 0.75
    assert share(**{"a.txt": File(" one\ntwo\n")}) < 1.0
    assert share(extra=None) == 0.8
    assert share(d=File("")) < 1.0 and share(**{"a.txt": None}) < 1.0
    assert share_right(expected, {**right, "b/c.sh": File("x\n")}, checks_modes=True) < 1.0
    assert share_right(expected, {}, checks_modes=False) == 0.0
    group_only = replace(File("x\n"), mode=0o654)
    assert share_right(expected, {**right, "b/c.sh": group_only}, checks_modes=True) < 1.0


def test_answers_are_compared_exactly_except_for_white_space():
    assert is_answer("a/b.txt", " ./a/b.txt\n") and is_answer("7", "7")
    assert not any(is_answer("7", answer) for answer in ("", "07", "7.", "6 7", "7 7", "It is 7", "<7>"))


def test_the_how_to_page_lists_every_family_and_its_example_runs(capsys: pytest.CaptureFixture[str]):
    page = (Path(__file__).parent.parent.parent / "docs" / "how-to" / "yardwork.md").read_text()
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in page.splitlines() if line.startswith("| `")]
    listed = [row for row in rows if row and row[0] in FAMILIES]
    assert sorted(name for row in listed for name in row) == sorted(FAMILIES)
    answered = {name for name in FAMILIES if make(data_of(name, "t0", 1, 0, "train")).scene.answer is not None}
    assert answered == {name for row in listed[:3] for name in row}, "as the page states for its first three rows"
    *_, code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(code, "yardwork.md", "exec"), {})
    assert " finish " in capsys.readouterr().out.splitlines()[-1]
