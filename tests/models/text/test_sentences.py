"""Where sentences end: English with its abbreviations, Chinese, Japanese, lists and headings."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrag.models.text.pieces import sentence_starts


def sentences(text):
    return [text[a:b] for a, b in itertools.pairwise((0, *sentence_starts(text), len(text)))]


@pytest.mark.parametrize(
    "parts",
    [
        ["Dr. Smith and Mrs. Wu met A. B. Jones at 3.30 p.m. in the U.S. embassy. ", "They spoke."],
        ["Prices rose 3.5 percent. ", 'He said "Stop." ', "Why? ", "Really?! ", "(Yes.) ", "No."],
        ["See Fig. 3, i.e. the one of No. 5 by Lee et al. in vol. 2. ", "He said no. ", "Then."],
        ["It is alive... and well. ", "Well... ", "So it ended."],
        ["an end. then lower case goes on.\n\n", "unless a line is empty"],
        ["看守人爬上楼梯。", "他说：“天黑了！”", "然后点灯。", "真的吗？！", "是的。"],
        ["「こんにちは。」", "と言った。", "彼は三歳です。"],
        ["Mixed 中文。", "And English. ", "再来。"],
        ["# Heading\nand text\nwrapped. ", "More:\n", "- one\n", "- two\n", "1. three\n", "2. f"],
        ["Name | Depth\n", "| a | b |\n", "| c | d |"],
        ["  leading space. ", "Next.   \n\n"],
    ],
)  # fmt: skip
def test_sentences_of(parts):
    assert sentences("".join(parts)) == parts


@pytest.mark.parametrize("text", ["", " \n ", "one", "one.", "one. ", "。", "..."])
def test_a_single_sentence_has_no_start_within(text):
    assert sentence_starts(text) == []


@given(st.text('a. \n。!"#-1|`A', max_size=80))
def test_starts_ascend_and_stand_on_text(text):
    starts = sentence_starts(text)
    assert starts == sorted(set(starts))
    assert all(not text[start].isspace() and text[:start].strip() for start in starts)
