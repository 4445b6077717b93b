"""Training wordings of the tasks that change files, in addition to each family's own sentences.

Each family has five plain sentences, followed by patterns, as in `questions`. Repairs of scripts are in `repairs`.
"""

from __future__ import annotations

from collections.abc import Mapping

CHORES: Mapping[str, tuple[str, ...]] = {
    "replace_word": (
        "Swap {old} for the word from {note} in the .{ending} files.",
        "In the .{ending} files, {old} has to become the word that {note} holds.",
        "Read {note} and write its word wherever a .{ending} file has {old}.",
        "The word {old} in the .{ending} files is wrong. Use the word of {note} instead.",
        "Edit the .{ending} file with {old} in it: the word in {note} takes the place of {old}.",
        (
            "[Search|Look through] the .{ending} files for {old} and replace it [everywhere|each time] with the word "
            "[from|in|given in] {note}."
        ),
        (
            "{old} [is no longer used|has a new name]: {note} has [the new word|the word to use now]. "
            "[Update|Change|Correct] the .{ending} files."
        ),
        (
            "In [*.{ending}|all .{ending} files]: {old} "
            "[out, the word from {note} in|becomes the word in {note}|is to be the word in {note}]."
        ),
        (
            "I [wrote|typed] {old} in the .{ending} files, but I meant the word in {note}. "
            "[Please correct that.|Fix it there.|Put it right.]"
        ),
        (
            "[Get|Take] the right word from {note}, then [use it in place of|let it replace] {old} in "
            "[each .{ending} file|the .{ending} files]."
        ),
        (
            "Which .{ending} file [mentions|contains] {old}? There, every {old} must [become|turn into] the word that "
            "[is|you read] in {note}."
        ),
    ),
    "delete_lines": (
        "Remove from {target} all lines that have the word of {note}.",
        "Read the word in {note} and delete the lines with it from {target}.",
        "Clean {target}: lines that contain the word from {note} must go.",
        "Which lines of {target} have the word in {note}? Delete them there.",
        "Erase every line of {target} in which the word of {note} occurs.",
        "[Some|Certain] lines of {target} [mention|contain] the word from {note}. [Delete|Remove] exactly those.",
        (
            "{target} [has|contains] lines that I no longer [need|want]: those with the word in {note}. "
            "[Delete them.|Take them out.]"
        ),
        (
            "[Open|Read] {note} to learn a word, then [edit|change] {target} so that "
            "[no line with it is left|every line with it is gone]."
        ),
        "Lines to delete from {target}: [all|those] [with|containing|that mention] the word [in|given in] {note}.",
        "Filter {target}: [any|each] line with the word of {note} [is to be deleted|has to go|must be removed].",
        (
            "[Before I send|Before I print] {target}, [delete|remove|cut out] all of its lines in which you "
            "[see|find] the word from {note}."
        ),
    ),
    "complete_index": (
        "A .{ending} file is missing in the list {index}. Append it.",
        "{index} is a list of the .{ending} files, without one of them. Add that name below.",
        "Compare {index} with the .{ending} files that are here, and append the name that is missing.",
        "Find the .{ending} file that {index} does not list, and put its name at the end of {index}.",
        "Bring the list {index} of all .{ending} files up to date: one name is to be added as the last line.",
        (
            "Every .{ending} file should [be listed|have a line] in {index}, but one is missing. [Append|Add] its "
            "name [at the end|as the last line]."
        ),
        (
            "[Check|Go through] the .{ending} files: the one that {index} [does not mention|leaves out|skips] "
            "[has to be added|should be appended] at the end of that list."
        ),
        (
            "[Missing from|Not yet in] {index}: one of the .{ending} files here. [Append|Write] its name "
            "[as the last line|at the bottom]."
        ),
        (
            "I made a list of all .{ending} files, {index}, but [overlooked|left out|missed] one. [Put|Write] its "
            "name on a new [last line|line at the end]."
        ),
        (
            "[Append|Add] to {index}, [as its last line|at its end], the name of the .{ending} file that "
            "[is not on it|it lacks|is not listed there]."
        ),
    ),
    "rename": (
        "All .{old} files need another ending: the word in {note}. Rename them.",
        "Rename the files that end in .{old}: {note} says the new ending.",
        "Read {note} and change the ending .{old} of all files to that word.",
        "Files ending in .{old} should end in the word of {note} from now on. Rename each.",
        "The ending .{old} is old. {note} has the new one: rename the files.",
        (
            "[Take|Read] the new ending from {note} and [give it to|use it for] every .{old} file instead of "
            "[the old one|.{old}]."
        ),
        "NAME.{old} [should|must] become NAME.WORD for [each|every] such file; WORD is [in|written in] {note}.",
        (
            "My [program|tool] no longer [reads|accepts] .{old} files: it wants the ending [given|noted] in {note}. "
            "Rename the files."
        ),
        "New ending for [all|the] .{old} files, [see|as given in|taken from] {note}: rename [them|each].",
        (
            "Which ending is [written|stored|noted] in {note}? Rename the .{old} files so that they "
            "[have it|end in it] instead."
        ),
        (
            "[Rename|Change the names of] all files with the ending .{old}: that ending [becomes|is replaced by] the "
            "word [in|from] {note}."
        ),
    ),
    "move": (
        "Which .{ending} files contain {word}? Move them into {folder}, a folder that you may have to make.",
        "Move all .{ending} files with the word {word} to {folder}. If there is no such folder, make it.",
        "Files that end in .{ending} and contain {word} belong in the folder {folder}. Move them there.",
        "Look for {word} in the .{ending} files and move those that have it to the folder {folder}.",
        "Take the .{ending} files in which {word} occurs and put them in the folder {folder}.",
        (
            "[Some|Certain] .{ending} files [mention|contain] {word}. They belong in the folder {folder}: move them "
            "there, and make that folder if it [is missing|does not exist]."
        ),
        (
            "I want [all|the] .{ending} files that [mention|contain|say] {word} to be in a folder named {folder}, "
            "which may not exist yet. Move them."
        ),
        (
            "Move to {folder} ([a folder, to be made if missing|a folder that may be missing]): [every|each] "
            ".{ending} file [with|containing] {word}."
        ),
        (
            "Does a .{ending} file [contain|mention] {word}? Then it [has to|should] go into the folder {folder}, "
            "which [you may have to make|may not exist yet]. Move all such files."
        ),
        (
            "[Search|Check] the .{ending} files for {word}, make the folder {folder} if "
            "[there is none|it is missing], and move [the matching files|the files with that word] into it."
        ),
        (
            "To tidy up, [take|pick] every .{ending} file that has {word} [in it|inside] and move it into {folder}, a "
            "folder that [might not be there|may still be missing]."
        ),
    ),
    "tree": (
        "{plan} lists folders. Make every one of them.",
        "Read {plan} and create the folders in it.",
        "Every line of {plan} is a folder that should be here. Make them.",
        "Make the folders of {plan}, also those that lie in others.",
        "The folders written in {plan} do not exist yet. Create all of them.",
        "[Open|Read] {plan}: [each|every] line is the path of a folder [to create|that you have to make].",
        "My [project|team] needs the folders [listed|named|noted] in {plan}. [Make|Create] them all.",
        "Folders to [make|create]: [see|as listed in|every line of] {plan}.",
        (
            "[Which folders does {plan} list?|What folders are in {plan}?] "
            "[Make sure that they exist.|Create each of them.|Make all of these.]"
        ),
        "Take the paths from {plan} and [make|create|set up] a folder [for|at] each of them.",
        (
            "Somebody [planned|listed] our folders in {plan}. Please [make|create] all of them, "
            "[folders inside folders too|also nested ones]."
        ),
    ),
    "permissions": (
        "Which .sh files contain {word}? Make exactly those executable.",
        "Make every script in which {word} occurs executable; leave the other scripts.",
        "Look for {word} in the scripts and set the executable bit of those that have it.",
        "The .sh files with {word} should be executable. Change no other file.",
        "Allow the execution of the scripts that mention {word}, and of no others.",
        (
            "Search the [scripts|.sh files] for {word} and make [the ones that have it|those with a match] "
            "executable; the others [stay as they are|remain unchanged]."
        ),
        (
            "I want to [run|start] the scripts that [mention|contain] {word}: make [only those|them, and only them,] "
            "executable."
        ),
        "Needed: chmod +x on [each|every] [script|.sh file] [with|containing] {word}, and on no other.",
        (
            "Does a [script|.sh file] [mention|contain|have the word] {word}? Then "
            "[make it executable|set its executable bit], otherwise leave it alone."
        ),
        (
            "[Add|Give] the execute permission to the [scripts|.sh files] in which you [find|see] {word}, and only to "
            "them."
        ),
        (
            "The [scripts|.sh files] are not executable. For those that [say|mention] {word}, and for no others, "
            "[change that|this has to change]."
        ),
    ),
    "sort_unique": (
        "Write to {out} the sorted lines, each once, of the files that {note} lists.",
        "Read {note}, sort the lines of the files in it, drop repeated ones and save them as {out}.",
        "{out} should have every different line of the files named in {note}, sorted.",
        "Put the lines of the files from {note} into {out}, sorted and with no line twice.",
        "Sort what is in the files that {note} names, without repeated lines, and write it to {out}.",
        (
            "[Which files does {note} list?|What files are named in {note}?] Write their lines to {out}, "
            "[alphabetically|in alphabetical order], [each once|without repeats]."
        ),
        (
            "[Create|Make|Fill] {out} from the files [listed|named] in {note}: "
            "[their lines sorted, no line twice|sorted lines, each only once]."
        ),
        (
            "I need a [single|new] file {out} with the sorted lines of all files that {note} [names|lists], "
            "[each line once|but no line twice]."
        ),
        (
            "Sorted and [unique|without repeats]: the lines of [all|the] files in the list {note}, "
            "[saved as|written to] {out}."
        ),
        (
            "[Take|Read] all lines from the files in {note}, keep each different line once, "
            "[sort them|put them in alphabetical order] and [write them to|save them in] {out}."
        ),
        (
            "{out} [does not exist yet|is still missing]. It should have every line of the files named in {note}, "
            "[sorted|in alphabetical order], [but each only once|with no line twice]."
        ),
    ),
    "merge": (
        "Put the files that {note} lists one after another into {out}.",
        "Read {note} and join its files, in their order, as {out}.",
        "Make {out} of the files named in {note}: the first comes first.",
        "Write all files of {note}, from the first to the last, to {out}.",
        "Append the files in the list {note} to each other, in order, and save that as {out}.",
        (
            "[Which files does {note} list, and in which order?|In which order does {note} list files?] "
            "[Join|Concatenate] them [that way|in this order] into {out}."
        ),
        "[Create|Make] {out}: the files named in {note}, [joined|put together] in the [same|given] order.",
        (
            "I split a file into [parts|pieces], and {note} [lists|names] them in order. "
            "[Put them together again|Join them again|Rebuild it] as {out}."
        ),
        (
            "Wanted: [one|a single] file {out} out of [all those|the files] in {note}, in the "
            "[order of that list|order given there]."
        ),
        (
            "Go through {note} [line by line|from top to bottom] and [append|add] the contents of [each|every] file "
            "named there to {out}."
        ),
        (
            "The contents of the files [named|listed] in {note} [belong in|have to go into] {out}, "
            "[from the first to the last|in the order of the list]."
        ),
    ),
}
