"""Compares a program's output with the expected output. Runs in the service: no expected value enters a sandbox.

Standard output is compared line by line and word by word. The amount of white space between words does not matter, nor
do white space and empty lines at both ends. If the expected word is a decimal fraction (`0.5`, `1e-9`), the given word
may differ by the tolerance, absolute or relative; every other word must match exactly.

Results of calls are compared as JSON: a tuple is a list, a key is a string, and if one of two numbers is a float, they
may differ by the tolerance. True equals 1, as in Python.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

TOLERANCE = 1e-6

_FRACTION = re.compile(r"[+-]?(\d{0,40}\.\d{0,40}|\d{1,40}(?=[eE]))([eE][+-]?\d{1,4})?", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d{0,400}\.?\d{0,400}([eE][+-]?\d{1,4})?", re.ASCII)


def is_same_output(actual: str, expected: str, tolerance: float = TOLERANCE) -> bool:
    if actual == expected:
        return True
    expected_lines, actual_lines = expected.strip().splitlines(), actual.strip().splitlines()
    return len(expected_lines) == len(actual_lines) and all(
        _is_same_line(actual_line.split(), expected_line.split(), tolerance)
        for actual_line, expected_line in zip(actual_lines, expected_lines, strict=True)
    )


def is_same_result(actual: object, expected: object, tolerance: float = TOLERANCE) -> bool:
    if isinstance(expected, int) and isinstance(actual, int):
        return actual == expected
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return _is_close(actual, expected, tolerance)
    if expected is None or isinstance(expected, str):
        return actual == expected
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping):
            return False
        actual_by_key = {str(key): value for key, value in actual.items()}
        return actual_by_key.keys() == expected.keys() and all(
            is_same_result(actual_by_key[key], value, tolerance) for key, value in expected.items()
        )
    if isinstance(expected, Sequence) and isinstance(actual, list | tuple) and len(actual) == len(expected):
        return all(
            is_same_result(actual_item, expected_item, tolerance)
            for actual_item, expected_item in zip(actual, expected, strict=True)
        )
    return False


def _is_same_line(actual: list[str], expected: list[str], tolerance: float) -> bool:
    return len(actual) == len(expected) and all(
        actual_word == expected_word or _is_near(actual_word, expected_word, tolerance)
        for actual_word, expected_word in zip(actual, expected, strict=True)
    )


def _is_near(actual: str, expected: str, tolerance: float) -> bool:
    if not _FRACTION.fullmatch(expected) or not _NUMBER.fullmatch(actual):
        return False
    try:
        return _is_close(float(actual), float(expected), tolerance)
    except ValueError:  # only a sign or a point
        return False


def _is_close(actual: float, expected: float, tolerance: float) -> bool:
    try:
        return math.isclose(actual, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer too large for a float
        return False
