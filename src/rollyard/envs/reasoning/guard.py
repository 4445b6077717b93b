"""What stands between the text that a model wrote and reasoning-gym's scorers. Only for the process that scores.

Four scorers hand an answer to `eval`, five to sympy's parser, which is `eval` by another name: an answer could run any
code as the service's user, or call `integrate` and have itself computed. Here the first read literals only, and the
second know numbers, one-letter variables and elementary functions; those of games only whole numbers and + - * /, as
with x/x or 24e0 an answer would make numbers that it was not given. `fence` is for what was overlooked: a process
behind it starts no other, opens no connection and writes no file.

Some scorers are wrong and have ours in their place, or beside them: `game_of_life_halting` takes any text for the right
one, `coin_flip` the first digits of the right number, `puzzle24` any four numbers that make 24 and a fraction; to
`complex_arithmetic` and `number_sorting` NaN is as near as can be.
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
_GAMES = ("games.countdown", "games.puzzle24")  # the other three take the parser from sympy itself
_MEASURING = ("algebra.complex_arithmetic", "algorithmic.number_sorting")
_FUNCTIONS = re.compile(r"a?(sin|cos|tan|sinh|cosh|tanh)|cot|sec|csc|exp|log|ln|sqrt|Abs|pi")
_TOKEN = re.compile(r"\s+|(?P<name>[A-Za-z]\w*)|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?!\w)|[-+*/^(),!]", flags=re.ASCII)
"""A dot is only part of a number: there are no attributes. There are no texts, no lists and no assignments."""
_SUM = re.compile(r"(?:[\d\s+()-]|\*(?!\*)|/(?!/))*", flags=re.ASCII)
_COIN_TOLERANCE = 1e-4  # coin_flip's own

_READING = ("os.listdir", "os.scandir")  # Python's own imports, late ones of sympy's among them
_FENCED = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "signal.", "resource.")


class Fenced(BaseException):
    """No `except Exception` of a scorer's catches it."""


def close_evals() -> None:
    """Takes `eval` away from all scorers, and NaN from those that it fools. Once, before any answer is scored."""
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
    """For the rest of this process's life."""
    sys.addaudithook(_refuse)


def score(dataset: Any, entry: Mapping[str, Any], answer: str | None) -> float:
    """The family's score of the answer, or ours where the family's is wrong."""
    from reasoning_gym.dataset import ProceduralDataset

    family = entry["metadata"].get("source_dataset")
    if family == "game_of_life_halting":
        return ProceduralDataset.score_answer(dataset, answer, dict(entry))
    found = dataset.score_answer(answer=answer, entry=entry)
    if family == "coin_flip" and answer is not None and found > 0:
        distance = Fraction(answer.replace(",", "")) - Fraction(entry["answer"].replace(",", ""))
        return float(abs(distance) <= _COIN_TOLERANCE)
    if family == "puzzle24" and answer is not None and found == 1.0:
        return 1.0 if _is_24(answer, entry["metadata"]["numbers"]) else 0.01
    return found


def _is_24(answer: str, numbers: Sequence[int]) -> bool:
    import sympy

    used = [int(number) for number in re.findall(r"\d+", answer)]
    return sorted(used) == sorted(numbers) and bool(sympy.parse_expr(answer) == 24)


def _finite(kind: type[float] | type[complex]) -> Callable[..., float | complex]:
    def finite(*args: Any) -> float | complex:
        number = kind(*args)
        if not cmath.isfinite(number):
            raise ValueError(f"{number} is no number to compare with")
        return number

    return finite


def _sums_only(parse: Callable[..., Any]) -> Callable[..., Any]:
    def parse_expr(text: str, *args: Any, **kwargs: Any) -> Any:
        if not _SUM.fullmatch(text):
            raise ValueError("only whole numbers, + - * / and brackets have a place here")
        return parse(text, *args, **kwargs)

    return parse_expr


def _plain_math_only(parse: Callable[..., Any]) -> Callable[..., Any]:
    def parse_expr(text: str, *args: Any, **kwargs: Any) -> Any:
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            if token is None:
                raise ValueError(f"{text[at]!r} has no place in an expression")
            name = token["name"]
            if name is not None and len(name) > 1 and not _FUNCTIONS.fullmatch(name):
                raise ValueError(f"{name!r} is no function of ours")
            at = token.end()
        return parse(text, *args, **kwargs)

    return parse_expr


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
            raise Fenced("a scorer would write a file")
    elif event.startswith(_FENCED) and event not in _READING:
        raise Fenced(f"a scorer would call {event}")
