"""Haystacks have the length, the depth and the chunks that were asked for."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.models.text.prompts import TEMPLATES, PromptTemplate
from jaxrag.tasks.long import words
from jaxrag.tasks.long.case import Case, Frame, in_text

NEEDLE = "The number of the lantern is 4839201."


def a_case(*depths, seed=3, **changes):
    """Needles that say where they are hidden."""
    case = Case(
        needles=tuple(f"Here is needle {i}, of {len(depths)}." for i in range(len(depths))),
        depths=depths,
        filler=lambda: words.prose(random.Random(seed)),
        question="Where is it?",
        expected=("here",),
        lead="It is",
    )
    return dataclasses.replace(case, **changes)


def prompt_of(frame, fitted):
    """The ids of the whole prompt, as a request puts them together."""
    template, tokenizer = frame.template, frame.tokenizer
    return np.concatenate((
        template.prefix_ids(tokenizer),
        *(template.chunk_ids(tokenizer, chunk) for chunk in fitted.chunks),
        template.final_ids(tokenizer, fitted.case.question),
        fitted.lead,
    ))  # fmt: skip


def filler_before(frame, fitted, number):
    """Share of the filler that stands before a needle, from the chunks alone."""
    text = frame.tokenizer.decode(np.concatenate(fitted.chunks))
    others = text
    for i, needle in enumerate(fitted.case.needles):
        if i != number:
            others = others.replace(needle, "")
    before, _, after = others.partition(fitted.case.needles[number])
    return len(before.strip()) / max(len(before.strip()) + len(after.strip()), 1)


def test_sentences_keep_their_ids_in_company(tokenizer):
    drawn = list(itertools.islice(words.prose(random.Random(1)), 20))
    whole = tokenizer.encode(" ".join(drawn))
    parts = in_text(tokenizer, drawn, " ")
    # The first sentence of the text has nothing before it; the others are as they are there.
    assert np.array_equal(np.concatenate(parts[1:]), whole[-sum(map(len, parts[1:])) :])
    assert tokenizer.decode(np.concatenate(parts)).strip() == " ".join(drawn)


def test_lines_keep_their_ends(byte_tokenizer):
    ids = in_text(byte_tokenizer, ["a: b", "c: d"], "\n")
    text = byte_tokenizer.decode(np.concatenate(ids))
    assert text == "\na: b\nc: d"


def test_characters_of_several_tokens_stay_whole(byte_tokenizer):
    ids = in_text(byte_tokenizer, ["\u4f60\u597d\u3002", "\u00e9t\u00e9."], "")
    assert [byte_tokenizer.decode(one) for one in ids] == ["\u4f60\u597d\u3002", "\u00e9t\u00e9."]


@pytest.mark.parametrize("length", [150, 151, 152, 153, 400, 997])
@pytest.mark.parametrize("chunk_tokens", [None, 40, 41, 64])
@pytest.mark.parametrize("template", ["plain", "turborag"])
def test_the_prompt_has_exactly_the_length(byte_tokenizer, length, chunk_tokens, template):
    frame = Frame(byte_tokenizer, TEMPLATES[template], chunk_tokens)
    if template == "turborag":
        length += 800  # its words are long
    fitted = frame.fit(a_case(0.3), length)
    assert fitted.num_tokens == length == len(prompt_of(frame, fitted))
    if chunk_tokens is not None:
        sizes = list(map(len, fitted.chunks))
        assert max(sizes) <= chunk_tokens and len(sizes) > 1 and min(sizes) > 0


@pytest.mark.parametrize("chunk_tokens", [None, 48])
@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 0.9, 1])
def test_needles_are_whole_and_where_they_should_be(tokenizer, depth, chunk_tokens):
    frame = Frame(tokenizer, TEMPLATES["plain"], chunk_tokens)
    fitted = frame.fit(a_case(depth), 1200)
    texts = [tokenizer.decode(chunk) for chunk in fitted.chunks]
    needle = fitted.case.needles[0]
    assert sum(text.count(needle) for text in texts) == 1
    found = filler_before(frame, fitted, 0)
    if depth in (0, 1):
        assert found == depth
    else:
        assert depth - 0.05 < found <= depth + 0.01
    ids = prompt_of(frame, fitted)[fitted.at[0] :]
    assert tokenizer.decode(ids).strip().startswith(needle)


def test_depth_1_is_the_end_behind_a_cut_sentence(byte_tokenizer):
    frame = Frame(byte_tokenizer, TEMPLATES["plain"])
    text = byte_tokenizer.decode(frame.fit(a_case(1), 333).chunks[0])
    assert text.endswith(" Here is needle 0, of 1.")


def test_many_needles_stand_each_at_its_depth(frame):
    depths = (0.8, 0.2, 0.5, 0.2)
    fitted = frame.fit(a_case(*depths), 2000)
    for number, depth in enumerate(depths):
        assert depth - 0.03 < filler_before(frame, fitted, number) <= depth + 0.01
    assert fitted.at[1] < fitted.at[3] < fitted.at[2] < fitted.at[0]


def test_the_same_case_fits_any_length(frame):
    case = a_case(1)
    short, long, again = (frame.fit(case, length).chunks[0] for length in (300, 600, 300))
    assert np.array_equal(short, again) and len(long) == len(short) + 300
    assert np.array_equal(long[:100], short[:100])


def test_the_lead_stands_at_the_end_or_not_at_all(frame):
    case = a_case(0.5)
    fitted = frame.fit(case, 300)
    assert frame.tokenizer.decode(prompt_of(frame, fitted)).endswith("It is")
    bare = dataclasses.replace(frame, with_lead=False).fit(case, 300)
    assert len(bare.lead) == 0 and bare.num_tokens == 300 == len(prompt_of(frame, bare))


def test_markers_are_counted_on_either_side(byte_tokenizer):
    template = PromptTemplate("odd", "Go.", "<< {text} >", "{question}")
    frame = Frame(byte_tokenizer, template, 50)
    before, around = frame.markers()
    assert before == len(byte_tokenizer.encode("<< ", special=True))
    assert around - before == len(byte_tokenizer.encode(" >", special=True))
    fitted = frame.fit(a_case(0.7, 0.1), 500)
    for at, needle in zip(fitted.at, fitted.case.needles, strict=True):
        text = byte_tokenizer.decode(prompt_of(frame, fitted)[at:])
        assert text.strip().startswith(needle)


def test_a_sentence_longer_than_a_chunk_is_cut_a_needle_is_not(byte_tokenizer):
    frame = Frame(byte_tokenizer, TEMPLATES["plain"], 30)
    long = a_case(0.5, filler=lambda: itertools.repeat("word " * 40 + "end."))
    fitted = frame.fit(long, 400)
    assert fitted.num_tokens == 400 and max(map(len, fitted.chunks)) <= 30
    with refused(RequestError, "30"):
        frame.fit(a_case(0.5, needles=(NEEDLE * 3,)), 400)


def test_a_length_without_room_is_refused_with_one_that_has(frame):
    case = a_case(0.5)
    with refused(RequestError, "30") as told:
        frame.fit(case, 30)
    least = int(str(told.value).split("take ")[1].split()[0])
    assert frame.fit(case, least).num_tokens == least
    with refused(RequestError, least - 1):
        frame.fit(case, least - 1)


def test_filler_that_ends_is_refused(frame):
    case = a_case(0.5, filler=lambda: iter(["Only this."] * 9))
    assert frame.fit(case, 100).num_tokens == 100
    with refused(RequestError):
        frame.fit(case, 1000)


def test_unknown_words_are_refused(village_frame):
    case = a_case(0.5, filler=lambda: itertools.repeat("The job of Bada Baler is cook."))
    with refused(RequestError, "'Here'"):
        village_frame.fit(case, 200)
    known = dataclasses.replace(case, needles=("She plays the harp.",), lead="",
                                question="Who is she?", expected=("harp",))  # fmt: skip
    assert village_frame.fit(known, 200).num_tokens == 200
    foreign = dataclasses.replace(known, filler=lambda: itertools.repeat("Rain fell."))
    with refused(RequestError, "'Rain'"):
        village_frame.fit(foreign, 200)
