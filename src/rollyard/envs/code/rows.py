"""Converts rows of public datasets to tasks. A row's fields identify its dataset.

APPS, TACO       question, input_output {inputs, outputs, fn_name}, solutions, starter_code
LiveCodeBench    question_content, public_test_cases, private_test_cases, starter_code, metadata {func_name}
Codeforces       description, input_format, output_format, examples, official_tests, time_limit, memory_limit
HumanEval        prompt, test, entry_point, canonical_solution
MBPP             text or prompt, code, test_list, test_setup_code or test_imports
Rollyard         question, and tests or asserts: the data of a task, unchanged
"""

from __future__ import annotations

import ast
import base64
import binascii
import io
import json
import pickle
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, cast

from rollyard.core import Json
from rollyard.core.failure import TaskInvalid
from rollyard.envs.base import check_options
from rollyard.envs.code.data import TIME_S

Row = Mapping[str, Json]
Data = dict[str, Json]

OPTIONS = ("image", "language", "memory_bytes", "reward", "time_s")

MOST_TESTS_BYTES = 512 << 20
"""The limit of one row's unpacked tests: the largest in LiveCodeBench have a hundred megabytes."""

INTERPRETER_BYTES = 256 << 20
"""Added to a contest's memory limit: the contest limits resident memory, Rollyard limits address space."""

EVAL_S, MOST_EVAL_S = 600.0, 7200.0


def body_of(row: Row, options: Mapping[str, str]) -> Mapping[str, Json]:
    """Returns the task's body. Raises TaskInvalid."""
    check_options("code", options, OPTIONS)
    for fields, read in FORMATS:
        if all(row.get(field) is not None for field in fields):
            data = read(row)
            break
    else:
        known = "; ".join(", ".join(fields) for fields, _ in FORMATS)
        raise TaskInvalid(f"code: a row of an unknown dataset; known rows have one of: {known}")
    for name in ("language", "reward"):
        if name in options:
            data[name] = options[name]
    for name in ("memory_bytes", "time_s"):
        if name in options:
            data[name] = _number(name, options[name])
    body: dict[str, Json] = {"environment": "code", "data": {name: it for name, it in data.items() if it is not None}}
    if "image" in options:
        body["sandbox"] = {"image": options["image"]}
    # Enough for a solution that uses its whole time limit in every test.
    time_s = data.get("time_s") or TIME_S
    eval_s = 60 + _count(data) * (time_s if isinstance(time_s, int | float) else TIME_S)
    if eval_s > EVAL_S:
        body["limits"] = {"eval_s": min(eval_s, MOST_EVAL_S)}
    return body


# --- the datasets -------------------------------------------------------------------------------------


def _apps(row: Row) -> Data:
    tests = _object(_parsed(row, "input_output"), "input_output")
    inputs, outputs = _list(tests.get("inputs"), "inputs"), _list(tests.get("outputs"), "outputs")
    if len(inputs) != len(outputs):
        _wrong("input_output", f"as many outputs as inputs ({len(inputs)})")
    entry_point = tests.get("fn_name")
    make = _program_test if entry_point is None else _call_test
    solutions = _list(_parsed(row, "solutions"), "solutions") if row.get("solutions") else ()
    return {
        "question": _text(row, "question"),
        "entry_point": entry_point,
        "tests": [make(test_input, output) for test_input, output in zip(inputs, outputs, strict=True)],
        "starter_code": row.get("starter_code") or None,
        "solution": solutions[0] if solutions else None,
    }


def _program_test(test_input: Json, output: Json) -> Json:
    """Some rows contain lists of lines."""
    return {"input": _lines(test_input), "output": _lines(output)}


def _lines(value: Json) -> str:
    return value if isinstance(value, str) else "\n".join(str(line) for line in _list(value, "input_output"))


def _call_test(arguments: Json, output: Json) -> Json:
    """Many rows wrap a result in a list, and nothing marks them, so both forms are accepted."""
    is_single = isinstance(output, list) and len(output) == 1
    return {"input": arguments, "outputs": [output, cast("list[Json]", output)[0]] if is_single else [output]}


def _live_code_bench(row: Row) -> Data:
    public = _list(_parsed(row, "public_test_cases"), "public_test_cases")
    private = _list(_private(row.get("private_test_cases")), "private_test_cases")
    metadata = _object(_parsed(row, "metadata"), "metadata") if row.get("metadata") else {}
    entry_point = metadata.get("func_name")
    shown = [_lcb_test(test, entry_point) for test in public]
    return {
        "question": _text(row, "question_content"),
        "entry_point": entry_point,
        "public_tests": shown,
        "tests": [*shown, *(_lcb_test(test, entry_point) for test in private)],
        "starter_code": row.get("starter_code") or None,
    }


def _lcb_test(test: Json, entry_point: Json) -> Json:
    fields = _object(test, "public_test_cases")
    test_input, output = fields.get("input"), fields.get("output")
    if entry_point is None:
        return {"input": test_input, "output": output}
    if not isinstance(test_input, str) or not isinstance(output, str):
        _wrong("public_test_cases", "strings for input and output")
    lines = [line for line in test_input.split("\n") if line.strip()]  # not splitlines: a string may contain U+2028
    return {"input": [_json(line, "input") for line in lines], "output": _json(output, "output")}


