"""BM25: terms of words and of CJK text, ranking, removal, and queries that are not SQL."""

import collections
import contextlib
import math

import apsw
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import DamagedCatalogError
from jaxrag.library.retrieve.base import Found
from jaxrag.library.retrieve.bm25 import BM25Index, in_memory
from jaxrag.library.retrieve.terms import terms


class Index(BM25Index):
    def add_all(self, texts):
        self.add(dict(texts))


@pytest.fixture
def index():
    with contextlib.closing(apsw.Connection(":memory:")) as connection:
        made = Index(connection)
        made.create()
        yield made


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The LAMP's snake_case, 3.14", ["the", "lamp", "s", "snake", "case", "3", "14"]),
        ("Café Ünïted Straße", ["cafe", "united", "strasse"]),
        ("Ｆｕｌｌ ｗｉｄｔｈ", ["full", "width"]),
        ("灯塔守", ["灯", "塔", "守", "灯塔", "塔守"]),
        ("GPU灯塔2号", ["gpu", "灯", "塔", "灯塔", "2", "号"]),
        ("がく", ["が", "く", "がく"]),
        ("한국", ["한", "국", "한국"]),
        ("?!", []),
    ],
)
def test_terms(text, expected):
    assert terms(text) == expected


def test_score_is_okapi_bm25(index):
    texts = {1: "red red blue", 2: "blue green", 3: "green", 4: "grey grey grey grey"}
    index.add_all(texts)
    idf = math.log(1 + (4 - 1 + 0.5) / (1 + 0.5))
    length, mean, k1, b = 3, 10 / 4, 1.2, 0.75
    expected = idf * 2 * (k1 + 1) / (2 + k1 * (1 - b + b * length / mean))
    (match,) = index.search("red", 5)
    assert match.score == pytest.approx(expected, rel=1e-9)


def test_equal_scores_are_in_order_of_chunk_id(index):
    index.add_all([(7, "same words"), (3, "same words"), (5, "same words"), (9, "x"), (10, "y")])
    assert [m.chunk_id for m in index.search("same", 2)] == [3, 5]


@pytest.mark.parametrize(
    "question", ['"', 'NEAR("a" "b") *', "terms: lamp^2", "a OR (b", "-x'; --"]
)
def test_query_syntax_is_ordinary_text(index, question):
    index.add_all([(1, "near or not a b lamp x")])
    index.search(question, 5)
    assert [m.chunk_id for m in index.search(5000 * f"word {question} " + "lamp", 5)] == [1]


def test_index_after_removal_scores_as_one_that_never_held_the_chunk(index):
    index.add_all({1: "lamp oil", 2: "sea air lamp", 3: "rain"})
    expected = index.search("lamp rain", 5)
    index.add({4: "lamp lamp rain and other words"})
    index.remove({4: "lamp lamp rain and other words"})
    assert index.search("lamp rain", 5) == expected


def test_words_of_most_chunks_do_not_count_among_many(index, monkeypatch):
    index.add_all(
        [(1, "the lamp the the"), (2, "the sea"), (3, "the"), (4, "lamp"), (5, "the rain")]
    )
    assert sorted(match.chunk_id for match in index.search("the lamp", 5)) == [1, 2, 3, 4, 5]
    monkeypatch.setattr("jaxrag.library.retrieve.bm25._MANY_CHUNKS", 5)
    assert [match.chunk_id for match in index.search("the lamp", 5)] == [4, 1]
    assert [match.chunk_id for match in index.search("the", 5)] == [1, 3, 2, 5]


def everything(texts, question, k, most):
    """The hits of scoring every chunk; words of more than ``most`` chunks do not count."""
    split = {i: collections.Counter(terms(text)) for i, text in texts.items()}
    mean = sum(it.total() for it in split.values()) / len(split)
    k1, b, unit = 1.2, 0.75, 2.0**32
    base, per_term = k1 * (1 - b), k1 * b / mean
    holders = {word: sum(word in it for it in split.values()) for word in terms(question)}
    held = {word: count for word, count in holders.items() if count}
    held = {word: count for word, count in held.items() if count <= most} or held
    scores = collections.Counter()
    for word, count in held.items():
        idf = math.log(1 + (len(split) - count + 0.5) / (count + 0.5))
        for i, words in split.items():
            if times := words[word]:
                weight = idf * times * (k1 + 1) / (times + base + per_term * words.total())
                scores[i] += math.floor(weight * unit + 0.5)
    best = sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))[:k]
    return [Found(i, score / unit) for i, score in best]


