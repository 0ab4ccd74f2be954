"""What haystacks are made of: different keys, values of the right form, readable filler."""

import itertools
import random
import re
import uuid

import pytest
from refusal import refused

from jaxrag.base.errors import DocumentError
from jaxrag.models.text.pieces import sentence_starts
from jaxrag.tasks.long import words


def first(stream, count):
    return list(itertools.islice(stream, count))


@pytest.mark.parametrize(
    ("stream", "form"),
    [
        (words.names, r"[a-z]+ [a-z]+ [a-z]+"),
        (words.numbers, r"[1-9][0-9]{6}"),
        (lambda rng: words.numbers(rng, 5), r"[1-9][0-9]{4}"),
        (words.codes, r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"),
        (words.coined, r"([bdfgklmnprstvz][aeiou]){3}[lmnrstxk]"),
    ],
)
def test_keys_and_values_differ(stream, form):
    drawn = first(stream(random.Random(1)), 2000)
    assert len(set(drawn)) == 2000
    assert all(re.fullmatch(form, one) for one in drawn)
    assert first(stream(random.Random(1)), 2000) == drawn
    assert first(stream(random.Random(2)), 2000) != drawn


def test_codes_are_uuids():
    assert uuid.UUID(next(words.codes(random.Random(1)))).version == 4


def test_every_number_comes_once():
    drawn = list(words.numbers(random.Random(3), digits=2))
    assert sorted(map(int, drawn)) == list(range(10, 100)) and drawn != sorted(drawn)


def test_prose_is_sentences_without_digits():
    drawn = first(words.prose(random.Random(5)), 500)
    text = " ".join(drawn)
    assert text.isascii() and not re.search(r"\d", text)
    starts = [0, *itertools.accumulate(len(one) + 1 for one in drawn[:-1])]
    assert [0, *sentence_starts(text)] == starts
    assert len(set(drawn)) > 490


def test_noise_repeats():
    drawn = first(words.noise(random.Random(5)), 24)
    assert sorted(drawn[:6]) == sorted(words.NOISE) and drawn[6:12] == drawn[:6]


def test_text_files_become_sentences(tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("It rained.\nNobody   cared. Why?\n")
    two.write_text("word " * 250)
    read = words.text_prose([one, two])
    drawn = first(read(random.Random(1)), 12)
    assert len(set(drawn)) == 5 and drawn[:6] == drawn[6:]
    assert {"It rained.", "Nobody cared.", "Why?"} < set(drawn)
    assert sorted(len(d.split()) for d in set(drawn) if d.startswith("word")) == [50, 100]
    starts = {first(read(random.Random(seed)), 1)[0] for seed in range(40)}
    assert starts == set(drawn)


def test_text_files_that_cannot_be_read_are_refused(tmp_path):
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"ab\xff")
    for path, reason in (
        (empty, ""),
        (binary, "UTF-8"),
        (tmp_path / "none.txt", ""),
    ):
        with refused(DocumentError, reason):
            words.text_prose([path])
