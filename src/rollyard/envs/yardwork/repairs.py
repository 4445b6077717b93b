"""Training wordings of the tasks that repair a script, in addition to each family's own sentences.

Each family has five plain sentences, followed by patterns, as in `questions`.
"""

from __future__ import annotations

from collections.abc import Mapping

REPAIRS: Mapping[str, tuple[str, ...]] = {
    "fix_constant": (
        "{table} says what {variable} should be. Correct it in {script}.",
        "Look up {variable} in {table} and write that number into {script}.",
        "In {script}, {variable} has a wrong number. Take the right one from {table}.",
        "Change {variable} in {script} so that it has the value that {table} gives.",
        "Update the value of {variable} in {script}: it stands in {table}.",
        "{table} has the right [values|numbers]. [Check|Look up] {variable} there and [correct|change] it in {script}.",
        (
            "In {script}, [replace|overwrite] the [value of|number for] {variable} with the one [from|in|given in] "
            "{table}."
        ),
        (
            "{script} still [uses|has] an old value of {variable}. The [new|current] one is in {table}: [edit|update] "
            "the script."
        ),
        (
            "[What|How much] is {variable} [according to|in] {table}? [Write|Put] that number into {script} instead "
            "of the wrong one."
        ),
        "{variable} in {script}: [wrong|incorrect|not right]. [Correct|Fix] it, using {table}.",
        (
            "{script} [computes|calculates] with the wrong {variable}. "
            "[Change that number to the one in {table}.|Correct the number, as {table} says.|Make it the number that "
            "{table} has.]"
        ),
    ),
    "fix_path": (
        "{script} reads a file with a wrong name. Find the right name and correct {script}.",
        "When {script} runs, a file is missing. Repair the name of that file in the script.",
        "Something is wrong with the file name in {script}. Run it, look, and fix it.",
        "Correct the name of the file that {script} reads, since there is no such file.",
        "Make {script} work: the file that it reads has another ending.",
        (
            "[Running|Starting] {script} gives an error: a file [is not found|does not exist]. [Correct|Fix] the name "
            "of that file in the script."
        ),
        (
            "The file that {script} [prints|reads] [exists, but with|is there, but has] another ending. "
            "[Change|Correct] the script accordingly."
        ),
        (
            "Which file does {script} [ask for|want to read]? It is there with another ending: [correct|change] the "
            "script, [not the file|and do not rename the file]."
        ),
        (
            "I [renamed a file|gave a file another ending], and now {script} [does not find it|fails]. "
            "[Update|Adapt|Correct] the name in the script."
        ),
        "[Wrong|Bad] file name in {script}: [look up|find out] the [right|real] one and edit the script.",
        (
            "{script} should [print|show] a file but names it wrongly. [Repair|Correct] the name, "
            "[in the script only|and change nothing but the script]."
        ),
    ),
    "fix_source": (
        "Find the .sh file that defines the function of {script}, and let {script} load that one.",
        "{script} loads a file without the function that it calls. Load the right one.",
        "Correct the first line of {script}: the function it calls is defined in another .sh file.",
        "Which .sh file has the function that {script} calls? Make {script} load it.",
        "The library that {script} loads is not the one with its function. Repair that.",
        (
            "{script} calls a function that [its library|the file it loads] does not [define|have]. [Find|Look for] "
            "the .sh file that does, and make the script load that one."
        ),
        (
            "[Search|Check] the .sh files for the function that {script} calls, then [change|correct|fix] the name of "
            "the library in the [script|first line of the script]."
        ),
        (
            "Wrong library in {script}: it [must load|needs] the .sh file [that defines|with] the function "
            "[it calls|called there]."
        ),
        (
            "[Somebody|I] moved a function into another .sh file, but {script} still loads the old one. [Correct|Fix] "
            "[its first line|what it loads]."
        ),
        (
            "[Which .sh file defines|What .sh file has] the function that {script} calls? [Put|Write|Enter] its name "
            "in the script's first line, in place of the wrong one."
        ),
        (
            "{script} [does not work|fails]: its function is [not in the file it loads|in another .sh file]. Make it "
            "load [the right file|the file that has it]."
        ),
    ),
}
