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


def is_same_output(given: str, expected: str, tolerance: float = TOLERANCE) -> bool:
    if given == expected:
        return True
    ours, theirs = expected.strip().splitlines(), given.strip().splitlines()
    return len(ours) == len(theirs) and all(
        _is_same_line(there.split(), here.split(), tolerance) for there, here in zip(theirs, ours, strict=True)
    )


def is_same_result(given: object, expected: object, tolerance: float = TOLERANCE) -> bool:
    if isinstance(expected, int) and isinstance(given, int):
        return given == expected
    if isinstance(expected, int | float) and isinstance(given, int | float):
        return _is_close(given, expected, tolerance)
    if expected is None or isinstance(expected, str):
        return given == expected
    if isinstance(expected, Mapping):
        if not isinstance(given, Mapping):
            return False
        found = {str(key): value for key, value in given.items()}
        return found.keys() == expected.keys() and all(
            is_same_result(found[key], value, tolerance) for key, value in expected.items()
        )
    if isinstance(expected, Sequence) and isinstance(given, list | tuple) and len(given) == len(expected):
        return all(is_same_result(mine, its, tolerance) for mine, its in zip(given, expected, strict=True))
    return False


def _is_same_line(given: list[str], expected: list[str], tolerance: float) -> bool:
    return len(given) == len(expected) and all(
        mine == its or _is_near(mine, its, tolerance) for mine, its in zip(given, expected, strict=True)
    )


def _is_near(given: str, expected: str, tolerance: float) -> bool:
    if not _FRACTION.fullmatch(expected) or not _NUMBER.fullmatch(given):
        return False
    try:
        return _is_close(float(given), float(expected), tolerance)
    except ValueError:  # only a sign or a point
        return False


def _is_close(given: float, expected: float, tolerance: float) -> bool:
    try:
        return math.isclose(given, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer too large for a float
        return False
