"""Further wordings of the trained rules: for training, and other ones for the held-out split.

A small model that is trained on eight sentences per task learns these sentences and does not read others
(docs/results/learning.md). So a training text may have alternatives and stand for dozens of sentences. These wordings
have no new rule; they follow each family's own templates.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from rollyard.envs.yardwork.chores import CHORES
from rollyard.envs.yardwork.puzzle import Family, Template
from rollyard.envs.yardwork.questions import QUESTIONS
from rollyard.envs.yardwork.repairs import REPAIRS

TRAIN: Mapping[str, tuple[str, ...]] = {**QUESTIONS, **CHORES, **REPAIRS}

HELD_OUT: Mapping[str, str] = {
    "find_content": "I need the path of whichever file talks about {word}.",
    "find_size": "Report the name of the file that holds more bytes than any other.",
    "find_name": "What is the content of {name}? You will have to find out where it lies.",
    "chain": "Beginning with {first}, let each file send you to the next one. Which word do you arrive at?",
    "count_lines": "Report the sum of the line counts of all files called *.{ending}.",
    "count_matches": "Count how many lines of {names} include the word that stands in {note}.",
    "count_files": "How many files called *.{ending} can be found here, at any depth?",
    "total": "What do you get when all amounts in files ending in .{ending} are added?",
    "extremum": "Report the name beside the greatest value in the files ending in .{ending}.",
    "field": "I want to know the {column} of {who}; it is in {table}.",
    "replace_word": "Every {old} in files ending in .{ending} is outdated: exchange it for the word of {note}.",
    "delete_lines": "Throw out of {target} each line that includes the word {note} tells.",
    "complete_index": "{index} forgot one file ending in .{ending}. Add it after the last line.",
    "rename": "Let each file called *.{old} have the ending that {note} tells, in place of .{old}.",
    "move": "Gather the files ending in .{ending} that include {word} in the folder {folder}, new or not.",
    "tree": "For each line of {plan} there should be a folder. See to that.",
    "permissions": "Turn the .sh files that include {word} into executable ones. Touch nothing else.",
    "sort_unique": "Bring the lines of the files told in {note} in order, remove doubles, and keep them in {out}.",
    "merge": "Copy the text of the files in {note}, one behind the other, to {out}.",
    "compare": "Both files ending in .{ending} are alike but for one word. Report it.",
    "fix_constant": "Give {variable} in {script} the number that it has in {table}.",
    "fix_path": "{script} stops, since its input is called otherwise. Put the right name into the script.",
    "fix_source": "Let {script} read the .sh file in which its function is written, not the one it reads now.",
}


def spelled_out(text: str) -> list[str]:
    """The sentences of a text with alternatives, `[Find|Name] it.`: all combinations, the last one varying fastest.

    An alternative may be empty. Alternatives cannot be nested.
    """
    parts = re.split(r"\[([^\[\]]*)\]", text)  # text in brackets is at odd positions
    choices = [part.split("|") if at % 2 else [part] for at, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def with_more(family: Family) -> Family:
    """The family with these wordings after its own. Their rule is the trained one."""
    rule = family.templates["train"][0].rule
    train, held_out = family.templates["train"], family.templates["held_out"]
    sentences = [sentence for text in TRAIN[family.name] for sentence in spelled_out(text)]
    more = tuple(Template(f"t{len(train) + at}", sentence, rule) for at, sentence in enumerate(sentences))
    one = Template(f"h{len(held_out)}", HELD_OUT[family.name], rule)
    return Family(family.name, family.make, {"train": (*train, *more), "held_out": (*held_out, one)})
