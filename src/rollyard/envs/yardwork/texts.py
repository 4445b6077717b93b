"""Families that create one file from others or compare two: sort, join, compare."""

from __future__ import annotations

from rollyard.envs.yardwork.draw import SeededDraw
from rollyard.envs.yardwork.puzzle import File, Scene, SolutionStep, changed, family, lines_of, text_file


def sort_unique(draw: SeededDraw, level: int, rule: str) -> Scene:
    """The words of the files that a note lists, each once, in ascending or (`down`) descending order."""
    ending, out = draw.ending(), draw.word()
    note = f"{draw.word()}.csv"
    names = draw.names(1 + level, ending)
    words = draw.words(3 + level)
    files: dict[str, File | None] = {
        name: text_file(draw.shuffled([*draw.shuffled(words)[: 2 + level], draw.pick(words)])) for name in names
    }
    chosen = sorted(draw.shuffled(names)[: (level + 2) // 2])
    files[note] = text_file(chosen)
    unique_lines = sorted({line for name in chosen for line in lines_of(files, name)}, reverse=rule == "down")
    flag = "-u" if rule == "up" else "-ru"
    steps = [
        SolutionStep(f"cat {note}", "Read the note."),
        SolutionStep(f"sort {flag} {' '.join(chosen)} > {out}.{ending}", "Sort."),
    ]
    slots = {"note": note, "out": f"{out}.{ending}"}
    return Scene(files, slots, steps, after=changed(files, f"{out}.{ending}", unique_lines))


def merge(draw: SeededDraw, level: int, rule: str) -> Scene:
    """Files concatenated in a note's order, or (`back`) in reverse order."""
    ending, out = draw.ending(), draw.word()
    note = f"{draw.word()}.csv"
    names = draw.names(2 + level, ending)
    order = draw.shuffled(names)[: 1 + level]
    files: dict[str, File | None] = {name: text_file(draw.lines(draw.count(1, 3))) for name in names}
    files[note] = text_file(order)
    asked = order if rule == "forth" else order[::-1]
    joined = [line for name in asked for line in lines_of(files, name)]
    steps = [
        SolutionStep(f"cat {note}", "Read the order."),
        SolutionStep(f"cat {' '.join(asked)} > {out}.{ending}", "Join them."),
    ]
    slots = {"note": note, "out": f"{out}.{ending}"}
    return Scene(files, slots, steps, after=changed(files, f"{out}.{ending}", joined))


def compare(draw: SeededDraw, level: int, rule: str) -> Scene:
    """Two lists in different order. `more`: the word that only the longer has. `both`: the only word in both."""
    ending = draw.ending()
    first, second = draw.names(2, ending)
    words = draw.words(3 + 2 * level)
    odd = draw.word()
    if rule == "more":
        short, long = draw.shuffled(words), draw.shuffled([*words, odd])
        is_first_long = draw.below(2) == 1
        files: dict[str, File | None] = {
            first: text_file(long if is_first_long else short),
            second: text_file(short if is_first_long else long),
        }
        slim, full = (second, first) if is_first_long else (first, second)
        look = SolutionStep(f"wc -l {first} {second}", "Which is longer?")
        steps = [
            SolutionStep("ls", "Look around."),
            look,
            SolutionStep(f"grep -v -f {slim} {full}", f"{full} has one more."),
        ]
    else:
        half = len(words) // 2
        files = {
            first: text_file(draw.shuffled([*words[:half], odd])),
            second: text_file(draw.shuffled([*words[half:], odd])),
        }
        steps = [SolutionStep("ls", "Look around."), SolutionStep(f"grep -f {first} {second}", "Which is in both?")]
    for name in draw.names(level // 2, "csv"):
        files[name] = text_file(draw.lines(2))
    return Scene(files, {"ending": ending}, steps, answer=odd)


TEXTS = (
    family(
        "sort_unique",
        sort_unique,
        [
            ("up", "{note} names files. Write their lines, sorted and each only once, to {out}."),
            ("up", "Sort the lines of the files listed in {note}, without repeats, into {out}."),
            ("up", "Make {out}: all different lines of the files named in {note}, in alphabetical order."),
        ],
        [
            ("up", "Collect what the files in {note} say into {out}, from a to z and without doubles."),
            ("down", "{note} names files. Write their different lines to {out} in reverse order, z first."),
        ],
    ),
    family(
        "merge",
        merge,
        [
            ("forth", "Join the files listed in {note}, in that order, into {out}."),
            ("forth", "{note} gives an order of files. Write their contents one after another to {out}."),
            ("forth", "Concatenate the files that {note} names, first to last, into {out}."),
        ],
        [
            ("forth", "{out} should hold the text of every file in {note}, keeping the order there."),
            ("back", "Join the files listed in {note} into {out}, the last one first."),
        ],
    ),
    family(
        "compare",
        compare,
        [
            ("more", "Two .{ending} files hold the same words, but one has an extra word. Which word?"),
            ("more", "One .{ending} file has a line that the other lacks. What does it say?"),
            ("more", "Compare the two .{ending} files: which word is in only one of them?"),
        ],
        [
            ("more", "A word was added to one of the two lists that end in .{ending}. Find it."),
            ("both", "Which word do the two .{ending} files have in common?"),
        ],
    ),
)
