"""Whatever a person types gives results or nothing, and is never syntax of FTS5."""

import sqlite3

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollyard.catalog import InvalidSearch, Search
from rollyard.catalog.search import MOST_CHARACTERS, MOST_WORDS
from rollyard.catalog.texts import GAP, cut, pack, unpack

TEXTS = ("the quick brown fox", "AND OR NOT NEAR", 'a "quoted" word*', "src/main.py:12 Traceback", "naïve Straße 漢字")


@pytest.fixture(scope="module")
def words() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE VIRTUAL TABLE words USING fts5(text, content='', tokenize='unicode61', prefix='2 3')")
    connection.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", enumerate(TEXTS, 1))
    return connection


def found(words: sqlite3.Connection, text: str) -> list[int]:
    query = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rowid"
    return [row[0] for row in words.execute(query, (Search.of(text).query,))]


@given(st.text(max_size=MOST_CHARACTERS + 10))
@example('"')
@example('a" OR "b')
@example("text : fox")
@example("-fox ^the NEAR(a b)")
@example("fox*" * 3)
@example("\0fox\ud800")
@example("ͤ")
@example("😀")
@settings(max_examples=400, deadline=None)
def test_any_text_is_a_search_or_is_refused(words: sqlite3.Connection, text: str):
    try:
        search = Search.of(text)
    except InvalidSearch:
        return
    assert set(found(words, text)) <= set(range(1, len(TEXTS) + 1))
    for each in TEXTS:
        excerpt = search.excerpt(each)
        assert " ".join((excerpt.before + excerpt.hit + excerpt.after).split()) in each


def test_operators_are_words(words: sqlite3.Connection):
    assert found(words, "fox OR NOT") == []
    assert found(words, "not OR and") == [2]
    assert found(words, 'fox" OR "quoted') == []
    assert found(words, "text:fox") == []


def test_the_last_word_may_be_a_start(words: sqlite3.Connection):
    assert found(words, "quick bro") == [1]
    assert found(words, "qui brown") == []
    assert found(words, "tracebac") == [4]
    assert found(words, "f") == [], "one letter would be the start of too many words"


def test_words_with_punctuation_are_phrases(words: sqlite3.Connection):
    assert found(words, "src/main.py") == [4]
    assert found(words, "main/src") == []
    assert found(words, "(fox)") == [1]


def test_diacritics_and_other_scripts(words: sqlite3.Connection):
    assert found(words, "NAIVE") == found(words, "straße") == found(words, "漢") == found(words, "漢字") == [5]


@pytest.mark.parametrize("text", ["", " ", "?!", "x" * (MOST_CHARACTERS + 1), "a " * (MOST_WORDS + 1)])
def test_a_search_without_words_or_too_long_is_refused(text: str):
    with pytest.raises(InvalidSearch):
        Search.of(text)


@given(st.lists(st.text()), st.integers(min_value=10, max_value=100))
def test_a_long_text_keeps_its_start_and_its_end(texts: list[str], most: int):
    whole, kept = cut(texts, 1 << 20), cut(texts, most)
    assert len(kept) <= most
    assert unpack(pack(kept)) == kept and "\0" not in kept
    if len(whole) < most:
        assert kept == whole
    elif GAP in kept and GAP not in whole:
        head, tail = kept.split(GAP)
        assert whole.startswith(head) and whole.endswith(tail)
