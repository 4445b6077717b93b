"""A search that a person typed: as a query of FTS5, and the place in a text that matches it.

Every word is quoted, so that the input is data: no operator, column or syntax of FTS5 is in it. All words must occur;
the last one may be the start of a word. A "word" with punctuation (`src/main.py`) is a phrase.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

MOST_CHARACTERS = 200
MOST_WORDS = 16
LEAST_PREFIX = 2
"""Characters of the last word from which it is searched as the start of a word: the index has prefixes of 2 and 3. In
scripts without spaces, one character is enough: a whole sentence is one word of the index."""

BEFORE, HIT, AFTER = 60, 80, 120
"""Characters of an excerpt."""

MOST_PLACES = 100
"""Places inside of words that are passed over in the search for an excerpt."""


class InvalidSearch(ValueError):
    """A search that is too long or has no words; the message says which."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The first place in a text that a search matches."""

    before: str
    hit: str
    after: str


@dataclass(frozen=True, slots=True)
class Search:
    """What was typed, in words."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Search:
        """Raises `InvalidSearch`."""
        if len(text) > MOST_CHARACTERS:
            raise InvalidSearch(f"a search has at most {MOST_CHARACTERS} characters; this one has {len(text)}")
        words = tuple(word for word in _printable(text).split() if any(map(_is_in_words, word)))
        if not words:
            raise InvalidSearch("a search needs a letter or a digit")
        if len(words) > MOST_WORDS:
            raise InvalidSearch(f"a search has at most {MOST_WORDS} words; this one has {len(words)}")
        return cls(words)

    @property
    def query(self) -> str:
        """The query of FTS5."""
        quoted = ['"' + word.replace('"', '""') + '"' for word in self.words]
        last = re.split(r"[\W_]+", self.words[-1])[-1]
        is_start = _is_in_words(self.words[-1][-1]) and (len(last) >= LEAST_PREFIX or not last.isascii())
        return " AND ".join([*quoted[:-1], quoted[-1] + ("*" if is_start else "")])

    def excerpt(self, text: str) -> Excerpt:
        """The first place of the whole search in the text, else of one of its words, else the start of the text.

        By plain substring search: a regular expression takes a hundred times as long for a text of 256 K characters."""
        lowered = text.lower()
        if len(lowered) == len(text):  # else positions differ: a few characters have a longer lower case
            for wanted in dict.fromkeys((" ".join(self.words), *self.words)):
                start = _find_word(lowered, wanted.lower())
                if start >= 0:
                    end = start + len(wanted)
                    return Excerpt(
                        _one_line(text[max(0, start - 2 * BEFORE) : start])[-BEFORE:],
                        _one_line(text[start:end])[:HIT],
                        _one_line(text[end : end + 2 * AFTER])[:AFTER],
                    )
        return Excerpt("", "", _one_line(text[: 2 * AFTER])[:AFTER])


def _find_word(text: str, wanted: str) -> int:
    """Returns where the text has it at the start of a word; −1: nowhere, or not among the first places."""
    start = -1
    for _ in range(MOST_PLACES):
        start = text.find(wanted, start + 1)
        if start <= 0 or not _is_in_words(text[start - 1]):
            return start
    return -1


def _is_in_words(character: str) -> bool:
    """As the tokenizer unicode61: letters, digits, and private characters."""
    category = unicodedata.category(character)
    return category[0] in "LN" or category == "Co"


def _printable(text: str) -> str:
    return "".join(" " if unicodedata.category(character) in ("Cc", "Cs") else character for character in text)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)
