"""The agent's prompt: the question, the given code and examples, what to write, and where to save it."""

from __future__ import annotations

import json

from rollyard.core import Json
from rollyard.envs.code.data import Case, CodeData


def prompt(data: CodeData) -> str:
    parts = [data.question.strip()]
    if data.starter_code:
        parts.append(f"Start from this code:\n\n{_block(data.starter_code, data.language_name)}")
    if data.public_tests:
        examples = [_example(test, data) for test in data.public_tests]
        parts.append("\n\n".join([f"Example{'s' if len(examples) > 1 else ''}:", *examples]))
    parts.append(f"{_requirement(data)} {_bounds(data)}")
    parts.append(f"Save it as {data.path}. If you have no tools, end your answer with all of it in one code block.")
    return "\n\n".join(parts)


def _requirement(data: CodeData) -> str:
    if not data.is_called:
        return f"Write a {data.language_name} program that reads standard input and writes to standard output."
    if data.entry_point is None:
        return "Write Python code that defines what is asked for. It is imported, and called by tests."
    return f"Write Python code that defines `{data.entry_point}`. It is imported, and called by tests."


def _bounds(data: CodeData) -> str:
    memory = f" and {data.memory_bytes >> 20} MiB of memory" if data.memory_bytes is not None else ""
    return f"Each test may take {data.time_s:g} s{memory}."


def _example(test: Case | str, data: CodeData) -> str:
    if isinstance(test, str):
        return _block(test, "python")
    if data.entry_point is not None and not isinstance(test.input, str):
        arguments = ", ".join(_literal(argument) for argument in test.input)  # type: ignore[union-attr]
        return _block(f"{data.entry_point}({arguments}) → {_literal(test.accepted[0])}")
    return f"Input:\n{_block(str(test.input))}\nOutput:\n{_block(str(test.accepted[0]))}"


def _literal(value: Json) -> str:
    """The value as a Python literal."""
    return repr(json.loads(json.dumps(value)))


def _block(text: str, tag: str = "") -> str:
    return f"```{tag}\n{text.rstrip()}\n```"
