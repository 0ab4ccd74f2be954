"""Windows of tokens, sentences, sections: cover, overlap, size, and never half a character."""

import bisect
import itertools

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import refused
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.chunking import Chunking, Spans, split
from jaxrag.models.text.tokenizer import Tokenizer

ENGLISH = "The keeper climbs the stairs every evening, and the lamp is lit before dark.\n\n" * 4


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE trained on English, so that one Chinese character is three tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([ENGLISH], trainer)
    return Tokenizer(made.to_str().encode(), {}, {})


PIECES = st.sampled_from(
    ["Salt. ", "Dr. Wu said: ", "茶。", "\n", "\n\n", "# Head\n", "## 节\n", "- item\n", "```\n",
     "🍵", "word ", "3.5 ", "Title\n===\n", "!? ", "\r\n", "\t", "é", "\u0301", "\u200d", "。」",
     "x" * 40]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(st.lists(PIECES, min_size=1, max_size=40).map("".join), st.text(min_size=1)),
    st.sampled_from(["tokens", "sentence", "markdown"]),
    st.integers(4, 40),
    st.integers(0, 39),
)
def test_any_text_is_covered_in_order(tokenizer, text, by, size, overlap):
    text = text.encode("utf-8", "replace").decode()
    check_cover(tokenizer, text, Chunking(size, min(overlap, size - 1), by))


def check_cover(tokenizer, text, chunking):
    """Law: slices of one encoding, in order, whole characters, no gap, each with something new."""
    chunks = split(text, tokenizer, chunking)
    whole, offsets = tokenizer.encode_with_offsets(text)
    ends = [0, *itertools.accumulate((end for _, end in offsets), max)]
    reached = reached_tokens = 0
    spans = Spans(text, tokenizer)
    for index, chunk in enumerate(chunks):
        assert chunk.index == index
        assert chunk.ids.dtype == np.int32
        assert 0 < len(chunk.ids) <= chunking.chunk_tokens
        assert chunk.text == text[chunk.start : chunk.end]
        assert tokenizer.decode(chunk.ids) == chunk.text, "a character was cut"
        assert chunk.start <= reached < chunk.end, "a gap, or only overlap"
        first = bisect.bisect_right(ends, chunk.start) - 1
        assert reached_tokens - chunking.overlap <= first <= reached_tokens
        last = first + len(chunk.ids)
        assert np.array_equal(whole[first:last], chunk.ids), "no slice of the encoding"
        assert last > reached_tokens
        windows = spans.between(chunk.start, chunk.end)
        assert any(np.array_equal(window, chunk.ids) for window in windows)
        reached, reached_tokens = chunk.end, last
    assert reached == len(text)
    assert reached_tokens == len(whole)


def test_overlap_repeats_that_many_tokens_where_every_cut_is_allowed(tokenizer):
    chunks = split(ENGLISH, tokenizer, Chunking(20, 6))
    assert len(chunks) > 3
    for before, after in itertools.pairwise(chunks):
        assert np.array_equal(before.ids[-6:], after.ids[:6])


def test_character_longer_than_a_chunk_stays_whole(tokenizer):
    chunks = split("a🍵b🍵", tokenizer, Chunking(2, 1))
    assert "".join(tokenizer.decode(chunk.ids) for chunk in chunks) == "a🍵b🍵"
    assert [chunk.text for chunk in chunks] == ["a", "🍵", "b", "🍵"]


class FixedTokenizer:
    """Tokens that reach into the next character, as merges over UTF-8 bytes can."""

    def encode_with_offsets(self, text):
        offsets = [(0, 1), (0, 2), (1, 2), (2, 3), (2, 4), (3, 4)]
        return np.arange(6, dtype=np.int32), np.array(offsets, np.int32)


def test_tokens_that_span_two_characters_are_not_cut_between():
    chunks = split("灯塔港口", FixedTokenizer(), Chunking(4, 0))
    assert [chunk.ids.tolist() for chunk in chunks] == [[0, 1, 2], [3, 4, 5]]
    assert [chunk.text for chunk in chunks] == ["灯塔", "港口"]


def test_text_without_tokens_is_refused(tokenizer):
    with refused(DocumentError):
        split("", tokenizer, Chunking(8, 0))


def texts(chunks):
    return [chunk.text for chunk in chunks]


def test_sentences_stay_whole_and_fill_a_chunk(tokenizer):
    sentences = ["One two three. ", "Four five. ", "Six seven eight nine. ", "Ten."]
    sizes = [len(tokenizer.encode(sentence)) for sentence in sentences]
    text = "".join(sentences)
    chunks = split(text, tokenizer, Chunking(sizes[0] + sizes[1], 0, "sentence"))
    assert texts(chunks) == ["One two three. Four five. ", "Six seven eight nine. Ten."]
    chunks = split(text, tokenizer, Chunking(sizes[0] + sizes[1] - 1, 0, "sentence"))
    assert texts(chunks)[:2] == ["One two three. ", "Four five. "]


