"""The data of a `code` task, parsed and checked.

{"question": "…", "tests": [{"input": "1 2\\n", "output": "3\\n"}]}                       a program
{"question": "…", "entry_point": "add", "tests": [{"input": [1, 2], "output": 3}]}        a function, by its results
{"question": "…", "asserts": ["assert add(1, 2) == 3"]}                                   a function, by asserts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rollyard.core import DataField, Json, Task
from rollyard.envs.code.compare import TOLERANCE
from rollyard.envs.fields import Fields
from rollyard.sandbox.base import WORKDIR

TIME_S = 10.0
WAIT_S = 2.0
"""Added to the wall-clock limit of a test, for its start and for a busy machine."""

GIB = 1 << 30
LEAST_MEMORY_BYTES = 32 << 20
"""With less, Python itself does not start."""


@dataclass(frozen=True, slots=True)
class Language:
    """How a program is named, compiled and run. `memory_bytes` limits its address space if the task does not."""

    file: str
    command: str
    compile: str | None = None
    tags: tuple[str, ...] = ()  # tags of code blocks
    needs: tuple[str, ...] = ()  # programs that the image must have
    memory_bytes: int | None = 4 * GIB


LANGUAGES = {
    "python": Language("solution.py", "python3 solution.py", None, ("python", "python3", "py"), ("python3",)),
    "bash": Language("solution.sh", "bash solution.sh", None, ("bash", "sh", "shell"), ("bash",)),
    "c": Language("solution.c", "./solution", "gcc -O2 -std=c17 -o solution solution.c -lm", ("c",), ("gcc",)),
    "cpp": Language(
        "solution.cpp", "./solution", "g++ -O2 -std=c++17 -o solution solution.cpp", ("cpp", "c++", "cc"), ("g++",)
    ),
    # V8 reserves far more addresses than it uses, so only the sandbox's memory limit applies.
    "javascript": Language(
        "solution.js", "node solution.js", None, ("javascript", "js", "node"), ("node",), memory_bytes=None
    ),
}


FIELDS = (
    DataField("question", "string", "The problem."),
    DataField("tests", "list of objects", "Hidden tests; either these or `asserts`.", "[]"),
    DataField("tests[].input", "string or list", "Standard input; with `entry_point`, the arguments of a call."),
    DataField("tests[].output", "string or JSON", "The right output; with `entry_point`, the right result."),
    DataField("tests[].outputs", "list", "Instead of `output`: several right outputs.", "none"),
    DataField("asserts", "list of strings", "Hidden tests as Python statements.", "[]"),
    DataField(
        "public_tests",
        "list",
        "Tests, or texts, that the prompt shows; they count only if they are also in `tests`.",
        "[]",
    ),
    DataField(
        "entry_point", "string or null", "The function that tests call; null: the solution is a program.", "null"
    ),
    DataField("prelude", "string", "Python code that runs before a called solution, such as imports.", '""'),
    DataField("starter_code", "string or null", "Code that the prompt shows as the beginning.", "null"),
    DataField("solution", "string or null", "The reference solution, for the oracle.", "null"),
    DataField("system_prompt", "string or null", "The system message.", "null"),
    DataField(
        "language",
        "string",
        f"One of {', '.join(sorted(LANGUAGES))}; or another, with `file` and `command`.",
        '"python"',
    ),
    DataField("file", "string", "Name of the solution's file, for another language.", "the language's"),
    DataField("command", "string", "Runs the solution, for another language.", "the language's"),
    DataField("compile", "string", "Compiles the solution, for another language.", "the language's"),
    DataField("time_s", "number above 0", "CPU seconds of one test.", f"{TIME_S:g}"),
    DataField(
        "memory_bytes", f"whole number from {LEAST_MEMORY_BYTES}", "Address space of one test.", "the language's"
    ),
    DataField("reward", "all or share", "1 if all tests pass, or the share that passes.", '"all"'),
    DataField(
        "tolerance",
        "number above 0",
        "Difference, absolute or relative, at which two fractions are equal.",
        f"{TOLERANCE:g}",
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """An input (a string for standard input, or a call's arguments), and the accepted outputs."""

    input: Json
    accepted: tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class CodeData:
    """A task's data, parsed."""

    question: str
    language_name: str
    language: Language
    tests: tuple[Case, ...]
    asserts: tuple[str, ...]
    public_tests: tuple[Case | str, ...]
    entry_point: str | None
    prelude: str
    starter_code: str | None
    solution: str | None
    system_prompt: str | None
    time_s: float
    memory_bytes: int | None
    reward: Literal["all", "share"]
    tolerance: float

    @property
    def path(self) -> str:
        return f"{WORKDIR}/{self.language.file}"

    @property
    def is_called(self) -> bool:
        """Whether tests call the solution's functions; else it is a program that reads stdin and writes stdout."""
        return bool(self.asserts) or self.entry_point is not None

    @property
    def wall_s(self) -> float:
        """The wall-clock limit of one test, for programs that wait for ever. `time_s` limits CPU time, which does not
        depend on other rollouts on the machine."""
        return 2 * self.time_s + WAIT_S

    @classmethod
    def read(cls, task: Task) -> CodeData:
        """Parses the data. Raises TaskInvalid with the field that is wrong."""
        fields = Fields(task)
        entry_point = fields.optional_text("entry_point")
        if entry_point is not None and not entry_point.isidentifier():
            raise fields.wrong("entry_point", "the name of a function")
        name, language = _language(fields)
        data = cls(
            question=fields.text("question"),
            language_name=name,
            language=language,
            tests=tuple(_tests(task, fields, "tests", entry_point)),
            asserts=fields.texts("asserts"),
            public_tests=_public_tests(task, fields, entry_point),
            entry_point=entry_point,
            prelude=fields.optional_text("prelude") or "",
            starter_code=fields.optional_text("starter_code"),
            solution=fields.optional_text("solution"),
            system_prompt=fields.optional_text("system_prompt"),
            time_s=fields.positive("time_s", TIME_S),
            memory_bytes=_memory_bytes(fields, language),
            reward=_reward(fields),
            tolerance=fields.positive("tolerance", TOLERANCE),
        )
        fields.done()
        if bool(data.tests) == bool(data.asserts):
            raise fields.wrong("tests", "either at least one test here, or at least one of data.asserts,")
        if data.is_called and (name != "python" or language != LANGUAGES["python"]):
            raise fields.wrong("language", "python, the only language whose functions can be called,")
        if data.prelude and not data.is_called:
            raise fields.wrong("prelude", "nothing, as this task's solution is a program,")
        return data


def _language(fields: Fields) -> tuple[str, Language]:
    name = fields.optional_text("language") or "python"
    file, command, compile_command = (fields.optional_text(field) for field in ("file", "command", "compile"))
    if file is not None and (not file.strip() or "/" in file or file in (".", "..") or "\0" in file):
        raise fields.wrong("file", f"the name of a file in {WORKDIR}")
    known = LANGUAGES.get(name)
    if known is None and not (file and command):
        names = ", ".join(sorted(LANGUAGES))
        raise fields.wrong("language", f"one of {names}, or another with data.file and data.command,")
    if known is None or command:
        if not (file and command):
            raise fields.wrong("file", "the name of the file that data.command runs")
        return name, Language(
            file, command, compile_command, (known or Language("", "", tags=(name,))).tags, memory_bytes=None
        )
    if compile_command is not None or file is not None:
        raise fields.wrong("command", "the command that runs the solution, with data.file and data.compile,")
    return name, known


def _memory_bytes(fields: Fields, language: Language) -> int | None:
    if fields.get("memory_bytes") is None:
        return language.memory_bytes
    memory_bytes = int(fields.positive("memory_bytes", 0))
    if memory_bytes < LEAST_MEMORY_BYTES:
        raise fields.wrong("memory_bytes", f"at least {LEAST_MEMORY_BYTES} (bytes)")
    return memory_bytes


def _tests(task: Task, fields: Fields, name: str, entry_point: str | None) -> list[Case]:
    return [_test(task, fields, item, f"{name}[{index}]", entry_point) for index, item in enumerate(fields.items(name))]


def _test(task: Task, fields: Fields, item: Json, where: str, entry_point: str | None) -> Case:
    if not isinstance(item, Mapping):
        raise fields.wrong(where, "an object with input and output")
    own = Fields(task, item, f"data.{where}")
    test_input = own.get("input")
    if "outputs" in item:
        accepted = tuple(own.items("outputs"))
    else:
        accepted = (own.get("output"),) if "output" in item else ()
    if not accepted:
        raise own.wrong("output", "the right output, or in `outputs` a list of right outputs,")
    if entry_point is None:
        if not isinstance(test_input, str):
            raise own.wrong("input", "a string for standard input (arguments of a call need data.entry_point)")
        if not all(isinstance(output, str) for output in accepted):
            raise own.wrong("output", "a string")
    else:
        test_input = own.items("input")
    own.done()
    return Case(test_input, accepted)


def _public_tests(task: Task, fields: Fields, entry_point: str | None) -> tuple[Case | str, ...]:
    cases: list[Case | str] = []
    for index, item in enumerate(fields.items("public_tests")):
        is_text = isinstance(item, str)
        cases.append(item if is_text else _test(task, fields, item, f"public_tests[{index}]", entry_point))
    return tuple(cases)


def _reward(fields: Fields) -> Literal["all", "share"]:
    reward = fields.optional_text("reward") or "all"
    if reward == "all" or reward == "share":
        return reward
    raise fields.wrong("reward", '"all" or "share"')
