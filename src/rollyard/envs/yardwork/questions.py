"""Training wordings of the tasks that ask for an answer, in addition to each family's own sentences.

Each family has five plain sentences, followed by patterns with alternatives in square brackets, for
`wordings.spelled_out`. A template is named by its position, so add new patterns at the end.
"""

from __future__ import annotations

from collections.abc import Mapping

QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "find_content": (
        "Search these files for {word}. Which path has it?",
        "The word {word} is in one of the files. Give me the path of that file.",
        "Where does {word} occur? Reply with the path of the file.",
        "I lost the file about {word}. What is its path?",
        "Give the path of the only file whose text has {word}.",
        "[Search|Go through|Check] all files [for|to find] {word} and answer with the path of the file that has it.",
        (
            "[Somebody|A colleague] [wrote|put|typed] {word} into one of the files. "
            "[The path of that file, please.|What path does that file have?]"
        ),
        "[Path of the|Wanted: path of the] file [with|containing|that mentions] {word}.",
        "I want to [edit|print|read] the file that [contains|mentions|has the word] {word}, so tell me its path.",
        "[Under|At] which path is the file [in which {word} occurs|whose lines mention {word}|that says {word}]?",
        (
            "{word} [occurs|appears|can be found] in [a single|just one] file. "
            "[Give its path.|Answer with the path of that file.]"
        ),
    ),
    "find_size": (
        "What is the name of the largest file here?",
        "One file is bigger than all others. Give its name.",
        "Compare the sizes of the files and name the largest.",
        "Which of these files needs the most room on disk?",
        "Answer with the name of the heaviest file.",
        (
            "[Look at|Check|List] the sizes of [all files|the files here] and tell me "
            "[which file is the largest|the name of the largest]."
        ),
        (
            "The disk is [almost|nearly] full. "
            "[Which file is the largest?|Name the largest file.|What is the name of the biggest file?]"
        ),
        (
            "[Sort|Order|Rank] the files [by size|by number of bytes] and "
            "[name the largest|answer with the name of the biggest]."
        ),
        "[Name|Wanted: the name] of the [largest|biggest] file [here|in this folder].",
        "To [save space|make room], I will [begin with|look first at] the [largest|biggest] file. What is its name?",
        (
            "Of all files in this folder, which [has the most bytes|is the biggest|is the largest]? "
            "[Its name is enough.|Answer with the name.]"
        ),
    ),
    "find_name": (
        "Look for {name} below this folder. Which word does it hold?",
        "{name} lies in one of the folders. Answer with the word in it.",
        "Read the file {name}, wherever it is, and tell me its word.",
        "Open {name}, which is not in this folder but below it. What is the word?",
        "Which word did somebody write into {name}? Search the folders for it.",
        (
            "[One|Some] folder [has|holds|contains] a file named {name}. "
            "[Which word is in it?|Open it and answer with its word.]"
        ),
        "[Locate|Search for|Track down] {name} and [read|open] it. [Which word do you see?|What word does it hold?]",
        "[Word in|The word inside] {name}, [a file in some folder|a file in a folder below|wherever that file is].",
        (
            "[I cannot say|I do not know|Nobody remembers] which folder {name} is in. "
            "[Find it and tell me its word.|Search for it and answer with the word in it.]"
        ),
        (
            "Which word [does the file {name} contain|can be read in the file {name}|is stored in the file {name}]? "
            "[Its folder is unknown.|It may be in any folder.]"
        ),
        "[Go through|Search] the folders [for|until you find] {name}, then [tell me|answer with] the word in it.",
    ),
    "chain": (
        "{first} tells you which file to read next, and that one too. What word comes last?",
        "Follow the trail that starts with {first}. What is its last word?",
        "Open {first}, then the file named in it, until there is no next one. Answer with the word there.",
        "Each file points to another, beginning with {first}. Which word is at the end?",
        "From {first} on, every file gives the name of a file, until one gives a word. Tell me that word.",
        (
            "[Begin|Start] with {first}. [Every file names the next.|It leads to another file, and so on.] "
            "[What word is in the last?|Which word does the last one hold?]"
        ),
        (
            "The files form a chain, and {first} is its [first link|start]. [Find|Tell me] the word "
            "[in the last file|at its other end]."
        ),
        (
            "[Read|Open] {first}, [go on to|continue with] the file that it names, and repeat this until a file names "
            "no other. [What word is in that file?|Which word does that one hold?]"
        ),
        "[Chain|Trail|Series] of files, starting at {first}: [its last word|the word at its end], please.",
        (
            "I am looking for [a|the hidden] word. {first} is the first [clue|hint], "
            "[each file leads to another|every file names the next one], and the last one has the word. What is it?"
        ),
        "Which word do you [find|read|see] in the last file [if|when] you follow the names from {first} on?",
    ),
    "count_lines": (
        "Tell me how many lines all .{ending} files have together.",
        "Add up the lines of the .{ending} files. How many are there?",
        "How many lines would one file have, made of all .{ending} files?",
        "Answer with the total number of lines in files that end in .{ending}.",
        "The .{ending} files have some lines. Count them all.",
        (
            "Look at all .{ending} files [here|in this folder] and [count|add up] their lines. "
            "[What is the total?|Answer with the total.]"
        ),
        "[Line total of|Number of lines in] [*.{ending}|all .{ending} files], [as one number|added up].",
        "If I [print|read|copy] every .{ending} file, how many lines [is that in all|will there be in total]?",
        (
            "For [a summary|my records|an overview] I have to know how many lines the .{ending} files [have|contain] "
            "[together|in total]."
        ),
        (
            "[Ignore|Skip|Leave out] every file that does not end in .{ending}. How many lines do the others have "
            "[together|in total]?"
        ),
        (
            "[Each|Every] .{ending} file has a number of lines. "
            "[Add these numbers.|Sum these numbers up.|Give the sum of these numbers.]"
        ),
    ),
    "count_matches": (
        "There is a word in {note}. Count the lines of {names} that have it.",
        "How often is there a line with the word of {note} in {names}?",
        "Take the word from {note} and tell me how many lines of {names} mention it.",
        "Count, in {names}, the lines that contain what {note} says.",
        "How many lines with the word written in {note} are in {names}?",
        (
            "Open {note} [to see|to learn] which word is meant, then [tell me|find out] how many lines of {names} "
            "[have|contain] it."
        ),
        "[Number|Wanted: the number] of lines in {names} [with|containing|that mention] the word from {note}.",
        (
            "[I am looking for|Somebody asks about] a word in {names}; [it is written in|the word itself is in] "
            "{note}. How many lines [have it|match|contain it]?"
        ),
        (
            "Of the lines in {names}, how many [contain|have|mention] the word [that you find in|given in|stored in] "
            "{note}?"
        ),
        (
            "[Search|Scan] {names} for the word [kept|noted|written] in {note} and "
            "[count the matching lines|answer with the number of lines that have it]."
        ),
    ),
    "count_files": (
        "What is the number of files that end in .{ending}, with those in folders?",
        "Tell me how many .{ending} files lie here or in a folder below.",
        "Search all folders: how many files have the ending .{ending}?",
        "Count the .{ending} files of this folder and of all folders in it.",
        "Here and in the folders there are .{ending} files. How many?",
        (
            "[Go|Walk] through this folder and [everything|all folders] below and count "
            "[every .{ending} file|the files with the ending .{ending}]."
        ),
        "[Number|Total number] of .{ending} files, [subfolders included|counting subfolders|here and deeper down].",
        (
            "I want to [print|pack|save] all .{ending} files of this folder and of "
            "[every folder below|the folders in it]. How many [is that|are they]?"
        ),
        (
            "[Some|Several] files end in .{ending}, and they may be in any folder. "
            "[How many are there?|What is their number?|How many do you find?]"
        ),
        (
            "If you list all files, [also inside folders|also those in folders|folder by folder], how many "
            "[end in .{ending}|have the ending .{ending}]?"
        ),
        (
            "[Work out|Find out] how many .{ending} files [there are|exist] in this folder and "
            "[its subfolders|everything below it]."
        ),
    ),
    "total": (
        "Every line of the .{ending} files has a number. What is their sum?",
        "Give the sum of all numbers that the .{ending} files list.",
        "Calculate the total of the amounts in the .{ending} files.",
        "How much is it if you add all numbers of the .{ending} files?",
        "Add the numbers behind the names in the .{ending} files and answer with the sum.",
        (
            "Each line of the .{ending} files [ends in|ends with] a number. "
            "[What is their total?|What do all of them add up to?|Answer with the sum of them all.]"
        ),
        "[Total|Sum] of [all numbers|the second column] in [*.{ending}|the .{ending} files].",
        (
            "[I am checking the accounts|For the yearly accounts]: how much do the numbers in the .{ending} files "
            "[come to|amount to|add up to] [in all|altogether]?"
        ),
        (
            "[Read|Open] every .{ending} file and keep adding the numbers. "
            "[Which sum do you end with?|What is the result?|Which total do you reach?]"
        ),
        (
            "The .{ending} files [have|contain|hold] names and numbers. Ignore the names and "
            "[answer with the sum of|add up|calculate the sum of] the numbers."
        ),
        "What is the [grand total|overall sum] of the numbers that [you find|are] in the .{ending} files?",
    ),
    "extremum": (
        "Whose number in the .{ending} files is the highest?",
        "Give the name with the greatest number in the .{ending} files.",
        "Look for the highest score in the .{ending} files. Which name has it?",
        "Each line of the .{ending} files has a name and a number. Name the one with the largest number.",
        "Which name leads, by the numbers of the .{ending} files?",
        (
            "[Sort|Order|Rank] the lines of the .{ending} files by number. "
            "[Which name has the largest?|Whose number is the largest?]"
        ),
        "[Name|Wanted: the name] with the [highest|largest|maximum] number in [*.{ending}|all .{ending} files].",
        (
            "[A prize|An award] goes to the name with the [highest|largest] number in the .{ending} files. "
            "[Who gets it?|Which name gets it?|Name the winner.]"
        ),
        (
            "Which of the names in the .{ending} files [stands next to|is followed by|comes with] the "
            "[largest|highest] number?"
        ),
        (
            "[Compare|Read] all numbers in the .{ending} files, take the largest one and answer with "
            "[the name before it|the name on its line|its name]."
        ),
        (
            "No number in the .{ending} files is [higher|larger|greater] than that of one name. "
            "[Which name is that?|Tell me that name.]"
        ),
    ),
    "field": (
        "What does {table} say about the {column} of {who}?",
        "Read {table}: which {column} has {who}?",
        "Tell me the {column} that belongs to {who} in {table}.",
        "Find the row of {who} in {table} and answer with its {column}.",
        "By {table}, what {column} does {who} have?",
        (
            "[Open|Read] {table}, go to the [row|line] of {who} and tell me "
            "[the {column}|what the column {column} has there]."
        ),
        "[Wanted|Needed]: the {column} of {who}, [by|according to|from] {table}.",
        (
            "I am [filling in a form|writing a letter] for {who} and [lack|still need] the {column}. "
            "[What does {table} say?|Tell me what {table} says.]"
        ),
        "[Which|What] {column} is [listed|given|entered] for {who} in the [table|file] {table}?",
        (
            "In {table}, [go along|follow] the [row|line] of {who} to the column {column}. "
            "[What does the cell say?|Which word is in that cell?]"
        ),
        "{who} has [a row|an entry|a line] in {table}. [Answer with|Give me|Tell me] its {column}.",
    ),
    "compare": (
        "Which word is in one .{ending} file and not in the other?",
        "The two .{ending} files differ in one word. Tell me that word.",
        "Find the word that only one of the two .{ending} files has.",
        "What is the one word by which one .{ending} file is longer than the other?",
        "Look at both .{ending} files. Which word is missing in one of them?",
        (
            "[One|Exactly one] of the two .{ending} files has [an additional|one more] word. "
            "[Which word is it?|Answer with that word.]"
        ),
        (
            "[Wanted|Needed]: the word [present in just one|missing from one|found in only one] of the two .{ending} "
            "files."
        ),
        (
            "Somebody [copied|rewrote] a list and [left out|skipped|missed] one word. "
            "[The list and its copy are the .{ending} files here.|The .{ending} files here are the list and its "
            "copy.] Which word is it?"
        ),
        (
            "[Read|Open] the two .{ending} files and cross out every word that [is in both|both have]. "
            "[Which word is left?|What remains?]"
        ),
        (
            "The longer of the two .{ending} files has a word that the shorter [lacks|does not have|is without]. "
            "[Tell me|Give me|Answer with] that word."
        ),
        (
            "Are the two .{ending} files the same? [Not quite|Almost]: there is a word in [only|just] one of them. "
            "Which word?"
        ),
    ),
}
