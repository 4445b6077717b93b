"""The child process that runs `math-verify`.

In:  ["the known answer", "the agent's answer", a relative tolerance or null]     Out: {"same": true}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

from rollyard.core import Json
from rollyard.envs.children import answer_lines

_WORDS = re.compile(r"(?=.*[^\W\d_]{4})[^\W\d_]+(?: [^\W\d_]+)*")
"""Words: letters only, at least four in a row somewhere. A product of variables is shorter."""
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\{([^{}]*)\}")
_DELIMITER = re.compile(r"(?<!\\)\$|\\boxed")
"""Marks a formula. \\$18 has none: it is an amount of money."""


def same(known: str, answer: str, tolerance: float | None = None) -> bool:
    """Whether both are equal by math-verify or the same text; with a tolerance, whether they are numbers that differ by
    at most that share of the known one."""
    from math_verify import parse, verify

    known_words, answer_words = _words(known), _words(answer)
    if known.strip() == answer.strip() or (known_words and known_words == answer_words):
        return True
    if _WORDS.fullmatch(known_words):  # math-verify reads words as products of letters: Paris = Pairs
        return known_words.casefold() == answer_words.casefold()
    read = cast("Callable[[str], Sequence[Any]]", parse)
    gold, parsed_answer = read(_as_latex(known)), read(_as_latex(answer))
    if not gold or not parsed_answer:
        return False
    if tolerance is None:
        return bool(verify(list(gold), list(parsed_answer)))
    expected, number = _number(gold[0]), _number(parsed_answer[0])
    return expected is not None and number is not None and abs(number - expected) <= tolerance * abs(expected)


def _number(value: Any) -> float | None:
    """The numeric value of an expression, or of the right side of an equation."""
    from sympy import Eq, Expr

    value = value.rhs if isinstance(value, Eq) else value
    if not isinstance(value, Expr) or not value.is_number:
        return None
    try:
        return float(value.evalf())
    except (TypeError, ValueError):  # complex, or undefined
        return None


def _words(text: str) -> str:
    return _TEXT.sub(r"\1", text).strip("$ ").removesuffix(".").strip("$ ")


def _as_latex(text: str) -> str:
    return text if _DELIMITER.search(text) else f"\\boxed{{{text}}}"


def _answered(question: Json) -> Json:
    return {"same": same(*cast("list[Any]", question))}


def main() -> None:
    same("1", "2")  # imports and builds the grammars before the child reports that it is ready
    answer_lines(_answered)


if __name__ == "__main__":
    main()
