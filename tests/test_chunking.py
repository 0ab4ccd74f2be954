"""Windows of tokens: cover, overlap, size, and never half a character."""

import itertools

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxrag.chunking import Chunking, split
from jaxrag.errors import ConfigError, DocumentError
from jaxrag.tokenizer import Tokenizer

ENGLISH = "The keeper climbs the stairs every evening, and the lamp is lit before dark.\n\n" * 4
CHINESE = "看守人每天傍晚爬上楼梯，天黑之前点亮灯塔。" * 4
MIXED = "Tea 茶 🍵🍵🍵 and naïve café — " * 6


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE trained on English, so that one Chinese character is three tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([ENGLISH], trainer)
    return Tokenizer(made.to_str().encode(), {}, {})


@pytest.mark.parametrize("text", [ENGLISH, CHINESE, MIXED], ids=["english", "chinese", "mixed"])
@pytest.mark.parametrize(("size", "overlap"), [(16, 0), (16, 5), (7, 6), (5, 1), (1000, 10)])
def test_chunks_cover_the_document_once(tokenizer, text, size, overlap):
    chunks = split(text, tokenizer, Chunking(size, overlap))
    whole = tokenizer.encode(text)
    reached = reached_tokens = 0
    for index, chunk in enumerate(chunks):
        assert chunk.index == index
        assert chunk.ids.dtype == np.int32
        assert 0 < len(chunk.ids) <= size
        assert chunk.text == text[chunk.start : chunk.end]
        assert tokenizer.decode(chunk.ids) == chunk.text, "a character was cut"
        assert chunk.start <= reached < chunk.end, "a gap, or only overlap"
        first = find(whole, chunk.ids, reached_tokens - min(overlap, len(chunk.ids) - 1))
        assert first <= reached_tokens < first + len(chunk.ids)
        reached, reached_tokens = chunk.end, first + len(chunk.ids)
    assert reached == len(text)
    assert reached_tokens == len(whole)


def find(whole, part, start):
    """The first place at or after ``start`` where ``part`` stands in ``whole``."""
    for first in range(max(start, 0), len(whole)):
        if np.array_equal(whole[first : first + len(part)], part):
            return first
    raise AssertionError("the chunk's ids are not a slice of the document's")


def test_without_overlap_the_texts_join_to_the_document(tokenizer):
    chunks = split(MIXED, tokenizer, Chunking(9, 0))
    assert "".join(chunk.text for chunk in chunks) == MIXED
    assert np.array_equal(np.concatenate([chunk.ids for chunk in chunks]), tokenizer.encode(MIXED))


def test_overlap_repeats_that_many_tokens_where_every_cut_is_allowed(tokenizer):
    chunks = split(ENGLISH, tokenizer, Chunking(20, 6))
    assert len(chunks) > 3
    for before, after in itertools.pairwise(chunks):
        assert np.array_equal(before.ids[-6:], after.ids[:6])


def test_text_of_exactly_one_chunk_gives_one(tokenizer):
    size = len(tokenizer.encode(ENGLISH))
    assert len(split(ENGLISH, tokenizer, Chunking(size, 10))) == 1
    assert len(split(ENGLISH, tokenizer, Chunking(size - 1, 10))) == 2


def test_character_longer_than_a_chunk_stays_whole(tokenizer):
    chunks = split("a🍵b🍵", tokenizer, Chunking(2, 1))
    assert "".join(tokenizer.decode(chunk.ids) for chunk in chunks) == "a🍵b🍵"
    assert [chunk.text for chunk in chunks] == ["a", "🍵", "b", "🍵"]


class FixedTokenizer:
    """Tokens that reach into the next character, as merges over UTF-8 bytes can."""

    def encode_with_offsets(self, text):
        offsets = [(0, 1), (0, 2), (1, 2), (2, 3), (2, 4), (3, 4)]
        return np.arange(6, dtype=np.int32), offsets


def test_tokens_that_span_two_characters_are_not_cut_between():
    chunks = split("灯塔港口", FixedTokenizer(), Chunking(4, 0))
    assert [chunk.ids.tolist() for chunk in chunks] == [[0, 1, 2], [3, 4, 5]]
    assert [chunk.text for chunk in chunks] == ["灯塔", "港口"]


def test_text_without_tokens_is_refused(tokenizer):
    with pytest.raises(DocumentError, match="no tokens"):
        split("", tokenizer, Chunking(8, 0))


@pytest.mark.parametrize(("size", "overlap"), [(0, 0), (8, 8), (8, 9), (8, -1)])
def test_sizes_that_cannot_advance_are_refused(size, overlap):
    with pytest.raises(ConfigError, match=r"chunk_tokens=|overlap="):
        Chunking(size, overlap)
