"""Metrics of published benchmarks, on answers whose score their own code gave."""

import pytest

from jaxrag.measure.evals.metrics import (
    METRICS,
    character_f1,
    chinese_f1,
    first_line,
    hotpotqa_f1,
    musique_f1,
    numbers,
    qa_f1,
    refuses,
    rgb_accuracy,
    rgb_accuracy_at_noise,
    rgb_labels,
    rouge1,
    squad_exact_match,
    squad_normalised,
    string_match_part,
    subspan,
)
from jaxrag.tasks.long.scores import among_words, first_integer, string_match_all

EIFFEL = "The Eiffel Tower, Paris."
VECTORS = [
    (qa_f1, EIFFEL, ["Eiffel Tower"], 0.8),
    (qa_f1, "The answer is Paris Paris", ["Paris"], 0.4),
    (qa_f1, "U.S.A.", ["USA"], 1),
    (qa_f1, "twenty-one", ["twenty one"], 0),
    (qa_f1, "a", ["the"], 0),
    (qa_f1, "the river Ost", ["a lake", "river"], 2 / 3),
    (qa_f1, "“apple”", ["apple"], 0),  # quotes beyond ASCII stay
    (hotpotqa_f1, "yes it is", ["yes"], 0),  # LongBench gives 0.5
    (qa_f1, "yes it is", ["yes"], 0.5),
    (hotpotqa_f1, "Yes.", ["yes"], 1),
    (hotpotqa_f1, "no", ["Norway no"], 0),
    (hotpotqa_f1, EIFFEL, ["Eiffel Tower"], 0.8),
    (musique_f1, "a", ["the"], 1),  # both are empty
    (musique_f1, "", ["Paris"], 0),
    (musique_f1, EIFFEL, ["Eiffel Tower"], 0.8),
    (squad_exact_match, "The Paris.", ["paris"], 1),
    (squad_exact_match, "Paris, France", ["paris"], 0),
    (subspan, "He was in Parish", ["Paris"], 1),
    (subspan, "1,000 men", ["1000"], 1),
    (subspan, "x", ["The"], 1),  # normalised to nothing
    (subspan, "12345678", ["1234567"], 1),
    (subspan, "Rome", ["Paris"], 0),
    (rouge1, EIFFEL, ["Eiffel Tower"], 2 / 3),
    (rouge1, "Paris Paris Paris", ["Paris"], 0.5),
    (rouge1, "厦门大学", ["厦门大学"], 0),
    (rouge1, "", ["Paris"], 0),
    (character_f1, "厦门大学", ["厦门大学。"], 1),
    (character_f1, "在厦门大学举办", ["厦门大学。"], 8 / 11),
    (numbers, "段落27，不是段落3", ["段落27"], 0.5),
    (numbers, "Paragraph 4", ["Paragraph 4"], 1),
    (numbers, "none", ["Paragraph 4"], 0),
    (numbers, "14", ["4"], 0),
    (string_match_part, "in France", ["France", "Paris"], 1),
    (string_match_part, "in Spain", ["France", "Paris"], 0),
    (string_match_all, "71432 and 9", ["71432", "99"], 0.5),
    (first_integer, "The pass key is 71432.", ["71432"], 1),
    (first_integer, "In 1 word: 71432", ["71432"], 0),
    (first_integer, "7,143", ["7143"], 0),
    (among_words, '"a1b2-c3": "x"', ["x"], 1),
    (among_words, "(x)", ["x"], 0),
]  # fmt: skip


@pytest.mark.parametrize(("metric", "answer", "golds", "score"), VECTORS)
def test_a_vector(metric, answer, golds, score):
    assert metric(answer, golds) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [("厦门大学", "厦门大学。", 1), ("在厦门大学举办", "厦门大学。", 0.5), ("北京。", "北京", 1)],
)
def test_chinese_words(answer, gold, score):
    pytest.importorskip("jieba", reason="jieba cuts the words: pip install jaxrag[evals]")
    assert chinese_f1(answer, [gold]) == pytest.approx(score)


def test_rouge1_is_that_of_the_package():
    scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="rouge_score is the oracle")
    oracle = scorer.RougeScorer(["rouge1"], use_stemmer=False)
    for answer, gold in ((EIFFEL, "Eiffel Tower"), ("a b b c", "b the b d"), ("", "x")):
        assert rouge1(answer, [gold]) == pytest.approx(
            oracle.score(gold, answer)["rouge1"].fmeasure
        )


@pytest.mark.parametrize(
    ("answer", "parts", "labels", "right"),
    [
        ("January 2, 2022", [["January 2 2022", "January 2, 2022"]], [1], 1),
        ("1月3日", [["1月3日"], ["1月12日"]], [1, 0], 0),
        ("1月3日到1月12日", [["1月3日"], ["1月12日"]], [1, 1], 1),
        ("TAMPA, Florida!", [["Tampa, Florida"]], [1], 1),
        ("文档信息不足，12人", [["12人"]], [-1], 0),
        ("of the insufficient information in documents", [["x"]], [-1], 0),
        ("Insufficient information", [["x"]], [0], 0),  # looked for in small letters
    ],
)
def test_rgb(answer, parts, labels, right):
    assert rgb_labels(answer, parts) == labels
    assert rgb_accuracy(answer, parts) == right
    refused = labels == [-1]
    assert refuses(answer, parts) == refused
    assert rgb_accuracy_at_noise(answer, parts) == max(right, refused)


def test_normalisation_is_squads():
    assert squad_normalised("An  “Apple”, twenty-one\n") == "“apple” twentyone"
    assert squad_normalised("theatre。") == "theatre。"


def test_the_table_scores_parts():
    assert METRICS["f1"](EIFFEL, [["Eiffel Tower"]]) == pytest.approx(0.8)
    assert METRICS["rgb"]("a b", [["a"], ["b", "c"]]) == 1


def test_what_lost_in_the_middle_scores():
    assert first_line("Paris\nand more") == "Paris"
    assert first_line("\nParis") == ""
