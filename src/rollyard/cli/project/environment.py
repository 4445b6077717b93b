"""The environment PROJECT: the model answers a question about a file with one shell command, and EVAL runs it.

`KINDS` are the questions; each has a wording, the command of the oracle, and the lines that it must print. The training
tasks and the held-out tasks have different words and files. Change this file to make the environment your own.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rollyard.envs import EnvContext, Environment, Evidence, Plan, Score, Solution, Start, Task, TaskInvalid

SYSTEM = "Answer with one shell command."

Expected = Callable[[list[str], str, int], list[str]]
KINDS: dict[str, tuple[str, str, Expected]] = {
    "count": ("Print the number of lines of {file}.", "wc -l < {file}", lambda lines, word, n: [str(len(lines))]),
    "first": ("Print the first {n} lines of {file}.", "head -n {n} {file}", lambda lines, word, n: lines[:n]),
    "last": ("Print the last {n} lines of {file}.", "tail -n {n} {file}", lambda lines, word, n: lines[-n:]),
    "with": (
        "Print the lines of {file} that contain {word}.",
        "grep {word} {file}",
        lambda lines, word, n: [line for line in lines if word in line],
    ),
    "sorted": ("Print the lines of {file} in alphabetical order.", "sort {file}", lambda lines, word, n: sorted(lines)),
}
SPLITS = {
    "train": (
        "apple brick cloud dance eagle flame grape house juice knife lemon mouse night ocean paper queen",
        "app.log notes.txt list.txt data.csv names.txt error.log items.csv words.txt",
    ),
    "held_out": (
        "river stone table uncle voice water bread chair dress field glass horse light music plant tower",
        "web.log tasks.txt index.txt users.csv places.txt mail.log stock.csv terms.txt",
    ),
}


class Commands(Environment):
    """One question about one file, answered by one shell command."""

    name = "PROJECT"

    def check(self, task: Task) -> None:
        """Refuses a task that can never work. Called when a task is submitted."""
        for field in ("instruction", "file", "text", "output", "command"):
            if not isinstance(task.data.get(field), str):
                raise TaskInvalid(f"data.{field}: a text was expected")

    def plan(self, task: Task) -> Plan:
        """RUN is one reply of the model and needs no sandbox. EVAL has one."""
        return Plan(needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        """Returns the messages that the model gets."""
        instruction = str(context.task.data["instruction"])
        return Start(({"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}))

    async def solve(self, context: EnvContext, tools: Mapping[str, Any]) -> Solution:
        """The oracle: the answer of a perfect model."""
        return Solution(answer=str(context.task.data["command"]))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        """Runs the answer in a fresh sandbox that has the task's file, and compares what it prints."""
        data = context.task.data
        await context.box.write(f"/workspace/{data['file']}", str(data["text"]).encode())
        command = evidence.answer.strip().replace("\0", "")
        result = await context.run(command or "false", timeout_s=5.0)
        is_right = result.stdout.decode(errors="replace").split() == str(data["output"]).split()
        return Score(float(is_right), metrics={"exit_status": float(result.status)})

    def generate(self, options: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
        """Generates tasks, for draws and for `rollyard tasks import PROJECT --set split=held_out --set count=50`."""
        split, count = options.get("split", "train"), int(options.get("count", "10"))
        chance = random.Random(f"{split}/{options.get('seed', '0')}")
        for number in range(count):
            yield make_task(list(KINDS)[number % len(KINDS)], split, chance)


def make_task(kind: str, split: str, chance: random.Random) -> Mapping[str, Any]:
    """Returns a task with a random word, file and number."""
    words, files = (text.split() for text in SPLITS[split])
    word, file, n = chance.choice(words), chance.choice(files), chance.randint(2, 6)
    lines = [word, word, *chance.choices(words, k=chance.randint(6, 9))]
    chance.shuffle(lines)
    instruction, command, expected = KINDS[kind]
    data = {
        "kind": kind,
        "instruction": instruction.format(file=file, word=word, n=n),
        "file": file,
        "text": "".join(f"{line}\n" for line in lines),
        "output": "\n".join(expected(lines, word, n)),
        "command": command.format(file=file, word=word, n=n),
    }
    return {
        "environment": "PROJECT",
        "data": data,
        "sampling": {"temperature": 1.0, "max_tokens": 16},
        "limits": {"max_turns": 1},
    }
