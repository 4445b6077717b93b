"""Protects reasoning-gym's scorers from text that a model wrote. Used only by the process that scores.

Four scorers pass an answer to `eval`, and five to sympy's parser, which calls `eval`: an answer could run any code as
the service's user, or call `integrate` and have the scorer compute the result. Here the four accept literals only, and
the five accept numbers, one-letter variables and elementary functions; scorers of games accept only integers and
+ - * /, because with x/x or 24e0 an answer could make numbers that it was not given. `fence` is a second line of
defence: after it, a process cannot start another process, open a connection or write a file.

Some scorers are wrong and are replaced or supplemented here: `game_of_life_halting` accepts any text, `coin_flip`
accepts the first digits of the right number, `puzzle24` accepts any four numbers that make 24 and a fraction, and
`complex_arithmetic` and `number_sorting` treat NaN as a perfect match.
"""

from __future__ import annotations

import ast
import cmath
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

_EVALUATING = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
_GAMES = ("games.countdown", "games.puzzle24")  # the other three get the parser from sympy itself
_MEASURING = ("algebra.complex_arithmetic", "algorithmic.number_sorting")
_FUNCTIONS = re.compile(r"a?(sin|cos|tan|sinh|cosh|tanh)|cot|sec|csc|exp|log|ln|sqrt|Abs|pi")
_TOKEN = re.compile(r"\s+|(?P<name>[A-Za-z]\w*)|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?!\w)|[-+*/^(),!]", flags=re.ASCII)
"""A dot is only part of a number, so there are no attributes. There are no strings, no lists and no assignments."""
_SUM = re.compile(r"(?:[\d\s+()-]|\*(?!\*)|/(?!/))*", flags=re.ASCII)
_COIN_TOLERANCE = 1e-4  # coin_flip's own

_READING = ("os.listdir", "os.scandir")  # needed for imports, including sympy's lazy ones
_FENCED = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "signal.", "resource.")


class Fenced(BaseException):
    """Raised after `fence` for a forbidden operation. A scorer's `except Exception` does not catch it."""


def close_evals() -> None:
    """Replaces `eval` in all scorers and rejects NaN where it would win. Call once, before any answer is scored."""
    import sympy

    for name in _EVALUATING:
        importlib.import_module(f"reasoning_gym.{name}").__dict__["eval"] = ast.literal_eval
    parse = _plain_math_only(sympy.parse_expr)
    sympy.__dict__["parse_expr"] = parse
    for name in _GAMES:
        importlib.import_module(f"reasoning_gym.{name}").__dict__["parse_expr"] = _sums_only(parse)
    for name in _MEASURING:
        importlib.import_module(f"reasoning_gym.{name}").__dict__.update(float=_finite(float), complex=_finite(complex))


def fence() -> None:
    """Applies until this process ends."""
    sys.addaudithook(_refuse)


def score(dataset: Any, entry: Mapping[str, Any], answer: str | None) -> float:
    """The family's score of the answer, or a corrected one where the family's scorer is wrong."""
    from reasoning_gym.dataset import ProceduralDataset

    family = entry["metadata"].get("source_dataset")
    if family == "game_of_life_halting":
        return ProceduralDataset.score_answer(dataset, answer, dict(entry))
    family_score = dataset.score_answer(answer=answer, entry=entry)
    if family == "coin_flip" and answer is not None and family_score > 0:
        distance = Fraction(answer.replace(",", "")) - Fraction(entry["answer"].replace(",", ""))
        return float(abs(distance) <= _COIN_TOLERANCE)
    if family == "puzzle24" and answer is not None and family_score == 1.0:
        return 1.0 if _is_24(answer, entry["metadata"]["numbers"]) else 0.01
    return family_score


def _is_24(answer: str, numbers: Sequence[int]) -> bool:
    import sympy

    used = [int(number) for number in re.findall(r"\d+", answer)]
    return sorted(used) == sorted(numbers) and bool(sympy.parse_expr(answer) == 24)


def _finite(kind: type[float] | type[complex]) -> Callable[..., float | complex]:
    def finite(*args: Any) -> float | complex:
        number = kind(*args)
        if not cmath.isfinite(number):
            raise ValueError(f"{number} cannot be compared")
        return number

    return finite


def _sums_only(parse: Callable[..., Any]) -> Callable[..., Any]:
    def parse_expr(text: str, *args: Any, **kwargs: Any) -> Any:
        if not _SUM.fullmatch(text):
            raise ValueError("only integers, + - * / and brackets are allowed")
        return parse(text, *args, **kwargs)

    return parse_expr


def _plain_math_only(parse: Callable[..., Any]) -> Callable[..., Any]:
    def parse_expr(text: str, *args: Any, **kwargs: Any) -> Any:
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            if token is None:
                raise ValueError(f"{text[at]!r} is not allowed in an expression")
            name = token["name"]
            if name is not None and len(name) > 1 and not _FUNCTIONS.fullmatch(name):
                raise ValueError(f"{name!r} is not an allowed function")
            at = token.end()
        return parse(text, *args, **kwargs)

    return parse_expr


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
            raise Fenced("a scorer tried to write a file")
    elif event.startswith(_FENCED) and event not in _READING:
        raise Fenced(f"a scorer tried to call {event}")
