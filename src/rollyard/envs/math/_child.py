"""The child process that runs `math-verify`.

In:  ["the known answer", "the agent's answer", a relative tolerance or null]     Out: {"same": true}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from rollyard.core import Json
from rollyard.envs.children import answer_lines

_WORDS = re.compile(r"(?=.*[^\W\d_]{4})[^\W\d_]+(?: [^\W\d_]+)*")
"""Words: letters only, at least four in a row somewhere. A product of variables is shorter."""
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\{([^{}]*)\}")
_PERCENT = re.compile(
    r"\s*(?:\\?%|(?<![a-zA-Z])(?:percent(?:age)?|pct)|\\text\{(?:percent(?:age)?|pct)\})\s*(?=[\s$})\\.]*$)"
)
_STRUCTURE = re.compile(r"\\(?:[dt]?frac|sqrt|cdot|times|left|right|boxed|q?quad|[,;:! ])")
_UNIT_TEXT = re.compile(
    r"(?:(?:[\s/~]|\\[,;:! ]|\\cdot)*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\^\d|\^\{-?\d\})?)+(?=[\s$.]*$)"
)
"""Text at the end, such as \\text{ m}. It is a unit, which math-verify removes, whatever precedes it."""
_LAST_LETTER = re.compile(r"(.*[\d}\s])\s*(ab|bc|[cdghlmost])[\s}$]*$", re.DOTALL)
"""What math-verify removes as a unit, and what may be variables. Other letters it leaves alone."""
_UNITS = frozenset("mgslh")
_RELATION = re.compile(r"=|\\approx|≈")
_CLOSE = 1e-3
"""math-verify accepts decimals that differ by less than 5e-7, however small they are. They must also be this close,
relative to the larger one."""
_DIGITS = 60  # of numbers that have no exact value
_DELIMITER = re.compile(r"(?<!\\)\$|\\boxed")
"""Marks a formula. \\$18 has none: it is an amount of money."""


def same(known: str, answer: str, tolerance: float | None = None) -> bool:
    """Whether both are equal by math-verify or the same text; with a tolerance, whether they are numbers that differ by
    at most that share of the known one."""
    known, answer = " ".join(known.split()), " ".join(answer.split())  # 10,000 spaces would take the patterns seconds
    known_words, answer_words = _words(known), _words(answer)
    if known.strip() == answer.strip() or (known_words and known_words == answer_words):
        return True
    if _WORDS.fullmatch(known_words):  # math-verify reads words as products of letters: Paris = Pairs
        return known_words.casefold() == answer_words.casefold()
    if tolerance is None:
        is_same = _equal(known, answer)
        if not is_same and bool(_PERCENT.search(known)) != bool(_PERCENT.search(answer)):  # of "what percent?"
            is_same = _equal(_PERCENT.sub("", known), _PERCENT.sub("", answer))
        return is_same
    gold, parsed_answer = _parsed(known, answer)
    if not gold or not parsed_answer:
        return False
    expected, number = _number(gold[0]), _number(parsed_answer[0])
    return expected is not None and number is not None and abs(number - expected) <= tolerance * abs(expected)


def _equal(known: str, answer: str) -> bool:
    from math_verify import verify

    gold, parsed_answer = _parsed(known, answer)
    if not gold or not parsed_answer:
        return False
    return bool(verify(gold, parsed_answer)) and _may_be_equal(gold[0], parsed_answer[0])


def _parsed(known: str, answer: str) -> tuple[list[Any], list[Any]]:
    """Both, read in the same way: with the case of letters, if one of the texts has a letter in both cases, and with a
    letter at the end as a variable, if it is one in one of the texts. Units in \\text are removed in any case."""
    from latex2sympy2_extended import NormalizationConfig
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, parser

    has_case = _has_case(known) or _has_case(answer)
    has_units = not (_ends_in_variable(known) or _ends_in_variable(answer))
    module: Any = parser
    module.latex2sympy = partial(latex2sympy, conversion_config=ConversionConfig(lowercase_symbols=not has_case))
    module.parse_latex_cached.cache_clear()  # its keys do not include the configuration
    module.extract_latex.cache_clear()
    normal = NormalizationConfig(
        basic_latex=True, units=has_units, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    targets = (LatexExtractionConfig(normalization_config=normal), ExprExtractionConfig())
    read = cast("Callable[..., Sequence[Any]]", parse)
    if not has_units:
        known, answer = _without_unit_text(known), _without_unit_text(answer)
    return list(read(_as_latex(known), targets)), list(read(_as_latex(answer), targets))


def _has_case(text: str) -> bool:
    """Whether a letter stands there in upper and in lower case: \\frac{Mv}{M+m}."""
    letters = set(re.sub(r"\\[a-zA-Z]+", " ", _TEXT.sub(" ", text)))
    return any(letter.isalpha() and letter.swapcase() in letters for letter in letters)


def _ends_in_variable(text: str) -> bool:
    """Whether the letter at the end is a variable: 6t, \\pi r^2 h. In 5 m it is a unit, which math-verify removes."""
    *_, value = _RELATION.split(text)  # in t = 3 s, the first letter does not make the last one a variable
    found = _LAST_LETTER.fullmatch(_without_unit_text(value).strip())
    if found is None:
        return False
    before, letter = _STRUCTURE.sub(" ", found[1]), found[2]
    return letter not in _UNITS or any(each.isalpha() for each in before)


def _without_unit_text(text: str) -> str:
    rest = _UNIT_TEXT.sub("", text)
    return rest if rest.strip("$ ") else text


def _may_be_equal(known: Any, answer: Any) -> bool:
    """False for two numbers that differ. math-verify takes very small ones for zero, and the rest with it."""
    from sympy import Expr, Float, Rational

    try:
        pair = [value.doit() for value in (known, answer) if isinstance(value, Expr) and value.is_number]
        if len(pair) < 2 or pair[0] == pair[1]:
            return True
        if all(isinstance(value, Rational) for value in pair):
            return False
        if 0 in pair and not any(value.has(Float) for value in pair):
            return pair[0].equals(pair[1]) is not False  # no digit of a sum that is zero can be evaluated
        one, other = (value.evalf(_DIGITS) for value in pair)
        close = _CLOSE if any(value.has(Float) for value in pair) else 10.0 ** (10 - _DIGITS)
        return bool(abs(one - other) <= close * max(abs(one), abs(other)))
    except Exception:  # one that sympy cannot evaluate: math-verify has decided
        return True


def _number(value: Any) -> float | None:
    """The numeric value of an expression, or of the right side of an equation."""
    from sympy import Eq, Expr

    value = value.rhs if isinstance(value, Eq) else value
    if not isinstance(value, Expr) or not value.is_number:
        return None
    try:
        return float(value.evalf())
    except Exception:  # complex, undefined, or too large: sympy raises many kinds of errors
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
