"""Parses an agent's answer to a `stem` question: the letter of a choice, or a free answer.

Strict on purpose: an ambiguous answer counts as none, so that naming several choices gains nothing. Each text is
scanned once, whatever its length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollyard.envs.base import Evidence
from rollyard.envs.math.boxed import all_boxed, last_boxed

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

MAX_CLAIM_CHARS = 2000
"""A longer claim names no choice."""

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
"""A number and its unit. A letter directly after the number that is not a unit is a variable: 3x^2."""
_EXPONENT = re.compile(r"(?<=[\d.])[eE]([-+]?\d+)(?!\w)")
_SIGNS = str.maketrans({"−": "-", "×": "\\times ", "·": "\\cdot "})
_POWERS = str.maketrans({"²": "^2", "³": "^3", "{": "", "}": "", " ": ""})


def choice_of(evidence: Evidence, choices: Sequence[str]) -> int | None:
    """The index of the agent's choice: from its argument to finish, else from the boxes and the lines "Answer: …" of
    its last message. None if it chose nothing or more than one."""
    text = evidence.answer
    if isinstance(evidence.trajectory.info.get("answer"), str) and (whole := _choice(text, choices)) is not None:
        return whole
    claims = {_choice(claim, choices) for claim in (*all_boxed(text), *_ANSWER_LINE.findall(text))} - {None}
    return claims.pop() if len(claims) == 1 else None


def free_answer_of(evidence: Evidence) -> str | None:
    """The last box, else the last line "Answer: …", else the whole text if it was passed to finish."""
    text = evidence.answer
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    if lines := _ANSWER_LINE.findall(text):
        return lines[-1].strip(" \t*_") or None
    return (text.strip() or None) if isinstance(evidence.trajectory.info.get("answer"), str) else None


def plain(text: str) -> str:
    """The text without formatting: $, \\text{…}, markdown, double spaces, a final full stop."""
    text = _WRAPPER.sub(r"\1", _SPACING.sub(" ", text.replace("$", "")))
    return " ".join(text.split()).strip("*_`").removesuffix(".").strip("*_` ")


def is_same_text(known: str, answer: str) -> bool:
    """Whether the words are the same. Case matters where it may carry meaning (CO is not Co), not in plain words."""
    known, answer = plain(known), plain(answer)
    words = known.split()
    is_prose = any(len(word) > 3 and word.isalpha() for word in words) and all(
        word[1:] == word[1:].lower() for word in words
    )
    return known == answer or (is_prose and known.casefold() == answer.casefold())


def for_math_verify(text: str) -> str:
    """The text in a form that math-verify reads correctly: in 3e8 it reads the e as Euler's number."""
    return _EXPONENT.sub(r"\\times10^{\1}", plain(text).translate(_SIGNS))


def is_number(text: str) -> bool:
    return re.fullmatch(_NUMBER, for_math_verify(text)) is not None


def is_formula(known: str) -> bool:
    """Whether math-verify can compare it. It reads letters as factors and drops units: DNA equals AND, H2O equals O2H,
    and 5 km equals 5 m."""
    text = for_math_verify(known)
    if _QUANTITY.fullmatch(text) or re.search(r"[A-Z]\d", text):
        return False
    return bool(re.search(r"[\\^=]", text) or (re.search(r"\d", text) and not re.search(r"[^\W\d_]{2}", text)))


def without_unit(answer: str, unit: str) -> str | None:
    """The answer without that unit at its end, or unchanged if it has no unit; None if it has another unit."""
    text, unit = (for_math_verify(it.replace("\\%", "%")) for it in (answer, unit))
    if (quantity := _QUANTITY.fullmatch(text)) is not None:
        return quantity[1] if quantity[2].translate(_POWERS) == unit.translate(_POWERS) else None
    stripped = text.removesuffix(unit).strip()
    return None if re.search(r"[^\W\d_]|°", re.sub(r"\\[A-Za-z]+", "", stripped)) else stripped


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
    matches = [index for index, choice in enumerate(choices) if _words(choice) == _words(text)]
    return matches[0] if len(matches) == 1 else None


def _index(letter: str, choices: Sequence[str]) -> int | None:
    index = LETTERS.index(letter.upper())
    return index if index < len(choices) else None


def _words(text: str) -> str:
    return plain(text).casefold()
