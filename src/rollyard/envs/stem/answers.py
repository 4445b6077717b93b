"""Reads what an agent answered to a `stem` question: the letter of a choice, or a free answer.

Strict on purpose: an answer that can be read in two ways is no answer, so that naming several choices is not
worth it. Each text is read once, whatever its length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollyard.envs.base import Evidence
from rollyard.envs.math.boxed import all_boxed, last_boxed

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

MAX_CLAIM_CHARS = 2000
"""A longer one names no choice."""

_ANSWER_LINE = re.compile(r"^[ \t*_#>-]*(?:(?:the|final|correct)[ \t]+)*answer[ \t*_]*[:：](.*)$", re.I | re.M)
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_SPACING = re.compile(r"\\[,;:! ]|~")
_LETTER = re.compile(r"(?:(?:option|choice) )?\(?([A-Za-z])\)?[.:)]?", re.IGNORECASE)
_LETTER_AND_TEXT = re.compile(r"\(?([A-Za-z])(?:[.:)]|\)[.:])\s*(\S.*)", re.DOTALL)

_NUMBER = (
    r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)"
    r"(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*[-+]?\d+\s*\}|[-+]?\d+))?"
)
_QUANTITY = re.compile(rf"({_NUMBER})\s*((?:(?<=\s)[^\W\d_]|[^\W\d_]{{2}}|°|[ACFHJKLNTVWgms](?!\w))[\w\s/^·{{}}°*-]*)")
"""A number and its unit. A letter that is no unit and follows at once is a variable: 3x^2."""
_EXPONENT = re.compile(r"(?<=[\d.])[eE]([-+]?\d+)(?!\w)")
_SIGNS = str.maketrans({"−": "-", "×": "\\times ", "·": "\\cdot "})
_POWERS = str.maketrans({"²": "^2", "³": "^3", "{": "", "}": "", " ": ""})


def choice_of(evidence: Evidence, choices: Sequence[str]) -> int | None:
    """Which choice the agent took: what it gave to finish, else the boxes and the lines "Answer: …" of the last thing
    that it said. None: none of them, or more than one."""
    text = evidence.answer
    if isinstance(evidence.trajectory.info.get("answer"), str) and (whole := _choice(text, choices)) is not None:
        return whole
    claims = {_choice(claim, choices) for claim in (*all_boxed(text), *_ANSWER_LINE.findall(text))} - {None}
    return claims.pop() if len(claims) == 1 else None


def free_answer_of(evidence: Evidence) -> str | None:
    """What it gave to finish, else the last box, else the last line "Answer: …" of the last thing that it said."""
    text = evidence.answer
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    if lines := _ANSWER_LINE.findall(text):
        return lines[-1].strip(" \t*_") or None
    return (text.strip() or None) if isinstance(evidence.trajectory.info.get("answer"), str) else None


def plain(text: str) -> str:
    """Without what only changes how it looks: $, \\text{…}, markdown, double spaces, a last full stop."""
    text = _WRAPPER.sub(r"\1", _SPACING.sub(" ", text.replace("$", "")))
    return " ".join(text.split()).strip("*_`").removesuffix(".").strip("*_` ")


def is_same_text(known: str, answer: str) -> bool:
    """The same words. Case counts where it may carry meaning (CO is not Co), not in plain words."""
    known, answer = plain(known), plain(answer)
    words = known.split()
    is_prose = any(len(word) > 3 and word.isalpha() for word in words) and all(
        word[1:] == word[1:].lower() for word in words
    )
    return known == answer or (is_prose and known.casefold() == answer.casefold())


def for_math_verify(text: str) -> str:
    """As it reads it: in 3e8 it takes the e for Euler's number."""
    return _EXPONENT.sub(r"\\times10^{\1}", plain(text).translate(_SIGNS))


def is_number(text: str) -> bool:
    return re.fullmatch(_NUMBER, for_math_verify(text)) is not None


def is_formula(known: str) -> bool:
    """Whether math-verify can be asked about it. It takes letters for factors and drops units: to it DNA is AND, H2O is
    O2H, and 5 km is 5 m."""
    text = for_math_verify(known)
    if _QUANTITY.fullmatch(text) or re.search(r"[A-Z]\d", text):
        return False
    return bool(re.search(r"[\\^=]", text) or (re.search(r"\d", text) and not re.search(r"[^\W\d_]{2}", text)))


def without_unit(answer: str, unit: str) -> str | None:
    """The answer without that unit at its end, or as it is if it has none at all; None if it has another one."""
    text, unit = (for_math_verify(it.replace("\\%", "%")) for it in (answer, unit))
    if (quantity := _QUANTITY.fullmatch(text)) is not None:
        return quantity[1] if quantity[2].translate(_POWERS) == unit.translate(_POWERS) else None
    rest = text.removesuffix(unit).strip()
    return None if re.search(r"[^\W\d_]|°", re.sub(r"\\[A-Za-z]+", "", rest)) else rest


def _choice(claim: str, choices: Sequence[str]) -> int | None:
    """A letter, a letter with its choice's text, or the text of exactly one choice."""
    if len(claim) > MAX_CLAIM_CHARS:
        return None
    text = plain(claim)
    if not text:
        return None
    if letter := _LETTER.fullmatch(text):
        return _index(letter[1], choices)
    if both := _LETTER_AND_TEXT.fullmatch(text):
        index = _index(both[1], choices)
        if index is not None and _words(both[2]) == _words(choices[index]):
            return index
    found = [index for index, choice in enumerate(choices) if _words(choice) == _words(text)]
    return found[0] if len(found) == 1 else None


def _index(letter: str, choices: Sequence[str]) -> int | None:
    index = LETTERS.index(letter.upper())
    return index if index < len(choices) else None


def _words(text: str) -> str:
    return plain(text).casefold()
