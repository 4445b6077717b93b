"""More ways to say the tasks that are trained: for training, and for the held-out split, which shares none of them.

A small model that has read three sentences for a task knows three sentences; with some more it begins to read. These
change no rule: they go behind the templates that each family brings.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollyard.envs.yardwork.puzzle import Family, Template

TRAIN: Mapping[str, tuple[str, ...]] = {
    "find_content": (
        "Search these files for {word}. Which path has it?",
        "The word {word} is in one of the files. Give me the path of that file.",
        "Where does {word} occur? Reply with the path of the file.",
        "I lost the file about {word}. What is its path?",
        "Give the path of the only file whose text has {word}.",
    ),
    "find_size": (
        "What is the name of the largest file here?",
        "One file is bigger than all others. Give its name.",
        "Compare the sizes of the files and name the largest.",
        "Which of these files needs the most room on disk?",
        "Answer with the name of the heaviest file.",
    ),
    "find_name": (
        "Look for {name} below this folder. Which word does it hold?",
        "{name} lies in one of the folders. Answer with the word in it.",
        "Read the file {name}, wherever it is, and tell me its word.",
        "Open {name}, which is not in this folder but below it. What is the word?",
        "Which word did somebody write into {name}? Search the folders for it.",
    ),
    "chain": (
        "{first} tells you which file to read next, and that one too. What word comes last?",
        "Follow the trail that starts with {first}. What is its last word?",
        "Open {first}, then the file named in it, until there is no next one. Answer with the word there.",
        "Each file points to another, beginning with {first}. Which word is at the end?",
        "From {first} on, every file gives the name of a file, until one gives a word. Tell me that word.",
    ),
    "count_lines": (
        "Tell me how many lines all .{ending} files have together.",
        "Add up the lines of the .{ending} files. How many are there?",
        "How many lines would one file have, made of all .{ending} files?",
        "Answer with the total number of lines in files that end in .{ending}.",
        "The .{ending} files have some lines. Count them all.",
    ),
    "count_matches": (
        "There is a word in {note}. Count the lines of {names} that have it.",
        "How often is there a line with the word of {note} in {names}?",
        "Take the word from {note} and tell me how many lines of {names} mention it.",
        "Count, in {names}, the lines that contain what {note} says.",
        "How many lines with the word written in {note} are in {names}?",
    ),
    "count_files": (
        "What is the number of files that end in .{ending}, with those in folders?",
        "Tell me how many .{ending} files lie here or in a folder below.",
        "Search all folders: how many files have the ending .{ending}?",
        "Count the .{ending} files of this folder and of all folders in it.",
        "Here and in the folders there are .{ending} files. How many?",
    ),
    "total": (
        "Every line of the .{ending} files has a number. What is their sum?",
        "Give the sum of all numbers that the .{ending} files list.",
        "Calculate the total of the amounts in the .{ending} files.",
        "How much is it if you add all numbers of the .{ending} files?",
        "Add the numbers behind the names in the .{ending} files and answer with the sum.",
    ),
    "extremum": (
        "Whose number in the .{ending} files is the highest?",
        "Give the name with the greatest number in the .{ending} files.",
        "Look for the highest score in the .{ending} files. Which name has it?",
        "Each line of the .{ending} files has a name and a number. Name the one with the largest number.",
        "Which name leads, by the numbers of the .{ending} files?",
    ),
    "field": (
        "What does {table} say about the {column} of {who}?",
        "Read {table}: which {column} has {who}?",
        "Tell me the {column} that belongs to {who} in {table}.",
        "Find the row of {who} in {table} and answer with its {column}.",
        "By {table}, what {column} does {who} have?",
    ),
    "replace_word": (
        "Swap {old} for the word from {note} in the .{ending} files.",
        "In the .{ending} files, {old} has to become the word that {note} holds.",
        "Read {note} and write its word wherever a .{ending} file has {old}.",
        "The word {old} in the .{ending} files is wrong. Use the word of {note} instead.",
        "Edit the .{ending} file with {old} in it: the word in {note} takes the place of {old}.",
    ),
    "delete_lines": (
        "Remove from {target} all lines that have the word of {note}.",
        "Read the word in {note} and delete the lines with it from {target}.",
        "Clean {target}: lines that contain the word from {note} must go.",
        "Which lines of {target} have the word in {note}? Delete them there.",
        "Erase every line of {target} in which the word of {note} occurs.",
    ),
    "complete_index": (
        "A .{ending} file is missing in the list {index}. Append it.",
        "{index} is a list of the .{ending} files, without one of them. Add that name below.",
        "Compare {index} with the .{ending} files that are here, and append the name that is missing.",
        "Find the .{ending} file that {index} does not list, and put its name at the end of {index}.",
        "Bring the list {index} of all .{ending} files up to date: one name is to be added as the last line.",
    ),
    "rename": (
        "All .{old} files need another ending: the word in {note}. Rename them.",
        "Rename the files that end in .{old}: {note} says the new ending.",
        "Read {note} and change the ending .{old} of all files to that word.",
        "Files ending in .{old} should end in the word of {note} from now on. Rename each.",
        "The ending .{old} is old. {note} has the new one: rename the files.",
    ),
    "move": (
        "Which .{ending} files contain {word}? Move them into {folder}, a folder that you may have to make.",
        "Move all .{ending} files with the word {word} to {folder}. If there is no such folder, make it.",
        "Files that end in .{ending} and contain {word} belong in the folder {folder}. Move them there.",
        "Look for {word} in the .{ending} files and move those that have it to the folder {folder}.",
        "Take the .{ending} files in which {word} occurs and put them in the folder {folder}.",
    ),
    "tree": (
        "{plan} lists folders. Make every one of them.",
        "Read {plan} and create the folders in it.",
        "Every line of {plan} is a folder that should be here. Make them.",
        "Make the folders of {plan}, also those that lie in others.",
        "The folders written in {plan} do not exist yet. Create all of them.",
    ),
    "permissions": (
        "Which .sh files contain {word}? Make exactly those executable.",
        "Make every script in which {word} occurs executable; leave the other scripts.",
        "Look for {word} in the scripts and set the executable bit of those that have it.",
        "The .sh files with {word} should be executable. Change no other file.",
        "Allow the execution of the scripts that mention {word}, and of no others.",
    ),
    "sort_unique": (
        "Write to {out} the sorted lines, each once, of the files that {note} lists.",
        "Read {note}, sort the lines of the files in it, drop repeated ones and save them as {out}.",
        "{out} should have every different line of the files named in {note}, sorted.",
        "Put the lines of the files from {note} into {out}, sorted and with no line twice.",
        "Sort what is in the files that {note} names, without repeated lines, and write it to {out}.",
    ),
    "merge": (
        "Put the files that {note} lists one after another into {out}.",
        "Read {note} and join its files, in their order, as {out}.",
        "Make {out} of the files named in {note}: the first comes first.",
        "Write all files of {note}, from the first to the last, to {out}.",
        "Append the files in the list {note} to each other, in order, and save that as {out}.",
    ),
    "compare": (
        "Which word is in one .{ending} file and not in the other?",
        "The two .{ending} files differ in one word. Tell me that word.",
        "Find the word that only one of the two .{ending} files has.",
        "What is the one word by which one .{ending} file is longer than the other?",
        "Look at both .{ending} files. Which word is missing in one of them?",
    ),
    "fix_constant": (
        "{table} says what {variable} should be. Correct it in {script}.",
        "Look up {variable} in {table} and write that number into {script}.",
        "In {script}, {variable} has a wrong number. Take the right one from {table}.",
        "Change {variable} in {script} so that it has the value that {table} gives.",
        "Update the value of {variable} in {script}: it stands in {table}.",
    ),
    "fix_path": (
        "{script} reads a file with a wrong name. Find the right name and correct {script}.",
        "When {script} runs, a file is missing. Repair the name of that file in the script.",
        "Something is wrong with the file name in {script}. Run it, look, and fix it.",
        "Correct the name of the file that {script} reads, since there is no such file.",
        "Make {script} work: the file that it reads has another ending.",
    ),
    "fix_source": (
        "Find the .sh file that defines the function of {script}, and let {script} load that one.",
        "{script} loads a file without the function that it calls. Load the right one.",
        "Correct the first line of {script}: the function it calls is defined in another .sh file.",
        "Which .sh file has the function that {script} calls? Make {script} load it.",
        "The library that {script} loads is not the one with its function. Repair that.",
    ),
}

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


def with_more(family: Family) -> Family:
    """The family with these wordings behind its own; their rule is the one that is trained."""
    rule = family.templates["train"][0].rule
    train, held_out = family.templates["train"], family.templates["held_out"]
    more = tuple(Template(f"t{len(train) + at}", text, rule) for at, text in enumerate(TRAIN[family.name]))
    one = Template(f"h{len(held_out)}", HELD_OUT[family.name], rule)
    return Family(family.name, family.make, {"train": (*train, *more), "held_out": (*held_out, one)})