@pytest.mark.parametrize("many", [10_000, 50])
def test_hits_are_those_of_scoring_everything(index, monkeypatch, many):
    """The same chunks with the same scores, ties included, in a file, packed, and in memory."""
    monkeypatch.setattr("jaxrag.library.retrieve.bm25._MANY_CHUNKS", many)
    monkeypatch.setattr("jaxrag.library.retrieve.bm25._AT_ONCE", 40)
    rng = np.random.default_rng(many)
    words = [*(f"w{n}" for n in range(30)), "灯塔守", "the"]
    share = 1 / np.arange(1, len(words) + 1)
    texts = {
        int(i): " ".join(rng.choice(words, rng.integers(0, 12), p=share / share.sum()))
        for i in rng.choice(500, 120, replace=False)
    }
    rows = sorted(texts.items())
    index.add(dict(rows[:70]))
    index.add(dict(rows[70:]), 70)
    assert bool(index.packed.blocks()) == (many == 50)
    index.remove(dict(rows[:1]))
    del texts[rows[0][0]]
    search = in_memory(rows[1:])
    ties = 0
    for question in [*texts.values(), "", "nobody holds this", "塔 the the w3 w29"]:
        for k in (1, 7, 500):
            most = len(texts) / 2 if many == 50 else len(texts)
            expected = everything(texts, question, k, most)
            assert index.search(question, k) == search(question, k) == expected
            assert index.search(question, k, version=1) == expected
        ties += len(expected) - len({match.score for match in expected})
    assert ties > 100


def test_an_index_of_nothing_finds_nothing(index):
    assert index.search("lamp", 5) == in_memory([])("lamp", 5) == []


def test_terms_tell_of_their_postings_after_every_change(index):
    """Each term has the number of its postings and the sum that tells which, in any order."""
    rng = np.random.default_rng(6)
    words = [*(f"w{n}" for n in range(12)), "\u706f\u5854"]
    texts: dict[int, str] = {}
    for round_number in range(30):
        new = {10 * round_number + n: " ".join(rng.choice(words, 6)) for n in range(3)}
        assert index.add(new).terms == sum(len(terms(text)) for text in new.values())
        texts |= new
        gone = {int(i): texts.pop(int(i)) for i in rng.choice(list(texts), 2, replace=False)}
        index.remove(gone)
        assert index.count_unlike(sorted(texts.items())) == 0
    assert index.count_unlike(sorted(texts.items())[1:]) > 0


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM postings WHERE term = 'lamp' AND chunk_id = 2",
        "UPDATE postings SET count = 9 WHERE term = 'lamp' AND chunk_id = 2",
        "UPDATE postings SET chunk_id = 7 WHERE term = 'lamp' AND chunk_id = 2",
        "UPDATE postings SET count = 3 - count WHERE term = 'lamp'",
        "UPDATE postings SET count = 'x' WHERE term = 'lamp' AND chunk_id = 2",
        "UPDATE postings SET count = 1.5 WHERE term = 'lamp' AND chunk_id = 2",
        "UPDATE terms SET holders = holders + 1 WHERE term = 'lamp'",
        "DELETE FROM terms WHERE term = 'lamp'",
        "DELETE FROM postings WHERE term = 'lamp'",
        "DELETE FROM lengths WHERE chunk_id = 2",
    ],
)
def test_postings_that_are_not_as_written_are_refused(index, statement):
    index.add_all([(1, "lamp lamp oil"), (2, "lamp sea"), (3, "rain")])
    assert index.search("rain lamp", 5, version=1)
    index.connection.execute(statement)
    with refused(DamagedCatalogError, "'lamp'"):
        index.search("rain lamp", 5, version=2)
    assert [found.chunk_id for found in index.search("rain", 5, version=2)] == [3]
    assert index.count_unlike([(1, "lamp lamp oil"), (2, "lamp sea"), (3, "rain")]) == 1
