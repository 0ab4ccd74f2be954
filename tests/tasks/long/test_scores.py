"""The benchmarks' rules on hand-made answers."""

import pytest

from jaxrag.tasks.long.scores import (
    among_words,
    first_integer,
    string_match_all,
    words_in_place,
)


@pytest.mark.parametrize(
    ("text", "expected", "every"),
    [
        ("71432 and 9", ["71432", "99"], 0.5),
        ("in France", ["France", "Paris"], 0.5),
        ("IN FRANCE, PARIS", ["France", "Paris"], 1),
        ("nothing", ["France", "Paris"], 0),
        ("12345678", ["1234567"], 1),  # a substring, as the benchmark has it
        ("Lida\x07Mamin", ["Lida Mamin"], 0),  # control characters become line ends
        ("so\x00: Lida Mamin.", ["lida mamin"], 1),
        ("", ["a"], 0),
    ],
)
def test_string_match(text, expected, every):
    assert string_match_all(text, expected) == every


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("The pass key is 71432.", 1),
        ("71432", 1),
        ("71432 or 5", 1),
        ("In 1 word: 71432", 0),
        ("7,1432", 0),
        ("714325", 0),
        ("none", 0),
        ("", 0),
        ("०71432", 1),  # digits of other scripts are none
    ],
)
def test_the_first_digits_count(text, score):
    assert first_integer(text, ["71432"]) == score


@pytest.mark.parametrize(
    ("text", "value", "score"),
    [
        ('"a1b2-c3": "x"', "x", 1),
        ("(x)", "x", 0),
        ("x", "x", 1),
        ("it's x!", "x", 1),
        ("xy", "x", 0),
        ("X", "x", 0),
        ('{"k": "0f-1"}', "0f-1", 1),
        ("", "x", 0),
    ],
)
def test_a_value_is_a_word_of_the_answer(text, value, score):
    assert among_words(text, [value]) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Bilven Salham Felven Denven", 1),
        ("Bilven Salham Denven", 0.5),  # what is left out moves the rest
        ("Salham Bilven Felven Denven", 0.5),
        ("Bilven, Salham Felven Denven", 0.25),  # a mark is a word
        ("Bilven Salham Felven Denven Bilven", 1),
        ("bilven", 0),
        ("", 0),
    ],
)
def test_words_count_where_they_stand(text, score):
    assert words_in_place(text, ["Bilven", "Salham", "Felven Denven"]) == score