def test_overlap_is_whole_sentences_that_fit(tokenizer):
    sentences = ["Alpha beta gamma. ", "Delta. ", "Epsilon. ", "Zeta eta theta iota."]
    sizes = [len(tokenizer.encode(sentence)) for sentence in sentences]
    size = sum(sizes[1:])
    assert sum(sizes[:3]) <= size < sum(sizes)
    text = "".join(sentences)
    for overlap, again in ((0, 0), (sizes[2], 1), (sizes[1] + sizes[2], 2), (size - 1, 2)):
        first, second = split(text, tokenizer, Chunking(size, overlap, "sentence"))
        assert first.text == "".join(sentences[:3])
        assert second.text == "".join(sentences[3 - again :])


def test_sentence_longer_than_a_chunk_falls_back_to_windows(tokenizer):
    long = "A b c d e f g h i j k l m n o p q r s t u v w x y z. "
    chunks = split(f"Short one. {long}End.", tokenizer, Chunking(12, 4, "sentence"))
    assert chunks[0].text == "Short one. "
    windows = chunks[1:-1]
    assert windows[0].text.startswith("A b c")
    assert len(windows) > 4
    for before, after in itertools.pairwise(windows):
        assert np.array_equal(before.ids[-4:], after.ids[:4])
    assert chunks[-1].text.endswith("z. End.")


@pytest.mark.parametrize("by", ["sentence", "markdown"])
def test_a_long_sentence_is_cut_between_words_and_numbers(tokenizer, by):
    text = "so " + " and ".join(f"pump {n} moved {n}.{n + 3} million litres" for n in range(20))
    chunks = split(text, tokenizer, Chunking(48, 0, by))
    assert len(chunks) > 4 and "".join(texts(chunks)) == text
    for before, after in itertools.pairwise(texts(chunks)):
        assert before[-1] == " " or after[0] == " ", (before, after)


def test_chinese_sentences(tokenizer):
    chunks = split("天黑了。“点灯！”他说。走吧？", tokenizer, Chunking(16, 0, "sentence"))
    assert texts(chunks) == ["天黑了。", "“点灯！”", "他说。", "走吧？"]


BOOK = """intro line

# Book

## Part one
Text of one.
```
# a comment, not a heading
```

## Part two

### Deep
Text of deep.

# End
Last.
"""


def test_sections_begin_at_headings_and_know_their_path(tokenizer):
    chunks = split(BOOK, tokenizer, Chunking(500, 10, "markdown"))
    assert [chunk.section for chunk in chunks] == [
        "", "Book > Part one", "Book > Part two > Deep", "End",
    ]  # fmt: skip
    assert [chunk.text.strip().split("\n")[0] for chunk in chunks] == [
        "intro line", "# Book", "## Part two", "# End",
    ]  # fmt: skip
    assert "# a comment" in chunks[1].text


def test_section_longer_than_a_chunk_is_split_by_sentence(tokenizer):
    text = "# A\n\n" + "A sentence stands here. " * 6 + "\n\n# B\n\nShort."
    size = len(tokenizer.encode("# A\n\nA sentence stands here. A sentence stands here. \n\n"))
    chunks = split(text, tokenizer, Chunking(size, 0, "markdown"))
    assert [chunk.section for chunk in chunks] == ["A", "A", "A", "B"]
    assert chunks[0].text == "# A\n\nA sentence stands here. A sentence stands here. "
    assert all(chunk.text.strip()[-1] == "." for chunk in chunks)
    assert chunks[-1].text.strip() == "# B\n\nShort."


def test_by_tokens_headings_are_ordinary_text(tokenizer):
    chunks = split(BOOK, tokenizer, Chunking(500, 10))
    assert [(chunk.text, chunk.section, chunk.page) for chunk in chunks] == [(BOOK, "", None)]


@pytest.mark.parametrize("by", ["tokens", "sentence"])
def test_page_is_the_one_a_chunk_s_text_begins_on(tokenizer, by):
    pages = ["First page here.", "Second page text.", "Third page."]
    text = "\n\n".join(pages)
    starts = [text.index(page) for page in pages]
    chunks = split(
        text, tokenizer, Chunking(8, 0, by), pages=(starts[0], starts[1], starts[1], starts[2])
    )
    for chunk in chunks:
        at = chunk.start + len(chunk.text) - len(chunk.text.lstrip())
        expected = {0: 1, 1: 3, 2: 4}[sum(start <= at for start in starts) - 1]
        assert chunk.page == expected
    assert {chunk.page for chunk in chunks} == {1, 3, 4}
