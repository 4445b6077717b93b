"""Families of shell scripts with one error: a number, a path, or the library that they load.

They work with any `sh`. A repair is scored by the script's text; the script is never run.
"""

from __future__ import annotations

from rollyard.envs.yardwork.draw import SeededDraw
from rollyard.envs.yardwork.puzzle import File, Scene, SolutionStep, changed, family, lines_of, text_file


def _with_fix(files: dict[str, File | None], script: str, wrong: str, right: str) -> dict[str, File | None]:
    return changed(files, script, [line.replace(wrong, right) for line in lines_of(files, script)])


def fix_constant(draw: SeededDraw, level: int, rule: str) -> Scene:
    """The right number is in a table with others. `any`: the instruction does not name the wrong variable."""
    script, table = f"{draw.word()}.sh", f"{draw.word()}.csv"
    variable = draw.variable()
    wrong, right, factor, *others = draw.numbers(3 + level)
    rows = draw.shuffled([f"{variable},{right}", *(f"{draw.word()},{number}" for number in others)])
    files: dict[str, File | None] = {table: text_file(rows)}
    filler = [f"echo {line}" for line in draw.lines(level - 1)]
    files[script] = text_file([f"{variable}={wrong}", *filler, f"echo $(({variable} * {factor}))"])
    steps = [
        SolutionStep(f"cat {script}", "Read the script."),
        SolutionStep(f"grep {variable} {table}", f"What should {variable} be?"),
        SolutionStep(f"sed -i s/{variable}={wrong}/{variable}={right}/ {script}", f"It should be {right}."),
    ]
    if rule == "any":
        steps[1] = SolutionStep(f"cat {table}", "Read the table.")
    slots = {"script": script, "table": table, "variable": variable}
    return Scene(files, slots, steps, after=_with_fix(files, script, f"={wrong}", f"={right}"))


def fix_path(draw: SeededDraw, level: int, rule: str) -> Scene:
    """The script reads a file that has another name (`name`) or is in another folder (`folder`)."""
    script, ending = f"{draw.word()}.sh", draw.ending()
    folder, elsewhere, stem, old = draw.words(4)
    right = f"{folder}/{stem}.{ending}"
    wrong = f"{folder}/{stem}.csv" if rule == "name" else f"{elsewhere}/{stem}.{ending}"
    files: dict[str, File | None] = {right: text_file(draw.lines(2))}
    for name in draw.names(level, ending, [folder]):
        files[name] = text_file(draw.lines(1))
    if rule == "folder":
        files[f"{elsewhere}/{old}.{ending}"] = text_file(draw.lines(1))
    files[script] = text_file([*(f"echo {line}" for line in draw.lines(level)), f"cat {wrong}"])
    look = (
        SolutionStep(f"ls {folder}", "What is there?")
        if rule == "name"
        else SolutionStep(f"find . -name {stem}.{ending}", "Where is it?")
    )
    steps = [
        SolutionStep(f"sh {script}", "Run it."),
        look,
        SolutionStep(f"sed -i s,{wrong},{right}, {script}", f"It is {right}."),
    ]
    return Scene(files, {"script": script}, steps, after=_with_fix(files, script, wrong, right))


def fix_source(draw: SeededDraw, level: int, rule: str) -> Scene:
    """The script loads a library that lacks a function; another library has it."""
    script, name, wrong = draw.words(3)
    libraries = draw.words(1 + level)
    right = draw.pick(libraries)
    files: dict[str, File | None] = {}
    for library in libraries:
        function = name if library == right else draw.word()
        files[f"{library}.sh"] = text_file([f"{function}() {{ echo {draw.filler()}; }}"])
    files[f"{wrong}.sh"] = text_file([f"{draw.word()}() {{ echo {draw.filler()}; }}"])
    files[f"{script}.sh"] = text_file([f". ./{wrong}.sh", name])
    steps = [
        SolutionStep(f"cat {script}.sh", "Read the script."),
        SolutionStep(f"grep -l '{name}()' *.sh", f"Who defines {name}?"),
        SolutionStep(f"sed -i s/{wrong}/{right}/ {script}.sh", f"{right}.sh does."),
    ]
    if rule == "run":
        steps.insert(1, SolutionStep(f"sh {script}.sh", "Run it."))
    return Scene(files, {"script": f"{script}.sh"}, steps, after=_with_fix(files, f"{script}.sh", wrong, right))


SCRIPTS = (
    family(
        "fix_constant",
        fix_constant,
        [
            ("", "{script} has the wrong value of {variable}. Correct it from {table}; change nothing else."),
            ("", "Set {variable} in {script} to its value in {table}."),
            ("", "The number for {variable} in {script} is out of date; {table} has the right one. Fix the script."),
        ],
        [
            ("", "Bring {variable} in {script} in line with {table}, by editing only that number."),
            ("any", "One number in {script} disagrees with {table}. Make the script agree."),
        ],
    ),
    family(
        "fix_path",
        fix_path,
        [
            ("name", "{script} fails because it reads a file that is not there. Correct the path in it."),
            ("name", "Run sh {script}, see which file it misses, and repair the file name in the script."),
            ("name", "The last line of {script} names a file with the wrong ending. Fix the script."),
        ],
        [
            ("name", "{script} cannot find its input. Mend that line of the script; leave all other files alone."),
            ("folder", "{script} looks for its input in the wrong folder. Repair the script and nothing else."),
        ],
    ),
    family(
        "fix_source",
        fix_source,
        [
            ("", "{script} loads the wrong library. Make it load the .sh file that defines its function."),
            ("", "The first line of {script} should load the file that has the function it calls. Fix it."),
            ("", "{script} calls a function that is in another .sh file than the one it loads. Correct that name."),
        ],
        [
            ("", "Change which file {script} includes, so that the function it uses exists."),
            ("run", "sh {script} says that something is not found. Repair its first line only."),
        ],
    ),
)
