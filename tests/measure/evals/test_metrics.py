"""Word metrics against the published rules' own answers."""

import pytest

from jaxrag.measure.evals.metrics import exact_match, holds, normalised, token_f1


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        ("The Eiffel Tower, Paris.", "Eiffel Tower", 0.8),
        ("The answer is Paris Paris", "Paris", 0.4),
        ("red red blue", "red red green", 2 / 3),  # a word counts as often as both have it
        ("U.S.A.", "USA", 1.0),
        ("twenty-one", "twenty one", 0.0),
        ("a", "the", 0.0),  # both are empty once normalised
        ("", "Paris", 0.0),
    ],
)
def test_f1(answer, gold, score):
    assert token_f1(answer, [gold]) == pytest.approx(score)


def test_the_best_of_several_right_answers_counts():
    assert token_f1("the river Ost", ["a lake", "river"]) == pytest.approx(2 / 3)
    assert token_f1("anything", []) == 0
    assert exact_match("The Paris.", ["rome", "paris"])
    assert not exact_match("Paris, France", ["paris"])


def test_normalisation_keeps_what_is_not_ascii():
    assert normalised("An  “Apple”, twenty-one\n") == "“apple” twentyone"
    assert normalised("theatre anthem") == "theatre anthem"  # articles are words of their own


@pytest.mark.parametrize(
    ("answer", "gold", "held", "score"),
    [
        ("It is fired with larch, I think.", "Larch", True, 1 / 4),
        ("a larchwood oven", "larch", False, 0),
        ("村里的竹桥长八十六米。", "八十六米", True, 8 / 14),  # characters are words
        ("", "x", False, 0),
        ("anything", "the", False, 0),  # nothing is left of it
    ],
)
def test_an_answer_that_says_more_holds_the_right_one(answer, gold, held, score):
    assert holds(answer, [gold]) == held
    assert token_f1(answer, [gold]) == pytest.approx(score)
    assert exact_match("八十六米。", ["八十六米"])
