"""Families about numbers and tables: a sum, a maximum, one cell of a table."""

from __future__ import annotations

from rollyard.envs.yardwork.draw import SeededDraw
from rollyard.envs.yardwork.puzzle import File, Scene, SolutionStep, family, text_file


def _accounts(draw: SeededDraw, level: int, ending: str) -> tuple[dict[str, File | None], list[tuple[str, int]]]:
    """Files of `word number` lines: one file at first, more at higher levels. No number occurs twice."""
    names = draw.names((level + 1) // 2, ending)
    sizes = [draw.count(2 + level, 4 + level) for _ in names]
    numbers, files, rows = draw.numbers(sum(sizes)), {}, []
    for name, size in zip(names, sizes, strict=True):
        own = [(draw.word(), numbers.pop()) for _ in range(size)]
        files[name] = text_file(f"{word} {number}" for word, number in own)
        rows += own
    return files, rows


def total(draw: SeededDraw, level: int, rule: str) -> Scene:
    """The sum of all numbers (`each`), or of the words that a note lists (`listed`)."""
    ending = draw.ending()
    files, rows = _accounts(draw, level, ending)
    look = SolutionStep("ls", "Look around.")
    where = next(iter(files)) if len(files) == 1 else f"*.{ending}"
    if rule == "each":
        steps = [
            look,
            SolutionStep(f"head -n 2 {next(iter(files))}", "See what they are like."),
            SolutionStep(f"awk '{{s+=$2}} END {{print s}}' {where}", "Add."),
        ]
        return Scene(files, {"ending": ending}, steps, answer=str(sum(number for _, number in rows)))
    chosen = draw.shuffled(rows)[:2]
    note = f"{draw.word()}.csv"
    files[note] = text_file([",".join(word for word, _ in chosen)])
    pattern = " ".join(f"-e {word}" for word, _ in chosen)
    terms = " + ".join(str(number) for word, number in rows if (word, number) in chosen)
    steps = [
        SolutionStep(f"cat {note}", "Read the list."),
        SolutionStep(f"cat *.{ending} | grep {pattern}", "Look them up."),
        SolutionStep(f"echo $(({terms}))", "Add."),
    ]
    return Scene(files, {"ending": ending, "note": note}, steps, answer=str(sum(number for _, number in chosen)))


def extremum(draw: SeededDraw, level: int, rule: str) -> Scene:
    ending = draw.ending()
    files, rows = _accounts(draw, level, ending)
    where = next(iter(files)) if len(files) == 1 else f"*.{ending}"
    ranked = sorted(rows, key=lambda row: row[1])
    word, _ = ranked[-1] if rule == "most" else ranked[0]
    end = "tail" if rule == "most" else "head"
    steps = [SolutionStep("ls", "Look around."), SolutionStep(f"sort -n -k 2 {where} | {end} -n 1", "Sort by number.")]
    return Scene(files, {"ending": ending}, steps, answer=word)


def field(draw: SeededDraw, level: int, rule: str) -> Scene:
    """`cell`: the value of a named column in a known row. `row`: the row that has a known value."""
    columns = ["name", *draw.columns(2 + level // 2)]
    rows = [draw.words(len(columns)) for _ in range(3 + level)]
    name = f"{draw.word()}.csv"
    files: dict[str, File | None] = {name: text_file(",".join(row) for row in [columns, *rows])}
    for other in draw.names(level // 2, "csv"):
        files[other] = text_file(
            [",".join(columns), *(",".join([row[0], *draw.shuffled(row[1:])]) for row in rows[:2])]
        )
    row = draw.pick(rows)
    at = draw.count(1, len(columns) - 1)
    slots = {"table": name, "who": row[0], "column": columns[at], "value": row[at]}
    head = SolutionStep(f"head -n 1 {name}", "Look at the columns.")
    if rule == "cell":
        comment = f"{columns[at]} is column {at + 1}."
        steps = [head, SolutionStep(f"grep {row[0]}, {name} | cut -d , -f {at + 1}", comment)]
        return Scene(files, slots, steps, answer=row[at])
    steps = [head, SolutionStep(f"grep {row[at]} {name} | cut -d , -f 1", "The name is column 1.")]
    return Scene(files, slots, steps, answer=row[0])


NUMBERS = (
    family(
        "total",
        total,
        [
            ("each", "Add up all numbers in the .{ending} files. What is the sum?"),
            ("each", "The .{ending} files list amounts. What do they come to in total?"),
            ("each", "What is the sum of the second column over all .{ending} files?"),
        ],
        [
            ("each", "Sum every amount that stands in a .{ending} file and report the result."),
            ("listed", "{note} names two entries of the .{ending} files. Add their two numbers."),
        ],
    ),
    family(
        "extremum",
        extremum,
        [
            ("most", "Which name in the .{ending} files has the highest number?"),
            ("most", "The .{ending} files give each name a score. Who has the best one?"),
            ("most", "Find the largest number in the .{ending} files and tell whose it is."),
        ],
        [
            ("most", "Among all entries of the .{ending} files, whose value is on top?"),
            ("least", "Who has the lowest number in the .{ending} files?"),
        ],
    ),
    family(
        "field",
        field,
        [
            ("cell", "In {table}, what is the {column} of {who}?"),
            ("cell", "Look up {who} in {table} and give the {column}."),
            ("cell", "Which {column} does {table} have for {who}?"),
        ],
        [
            ("cell", "Report what stands under {column} in the row of {who} in {table}."),
            ("row", "Whose {column} is {value}, by the table {table}? Answer with the name."),
        ],
    ),
)
