"""Yardwork's sentences: the expansion of patterns, their number, and their form."""

import hashlib
import re
from difflib import SequenceMatcher

import pytest

from rollyard.envs.yardwork import FAMILIES
from rollyard.envs.yardwork.wordings import TRAIN, spelled_out
from rollyard.envs.yardwork.words import POOLS, SPLITS


def slots_of(text: str) -> set[str]:
    return set(re.findall(r"{(\w+)}", text))


def test_alternatives_are_expanded_in_all_combinations_and_a_fixed_order():
    assert spelled_out("[Find|Name] the file [with|about|that has] {word}.") == [
        "Find the file with {word}.",
        "Find the file about {word}.",
        "Find the file that has {word}.",
        "Name the file with {word}.",
        "Name the file about {word}.",
        "Name the file that has {word}.",
    ]
    assert spelled_out("[Count|{names}: count] them[|, please].") == [
        "Count them.",
        "Count them, please.",
        "{names}: count them.",
        "{names}: count them, please.",
    ]
    assert spelled_out("Nothing to choose, or | so.") == ["Nothing to choose, or | so."]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_dozens_of_sentences_with_the_same_slots(family: str):
    train = FAMILIES[family].templates["train"]
    assert [template.name for template in train] == [f"t{at}" for at in range(len(train))]
    assert 40 <= len({template.text for template in train}) == len(train) <= 64
    assert {template.rule for template in train} == {train[0].rule}
    assert [template.text for template in train if slots_of(template.text) != slots_of(train[0].text)] == []
    patterns = [text for text in TRAIN[family] if "[" in text]
    assert len(patterns) >= 5, "sentences that differ in more than a word"


def test_all_wordings_of_a_rule_have_the_same_slots():
    """So tests of solutions need only one wording."""
    for family in FAMILIES.values():
        for split in SPLITS:
            slot_sets = {(template.rule, frozenset(slots_of(template.text))) for template in family.templates[split]}
            assert len(slot_sets) == len({template.rule for template in family.templates[split]}), (family.name, split)


def test_sentences_are_well_formed():
    for family in FAMILIES.values():
        for split in SPLITS:
            for template in family.templates[split]:
                text = template.text
                assert not re.search(r"[\[\]|]|  |^\s|\s$", text), text
                assert not re.search(r" [.,:;?!](\s|$)", text), (text, "a space before punctuation")
                assert re.match(r"[A-Z{]|sh {script}", text) and not re.search(r"[.?!] [a-z]", text), (text, "case")
                assert re.search(r"[.?]$", text), (text, "no final punctuation")


def test_no_sentence_contains_a_word_of_a_pool_even_in_part():
    words = [word for pool in POOLS.values() for word in pool.words]
    others = {word for pool in POOLS.values() for word in (*pool.columns, *pool.endings, *pool.variables)}
    for family in FAMILIES.values():
        for template in family.templates["train"]:
            text = re.sub(r"{\w+}", "", template.text)
            assert not [word for word in words if word in text.lower()], text
            assert not others & set(re.findall(r"[A-Za-z]+", text)), text


def test_no_training_sentence_is_similar_to_a_held_out_one():
    """A held-out sentence of the same rule measures reading only if no similar sentence is trained."""

    def tokens(text: str) -> list[str]:
        return re.findall(r"\{?\w+", text.lower())

    for family in FAMILIES.values():
        train = family.templates["train"]
        for held_out in (one for one in family.templates["held_out"] if one.rule == train[0].rule):
            matcher = SequenceMatcher(b=tokens(held_out.text), autojunk=False)
            for template in train:
                matcher.set_seq1(tokens(template.text))
                assert matcher.ratio() <= 0.6, (template.text, held_out.text)


def test_the_first_eight_sentences_never_change():
    """The digest is from the time when there were only these eight: data of that time name them."""
    texts = [[template.text for template in family.templates["train"][:8]] for family in FAMILIES.values()]
    assert hashlib.sha256(repr(texts).encode()).hexdigest()[:16] == "50af5493cbfac50a"