def _private(value: Json) -> Json:
    """JSON, or a JSON string that is pickled, compressed and base64-encoded."""
    if not value or not isinstance(value, str):
        return value or []
    if value.lstrip().startswith("["):
        return _json(value, "private_test_cases")
    try:
        unpacker = zlib.decompressobj()
        packed = unpacker.decompress(base64.b64decode(value, validate=True), MOST_TESTS_BYTES)
        if not unpacker.eof:
            raise ValueError(f"more than {MOST_TESTS_BYTES >> 20} MiB, or cut off")
        text = _OnlyData(io.BytesIO(packed)).load()
    except (ValueError, EOFError, binascii.Error, zlib.error, pickle.UnpicklingError, LookupError, TypeError) as error:
        raise TaskInvalid(f"code: private_test_cases: neither JSON nor packed JSON: {error}") from error
    return _json(text if isinstance(text, str) else "", "private_test_cases")


class _OnlyData(pickle.Unpickler):
    """Loads only strings, numbers and lists. A pickle that names a class or function could run any code."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, and only data is loaded")


def _codeforces(row: Row) -> Data:
    for field, why in (
        ("interaction_format", "it is interactive"),
        ("generated_checker", "several answers are right, and only its own checker can verify them"),
    ):
        if row.get(field):
            raise TaskInvalid(f"code: {field}: this problem is not supported: {why}")
    if row.get("input_mode") not in (None, "stdio"):
        raise TaskInvalid("code: input_mode: this problem is not supported: it reads and writes files")
    parts = [str(row[name]).strip() for name in ("description",) if row.get(name)]
    for name, title in (("input_format", "Input"), ("output_format", "Output"), ("note", "Note")):
        if row.get(name):
            parts.append(f"{title}\n\n{str(row[name]).strip()}")
    memory = row.get("memory_limit")
    return {
        "question": "\n\n".join(parts),
        "public_tests": _pairs(row.get("examples") or [], "examples"),
        "tests": _pairs(row.get("official_tests"), "official_tests"),
        "time_s": row.get("time_limit"),
        "memory_bytes": int(memory * (1 << 20)) + INTERPRETER_BYTES if isinstance(memory, int | float) else None,
    }


def _pairs(value: Json, field: str) -> list[Json]:
    tests = [_object(test, field) for test in _list(value, field)]
    return [{"input": test.get("input"), "output": test.get("output")} for test in tests]


def _human_eval(row: Row) -> Data:
    prompt, entry_point = _text(row, "prompt"), _text(row, "entry_point")
    canonical = row.get("canonical_solution")
    return {
        "question": f"Complete this function:\n\n```python\n{prompt.rstrip()}\n```",
        "entry_point": entry_point,
        "asserts": [f"{_text(row, 'test')}\n\ncheck({entry_point})"],
        "prelude": prompt,  # it may define what the tests use, and imports that a completion omits
        "solution": prompt + canonical if isinstance(canonical, str) else None,
    }


def _mbpp(row: Row) -> Data:
    question = row.get("text") or row.get("prompt")
    tests = [str(test) for test in _list(row.get("test_list"), "test_list")]
    harder = [str(test) for test in _list(row.get("challenge_test_list") or [], "challenge_test_list")]
    code = _text(row, "code")
    imports = [str(line) for line in _list(row.get("test_imports") or [], "test_imports")]
    before = "\n".join([*imports, str(row.get("test_setup_code") or ""), ""]).lstrip()  # may use the solution's classes
    return {
        "question": question,
        "entry_point": _tested(code, tests),
        "asserts": [before + test for test in (*tests, *harder)],
        "public_tests": tests[:1],  # shows the function's name
        "solution": code,
    }


def _tested(code: str, tests: Sequence[str]) -> str | None:
    """The function of the code that the tests call, if there is exactly one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the dataset's code
            defined = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
            used = {node.id for test in tests for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    names = sorted(defined & used)
    return names[0] if len(names) == 1 else None


def _rollyard(row: Row) -> Data:
    return dict(row)


FORMATS: tuple[tuple[tuple[str, ...], Callable[[Row], Data]], ...] = (
    (("question", "input_output"), _apps),
    (("question_content", "public_test_cases"), _live_code_bench),
    (("description", "official_tests"), _codeforces),
    (("prompt", "test", "entry_point"), _human_eval),
    (("code", "test_list"), _mbpp),
    (("question", "tests"), _rollyard),
    (("question", "asserts"), _rollyard),
)


# --- values -------------------------------------------------------------------------------------------


def _wrong(field: str, expected: str) -> NoReturn:
    raise TaskInvalid(f"code: {field}: {expected} was expected", field=field)


def _json(text: str, field: str) -> Json:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskInvalid(f"code: {field}: JSON was expected: {error}", field=field) from error


def _parsed(row: Row, field: str) -> Json:
    """Most datasets have JSON as a string; in some it is already parsed."""
    value = row.get(field)
    return _json(value, field) if isinstance(value, str) else value


def _text(row: Row, field: str) -> str:
    value = row.get(field)
    return value if isinstance(value, str) else _wrong(field, "a string")


def _list(value: Json, field: str) -> Sequence[Json]:
    return value if isinstance(value, list | tuple) else _wrong(field, "a list")


def _object(value: Json, field: str) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else _wrong(field, "an object")


def _number(name: str, text: str) -> float | int:
    try:
        return int(text) if name == "memory_bytes" else float(text)
    except ValueError:
        raise TaskInvalid(f"code: {name}={text}: a number was expected") from None


def _count(data: Data) -> int:
    tests = data.get("tests") or data.get("asserts")
    return len(tests) if isinstance(tests, list | tuple) else 0
