"""Families that change files but not their text: rename, move, make folders, set permissions."""

from __future__ import annotations

from dataclasses import replace

from rollyard.envs.yardwork.draw import SeededDraw
from rollyard.envs.yardwork.puzzle import File, Scene, SolutionStep, family, text_file

BY_HAND = 3
"""Up to this many files are named one by one; for more, the solution uses a loop."""


def rename(draw: SeededDraw, level: int, rule: str) -> Scene:
    """`ending`: the files get the ending in a note. `prefix`: the note's word is put before their names."""
    old, word = draw.ending(), draw.word()
    note = f"{draw.word()}.csv"
    names = draw.names(level, old)
    files: dict[str, File | None] = {name: text_file(draw.lines(1)) for name in names}
    files[note] = text_file([word])
    for name in draw.names(level // 2, "sh"):
        files[name] = text_file(["echo ok"])
    if rule == "ending":
        renamed, each = {name: name.replace(f".{old}", f".{word}") for name in names}, f"${{f%.{old}}}.{word}"
    else:
        renamed, each = {name: f"{word}_{name}" for name in names}, f"{word}_$f"
    after = {renamed.get(name, name): file for name, file in files.items()}
    command = "; ".join(f"mv {name} {renamed[name]}" for name in names)
    if len(names) > BY_HAND:
        command = f"for f in *.{old}; do mv $f {each}; done"
    steps = [
        SolutionStep("ls", "Look around."),
        SolutionStep(f"cat {note}", "Read the note."),
        SolutionStep(command, f"The note says {word}."),
    ]
    return Scene(files, {"old": old, "note": note}, steps, after=after)


def move(draw: SeededDraw, level: int, rule: str) -> Scene:
    """Files with a word are moved to a folder, which must be created from level 3 on. `copy`: they are copied."""
    word, ending, folder = draw.word(), draw.ending(), draw.word()
    names = draw.names(2 + level, ending)
    chosen = sorted(draw.shuffled(names)[: (level + 1) // 2])
    files: dict[str, File | None] = {}
    for name in names:
        files[name] = text_file(draw.lines(2, [word] if name in chosen else []))
    after: dict[str, File | None] = {name: file for name, file in files.items() if name not in chosen or rule == "copy"}
    after |= {f"{folder}/{name}": files[name] for name in chosen}
    if level < 3:
        files[folder] = after[folder] = None
    steps = [
        SolutionStep("ls", "Look around."),
        SolutionStep(f"grep -l {word} *.{ending}", f"Which files have {word}?"),
    ]
    verb = "mv" if rule == "move" else "cp"
    make = "" if level < 3 else f"mkdir {folder}; "
    steps.append(SolutionStep(f"{make}{verb} {' '.join(chosen)} {folder}", "Those go."))
    return Scene(files, {"word": word, "folder": folder, "ending": ending}, steps, after=after)


def tree(draw: SeededDraw, level: int, rule: str) -> Scene:
    """`paths`: a plan lists folders, one per line. `pairs`: it lists which folder is in which."""
    plan = f"{draw.word()}.{draw.ending()}"
    roots = draw.words(1 + level // 2)
    folders = list(roots) if rule == "paths" else []
    while len(folders) < 1 + level:
        folders.append(f"{draw.pick(roots)}/{draw.word()}")
    paths = [path for path in folders if not any(other.startswith(f"{path}/") for other in folders)]
    listed = draw.shuffled(paths)
    files: dict[str, File | None] = {plan: text_file(listed)}
    if rule == "pairs":
        files[plan] = text_file("{1} in {0}".format(*path.split("/")) for path in listed)
    after = {**files, **dict.fromkeys(paths)}
    steps = [SolutionStep(f"cat {plan}", "Read the plan."), SolutionStep(f"mkdir -p {' '.join(listed)}", "Make them.")]
    return Scene(files, {"plan": plan}, steps, after=after)


def permissions(draw: SeededDraw, level: int, rule: str) -> Scene:
    """The scripts with a word become executable, or (`off`) no longer are."""
    word = draw.word()
    names = draw.names(2 + level, "sh")
    chosen = sorted(draw.shuffled(names)[: (level + 1) // 2])
    before, now = (0o644, 0o755) if rule == "on" else (0o755, 0o644)
    files: dict[str, File | None] = {}
    after: dict[str, File | None] = {}
    for name in names:
        commands = [f"echo {line}" for line in draw.lines(1, [word] if name in chosen else [])]
        file = text_file(commands, before)
        files[name] = file
        after[name] = replace(file, mode=now) if name in chosen else file
    flag = "+x" if rule == "on" else "-x"
    steps = [
        SolutionStep("ls -l", "Look around."),
        SolutionStep(f"grep -l {word} *.sh", f"Which have {word}?"),
        SolutionStep(f"chmod {flag} {' '.join(chosen)}", "Change those."),
    ]
    return Scene(files, {"word": word}, steps, after=after, checks_modes=True)


ARRANGING = (
    family(
        "rename",
        rename,
        [
            ("ending", "{note} holds a word. Rename every .{old} file so that it ends in .WORD instead."),
            ("ending", "Give all .{old} files a new ending, the one written in {note}."),
            ("ending", "Replace the ending .{old} of file names by the word in {note}."),
        ],
        [
            ("ending", "Files called *.{old} are to end in a dot and the word of {note}. Rename them."),
            ("prefix", "{note} holds a word. Put it and a _ before the name of every .{old} file."),
        ],
    ),
    family(
        "move",
        move,
        [
            ("move", "Move the .{ending} files that contain {word} into the folder {folder}. Make it if needed."),
            ("move", "Put every .{ending} file with {word} in it into {folder} (a folder, maybe not there yet)."),
            ("move", "Find the .{ending} files that mention {word} and move them to the folder {folder}."),
        ],
        [
            (
                "move",
                "The folder {folder} (create it if it is not there) is for .{ending} files about {word}. Sort them in.",
            ),
            ("copy", "Copy the .{ending} files that contain {word} into the folder {folder}. Make it if needed."),
        ],
    ),
    family(
        "tree",
        tree,
        [
            ("paths", "Make all folders that {plan} lists."),
            ("paths", "{plan} has one folder on each line. Create them here."),
            ("paths", "Create the folders named in {plan}, with the folders above them."),
        ],
        [
            ("paths", "Build the empty folder tree that is written down in {plan}."),
            ("pairs", "{plan} says which folder lies in which. Create them all."),
        ],
    ),
    family(
        "permissions",
        permissions,
        [
            ("on", "Make the scripts that contain {word} executable, and no others."),
            ("on", "Some .sh files mention {word}. Give only those the permission to be executed."),
            ("on", "Set the executable bit of every .sh file with {word} in it."),
        ],
        [
            ("on", "Only scripts about {word} should be runnable as programs. Set their mode."),
            ("off", "Scripts that contain {word} must not be executable any more. Leave the others."),
        ],
    ),
)
