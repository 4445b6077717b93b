"""Families whose answer is a count: lines, lines with a word, files."""

from __future__ import annotations

from rollyard.envs.yardwork.draw import SeededDraw
from rollyard.envs.yardwork.puzzle import File, Scene, SolutionStep, family, text_file


def count_lines(draw: SeededDraw, level: int, rule: str) -> Scene:
    """Lines of one file with the ending at first, of all such files at higher levels. `below`: also in folders."""
    ending, other = draw.ending(), "csv"
    folders = sorted(draw.words(2)) if rule == "below" else []
    names = draw.names(level if level > 1 or not folders else 2, ending, folders)
    files: dict[str, File | None] = {name: text_file(draw.lines(draw.count(2, 9 + level))) for name in names}
    for name in draw.names(1 + level // 2, other, folders[:1]):
        files[name] = text_file(draw.lines(draw.count(2, 9)))
    total = sum(file.text.count("\n") for name, file in files.items() if file and name in names)
    look = SolutionStep("ls *" if folders else "ls", "Look around.")
    if len(names) == 1:
        return Scene(files, {"ending": ending}, [look, SolutionStep(f"wc -l {names[0]}", "Count.")], answer=str(total))
    where = f"{'*/' if folders else ''}*.{ending}"
    return Scene(
        files, {"ending": ending}, [look, SolutionStep(f"cat {where} | wc -l", "Count them all.")], answer=str(total)
    )


def count_matches(draw: SeededDraw, level: int, rule: str) -> Scene:
    """Lines with the word, or (`without`) without it. The word is in a note."""
    word, ending = draw.word(), draw.ending()
    note, *names = [f"{stem}.{ending}" for stem in draw.words(1 + (level + 1) // 2)]
    names.sort()
    files: dict[str, File | None] = {note: text_file([word])}
    total = 0
    for name in names:
        size = draw.count(5, 8 + level)
        hits = draw.count(2, size - 2)
        files[name] = text_file(draw.lines(size, [word] * hits))
        total += hits if rule == "with" else size - hits
    flag = "-c" if rule == "with" else "-vc"
    what = f"grep {flag} {word} {names[0]}" if len(names) == 1 else f"cat {' '.join(names)} | grep {flag} {word}"
    steps = [SolutionStep(f"cat {note}", "Read the word."), SolutionStep(what, f"The word is {word}.")]
    slots = {"note": note, "names": " and ".join(names) if len(names) < 3 else ", ".join(names)}
    return Scene(files, slots, steps, answer=str(total))


def count_files(draw: SeededDraw, level: int, rule: str) -> Scene:
    """Files by ending, or (`named`) by a word in their names."""
    ending, word = draw.ending(), draw.word()
    folders = sorted(draw.words(level)) if level >= 2 else []
    hits, others = draw.count(2, 4 + 2 * level), draw.count(2, 2 + level)
    if rule == "named":
        stems = draw.words(hits)
        matching_names = [f"{word}_{stem}.{ending}" if draw.below(2) else f"{stem}_{word}.{ending}" for stem in stems]
        matching_names = [
            f"{folders[index % len(folders)]}/{name}" if folders else name for index, name in enumerate(matching_names)
        ]
        other_names = draw.names(others, ending, folders)
    else:
        matching_names, other_names = draw.names(hits, ending, folders), draw.names(others, "csv", folders)
    files: dict[str, File | None] = {name: text_file(draw.lines(1)) for name in [*matching_names, *other_names]}
    pattern = f"'*{word}*'" if rule == "named" else f"'*.{ending}'"
    steps = [SolutionStep("ls", "Look around."), SolutionStep(f"find . -name {pattern} | wc -l", "Count them.")]
    return Scene(files, {"ending": ending, "word": word}, steps, answer=str(hits))


COUNTING = (
    family(
        "count_lines",
        count_lines,
        [
            ("", "How many lines do the .{ending} files have in all? There may be only one."),
            ("", "Count the lines of every .{ending} file here and answer with the total."),
            ("", "What is the number of lines in all .{ending} files together?"),
        ],
        [
            ("", "Taken together, how long are the files ending in .{ending}, in lines?"),
            ("below", "Each folder has .{ending} files. How many lines are in them all?"),
        ],
    ),
    family(
        "count_matches",
        count_matches,
        [
            ("with", "{note} holds a word. How many lines of {names} contain it?"),
            ("with", "Read the word in {note}, then count the lines with it in {names}."),
            ("with", "In {names}, how many lines have the word from {note}?"),
        ],
        [
            ("with", "Look up the word in {note}. On how many lines does it occur in {names}?"),
            ("without", "{note} holds a word. How many lines of {names} do not contain it?"),
        ],
    ),
    family(
        "count_files",
        count_files,
        [
            ("ending", "How many .{ending} files are there, in folders too?"),
            ("ending", "Count all files ending in .{ending}, here and in any folder."),
            ("ending", "Give the number of .{ending} files here and below."),
        ],
        [
            ("ending", "Including what lies in folders, how often does a file end in .{ending}?"),
            ("named", "How many files, here or in folders, have {word} in their name?"),
        ],
    ),
)
