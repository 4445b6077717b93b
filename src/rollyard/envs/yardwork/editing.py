"""Families that change one file's text: replace a word, delete lines, complete an index."""

from __future__ import annotations

from rollyard.envs.yardwork.draw import SeededDraw
from rollyard.envs.yardwork.puzzle import File, Scene, SolutionStep, changed, family, lines_of, text_file


def replace_word(draw: SeededDraw, level: int, rule: str) -> Scene:
    """The new word is in a note, with `pair` also the old one. From level 2 on the file has to be found."""
    old, new, ending = draw.word(), draw.word(), draw.ending()
    note = f"{draw.word()}.csv"
    names = draw.names(1 if level < 2 else level, ending)
    target = draw.pick(names)
    files: dict[str, File | None] = {name: text_file(draw.lines(2 + level)) for name in names}
    files[target] = text_file(draw.lines(3 + level, [old] * draw.count(1, level)))
    files[note] = text_file([f"{old},{new}" if rule == "pair" else new])
    after = changed(files, target, [line.replace(old, new) for line in lines_of(files, target)])
    steps = [
        SolutionStep(f"cat {note}", "Read the note."),
        SolutionStep(f"grep -l {old} *.{ending}", f"The new word is {new}. Where is {old}?"),
        SolutionStep(f"sed -i s/{old}/{new}/g {target}", f"It is in {target}."),
    ]
    return Scene(files, {"old": old, "note": note, "ending": ending}, steps, after=after)


def delete_lines(draw: SeededDraw, level: int, rule: str) -> Scene:
    """Lines with the word of a note are deleted, or (`keep`) all other lines."""
    word, ending = draw.word(), draw.ending()
    note, *names = [f"{stem}.{ending}" for stem in draw.words(2 + level // 2)]
    target = names[0]
    files: dict[str, File | None] = {note: text_file([word])}
    for name in names:
        files[name] = text_file(draw.lines(4 + level, [word] * draw.count(1, 1 + level)))
    rows = lines_of(files, target)
    remaining = [line for line in rows if (word in line) == (rule == "keep")]
    edit = f"/{word}/d" if rule == "delete" else f"/{word}/!d"
    steps = [
        SolutionStep(f"cat {note}", "Read the word."),
        SolutionStep(f"grep {word} {target}", f"The word is {word}."),
        SolutionStep(f"sed -i '{edit}' {target}", "Edit the file."),
    ]
    return Scene(files, {"note": note, "target": target}, steps, after=changed(files, target, remaining))


def complete_index(draw: SeededDraw, level: int, rule: str) -> Scene:
    """An index lacks one of the files. `end`: it must be added as the last line; `top`: as the first."""
    ending, index = draw.ending(), f"{draw.word()}.csv"
    names = draw.names(1 + level, ending)
    missing = draw.pick(names)
    listed = draw.shuffled(name for name in names if name != missing)
    files: dict[str, File | None] = {name: text_file(draw.lines(1)) for name in names}
    files[index] = text_file(listed)
    if rule == "end":
        after, edit = changed(files, index, [*listed, missing]), f"echo {missing} >> {index}"
    else:
        after = changed(files, index, [missing, *listed])
        edit = f"sed -i '1s/^/{missing}\\n/' {index}"
    steps = [
        SolutionStep("ls", "Look around."),
        SolutionStep(f"cat {index}", "Read the list."),
        SolutionStep(edit, f"{missing} is missing."),
    ]
    return Scene(files, {"index": index, "ending": ending}, steps, after=after)


EDITING = (
    family(
        "replace_word",
        replace_word,
        [
            ("new", "One .{ending} file contains {old}. Replace {old} there by the word that is in {note}."),
            ("new", "Change every {old} in the .{ending} files to the word written in {note}."),
            ("new", "{note} holds a word. Put it in place of {old} in the .{ending} files."),
        ],
        [
            ("new", "Wherever a .{ending} file says {old}, it should say what {note} says. Edit it."),
            ("pair", "{note} holds a wrong and a right word. Correct the wrong one in the .{ending} files."),
        ],
    ),
    family(
        "delete_lines",
        delete_lines,
        [
            ("delete", "Delete all lines of {target} that contain the word in {note}. Change nothing else."),
            ("delete", "{note} holds a word. Remove every line with it from {target}, and only there."),
            ("delete", "Take the lines with the word from {note} out of {target}."),
        ],
        [
            ("delete", "No line of {target} may have the word in {note} any more. Drop those that do."),
            ("keep", "In {target}, keep only the lines that contain the word in {note}."),
        ],
    ),
    family(
        "complete_index",
        complete_index,
        [
            ("end", "{index} should list all .{ending} files, but one is missing. Append its name as a new line."),
            ("end", "Which .{ending} file is not in {index}? Add it at the end of {index}."),
            ("end", "Complete the list {index} of .{ending} files: add the missing name as its last line."),
        ],
        [
            ("end", "One name of a .{ending} file was forgotten in {index}. Write it below the others."),
            ("top", "{index} lacks the name of one .{ending} file. Insert it as the first line."),
        ],
    ),
)
