"""Families whose answer is a location: the file that contains a word, the largest file, the end of a trail."""

from __future__ import annotations

from rollyard.envs.yardwork.draw import SeededDraw
from rollyard.envs.yardwork.puzzle import File, Scene, SolutionStep, family, text_file


def find_content(draw: SeededDraw, level: int, rule: str) -> Scene:
    """`has`: one file contains the word. `lacks`: all but one do."""
    folders = sorted(draw.words(level - 1)) if level >= 3 else []
    word, ending = draw.word(), draw.ending()
    names = draw.names(2 + level, ending, folders)
    answer = draw.pick(names)
    files: dict[str, File | None] = {}
    for name in names:
        is_marked = (name == answer) == (rule == "has")
        files[name] = text_file(draw.lines(1 + level, [word] if is_marked else []))
    flag, where = ("-l" if rule == "has" else "-L"), f"{'*/' if folders else ''}*.{ending}"
    steps = [
        SolutionStep("ls *" if folders else "ls", "Look around."),
        SolutionStep(f"grep {flag} {word} {where}", f"Search for {word}."),
    ]
    return Scene(files, {"word": word}, steps, answer=answer)


def find_size(draw: SeededDraw, level: int, rule: str) -> Scene:
    """No two files have the same size."""
    ending = draw.ending()
    names = draw.names(2 + level, ending)
    sizes = draw.shuffled(range(1, len(names) + 1))
    files: dict[str, File | None] = {}
    for name, size in zip(names, sizes, strict=True):
        files[name] = text_file(draw.filler().split()[0][:4] for _ in range(2 * size))
    ranked = [name for _, name in sorted(zip(sizes, names, strict=True))]
    end = "head" if rule == "largest" else "tail"
    steps = [SolutionStep("ls", "Look around."), SolutionStep(f"ls -S | {end} -n 1", "Sort by size.")]
    return Scene(files, {}, steps, answer=ranked[-1] if rule == "largest" else ranked[0])


def find_name(draw: SeededDraw, level: int, rule: str) -> Scene:
    """The name is known, the folder is not. `path`: the answer is its path. `inside`: the answer is its content."""
    folders = sorted(draw.words(1 + level))
    if level >= 4:
        folders = [f"{folders[0]}/{name}" for name in folders[1:]]
    ending, secret = draw.ending(), draw.word()
    names = draw.names(max(2 + level, len(folders)), ending, folders)
    path = draw.pick(names)
    name = path.rsplit("/", 1)[1]
    files: dict[str, File | None] = {other: text_file(draw.lines(1)) for other in names}
    files[path] = text_file([secret])
    steps = [SolutionStep("ls", "Look around."), SolutionStep(f"find . -name {name}", f"Find {name}.")]
    if rule == "path":
        return Scene(files, {"name": name}, steps, answer=path)
    steps.append(SolutionStep(f"cat {path}", "Read it."))
    return Scene(files, {"name": name}, steps, answer=secret)


def chain(draw: SeededDraw, level: int, rule: str) -> Scene:
    """Each file names the next; other files are false trails. With `folders` each is in its own folder."""
    ending, secret = draw.ending(), draw.word()
    stops, others = draw.words(1 + level), draw.words(1 + level)

    def path(stop: str) -> str:
        return f"{stop}/here.{ending}" if rule == "folders" else f"{stop}.{ending}"

    files: dict[str, File | None] = {}
    for stop, following in zip(stops, [*stops[1:], ""], strict=True):
        files[path(stop)] = text_file([f"see {path(following)}" if following else f"word {secret}"])
    for stop in others:
        files[path(stop)] = text_file([f"see {path(draw.pick(stops))}"])
    steps = [
        SolutionStep(f"cat {path(stop)}", "Follow the trail." if index else "Begin.")
        for index, stop in enumerate(stops)
    ]
    return Scene(files, {"first": path(stops[0])}, steps, answer=secret)


FINDING = (
    family(
        "find_content",
        find_content,
        [
            ("has", "Which file contains the word {word}? Answer with its path."),
            ("has", "Exactly one file here has {word} in it. Tell me its path."),
            ("has", "Find the file that mentions {word} and give its path."),
        ],
        [
            ("has", "Somewhere in these files stands {word}. Name the file, with its folder if it is in one."),
            ("lacks", "All files but one have {word} in them. What is the path of the one without it?"),
        ],
    ),
    family(
        "find_size",
        find_size,
        [
            ("largest", "Which file is the largest? Answer with its name."),
            ("largest", "Find the biggest file here and give its name."),
            ("largest", "Tell me the name of the file with the most bytes."),
        ],
        [
            ("largest", "No file takes more space than one of these. What is it called?"),
            ("smallest", "Name the smallest of these files."),
        ],
    ),
    family(
        "find_name",
        find_name,
        [
            ("inside", "There is a file {name} in one of the folders. What does it say?"),
            ("inside", "Find {name} and tell me the word in it."),
            ("inside", "What word is written in {name}? It is in some folder."),
        ],
        [
            ("inside", "Somebody hid {name} below this folder. Read it and answer with its content."),
            ("path", "Where is {name}? Give the path from here, like a/b."),
        ],
    ),
    family(
        "chain",
        chain,
        [
            ("", "Start at {first}. Each file names the next one; the last holds a word. Which?"),
            ("", "Read {first} and follow the files it leads to. Answer with the word at the end."),
            ("", "{first} begins a trail of files. What word does the trail end with?"),
        ],
        [
            ("", "Go from {first} to the file that it points at, and so on. Report the final word."),
            ("folders", "A hunt through folders begins at {first}. What is the word in its last file?"),
        ],
    ),
)
