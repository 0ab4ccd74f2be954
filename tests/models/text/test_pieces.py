"""Long texts in pieces: the ids and offsets of the whole, in memory that grows with the text."""

import json
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tokenizers
from refusal import refused
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from jaxrag.base.errors import DocumentError, TokenizerError
from jaxrag.library.documents.chunking import Chunking, split
from jaxrag.models.text import byte_level, pieces
from jaxrag.models.text import tokenizer as tokenizer_module
from jaxrag.models.text.tokenizer import Tokenizer

SAMPLE = (
    "The salt wells of Yanjing were dug 1,200 years ago; naïve cafés don't count. 盐井 出产 红盐\n"
    "缓存保存每个文档块的键和值，所以文档不会被读取两次。\n\n  def f(x):\n    return x ** 2  # 3.1"
    "\n🍵 e\u0301 \u200d Ω≈ç ΟΔΟΣ ends\tA_b a  b\r\nit's 'quoted' I'LL x"
)
WORDS = SAMPLE.split(" ")
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def text_of(words, seed=0):
    rng = random.Random(seed)
    return "".join(
        rng.choice(WORDS) + rng.choice([" ", " ", " ", " ", "\n", "\n\n", "  ", ""])
        for _ in range(words)
    )


def gpt_2():
    return byte_level.train([text_of(400)], 700)


def llama_3():
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([text_of(400)], trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, show_progress=False
    ))  # fmt: skip
    return made


def llama_2():
    """No pre-tokenizer: merges are kept apart by the vocabulary alone, and a space is put first."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator([text_of(400)], trainers.BpeTrainer(
        vocab_size=900, show_progress=False,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
    ))  # fmt: skip
    made.pre_tokenizer = None
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return made


def metaspace():
    made = llama_2()
    made.normalizer = None
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return made


def bert():
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator([text_of(400)], trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[UNK]"], show_progress=False
    ))  # fmt: skip
    return made


def word_level():
    made = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.train_from_iterator([text_of(200)], trainers.WordLevelTrainer(
        special_tokens=["<unk>"], show_progress=False
    ))  # fmt: skip
    return made


def of_phrases():
    """Its tokens span words, so that no text may be cut at a space."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.train_from_iterator(["the salt wells of the salt lake " * 50], trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    ))  # fmt: skip
    return made


def unigram():
    """It weighs whole texts, so that none may be cut."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator([text_of(300)], trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    ))  # fmt: skip
    return made


def loaded(made):
    return Tokenizer(made.to_str().encode(), {}, {})


@pytest.fixture
def small(monkeypatch):
    """Pieces that short texts are cut into, many times."""
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 500)
    monkeypatch.setattr("jaxrag.models.text.tokenizer.PIECE_CHARACTERS", 500)
    monkeypatch.setattr(pieces, "_NEAR", 100)
    monkeypatch.setattr(pieces, "_AROUND", 64)


@pytest.fixture
def encoded(monkeypatch):
    """Lengths of the texts that the library is given."""
    lengths = []
    encode = tokenizer_module._encoding

    def watched(made, text):
        lengths.append(len(text))
        return encode(made, text)

    monkeypatch.setattr(tokenizer_module, "_encoding", watched)
    return lengths


@pytest.mark.parametrize("make", [gpt_2, llama_3, llama_2, metaspace, bert, word_level])
def test_pieces_give_the_ids_and_offsets_of_the_whole(small, encoded, make):
    made = make()
    tokenizer = loaded(made)
    for seed in range(6):
        text = text_of(2_000, seed)
        ids, offsets = tokenizer.encode_with_offsets(text)
        whole = made.encode(text, add_special_tokens=False)
        assert ids.tolist() == whole.ids
        assert [tuple(pair) for pair in offsets.tolist()] == whole.offsets
        assert ids.dtype == offsets.dtype == np.int32
        assert len(text) > 5_000 and max(encoded) < 1_000
        encoded.clear()
        np.testing.assert_array_equal(tokenizer.encode(text), ids)
        assert encoded and max(encoded) < 1_000


@pytest.mark.parametrize("make", [gpt_2, llama_3])
def test_special_tokens_are_found_in_pieces_as_well(small, encoded, make):
    made = make()
    made.add_special_tokens(["<|end of it|>"])
    tokenizer = loaded(made)
    for seed in range(4):
        words = text_of(2_000, seed).split(" ")
        words[::17] = ["<|end of it|>"] * len(words[::17])
        text = " ".join(words)
        ids = tokenizer.encode(text, special=True)
        assert ids.tolist() == made.encode(text, add_special_tokens=False).ids
        assert (ids == made.token_to_id("<|end of it|>")).sum() == len(words[::17])
        assert max(encoded) < 1_000
        encoded.clear()


@pytest.mark.parametrize("special", [False, True])
def test_others_run_while_a_long_word_is_encoded(special):
    tokenizer, over, longest = loaded(gpt_2()), threading.Event(), 0.0

    def encode():
        tokenizer.encode("x1Yz" * 100_000, special=special)
        over.set()

    thread = threading.Thread(target=encode)
    begun = last = time.monotonic()
    thread.start()
    while not over.wait(0.001):
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    thread.join()
    assert longest < 0.5 * (time.monotonic() - begun)


@pytest.mark.parametrize("make", [of_phrases, unigram])
def test_a_tokenizer_whose_tokens_span_words_gets_the_whole(small, encoded, make):
    made = make()
    text = "the salt wells of the salt lake " * 100
    ids, _ = loaded(made).encode_with_offsets(text)
    assert ids.tolist() == made.encode(text, add_special_tokens=False).ids
    assert encoded == [len(text)]


def test_where_a_vocabulary_lets_a_text_be_cut():
    assert pieces.breaks_between_words(["a", " a", "\n", ".\n", "\n "]) == " \n"
    assert pieces.breaks_between_words(["a b"]) == "\n"
    assert pieces.breaks_between_words(["\ufffd\n"]) == " "
    assert "\ufffd" in byte_level.spelled(gpt_2())


def test_a_text_that_cannot_be_cut_is_refused_before_it_is_encoded(small, encoded, monkeypatch):
    monkeypatch.setattr(pieces, "MAX_CHARACTERS", 3_000)
    tokenizer = loaded(gpt_2())
    assert len(tokenizer.encode_with_offsets("x" * 3_000)[0])
    encoded.clear()
    text = text_of(300) + "x" * 3_100
    with refused(TokenizerError, "3000"):
        tokenizer.encode_with_offsets(text)
    assert max(encoded) <= 128
    with refused(DocumentError, "3000"):
        split(text, tokenizer, Chunking(64, 0))


def test_a_text_is_cut_beyond_a_long_run(small, encoded):
    made = gpt_2()
    text = text_of(500) + "x" * 1_500 + " " + text_of(500)
    ids, _ = loaded(made).encode_with_offsets(text)
    assert ids.tolist() == made.encode(text, add_special_tokens=False).ids
    assert 1_500 < max(encoded) < 2_500


def test_memory_grows_with_the_text_by_a_small_factor(tmp_path):
    """A line of 5 MB took 1.5 GB; the text itself takes 1 byte a character."""
    (tmp_path / "tokenizer.json").write_text(gpt_2().to_str())
    program = """
import json, resource, sys
from jaxrag.library.documents.chunking import Chunking, split
from jaxrag.models.text.tokenizer import Tokenizer
tokenizer = Tokenizer.load(sys.argv[1])
line = "The salt wells of Yanjing were dug 1,200 years ago. " * 20
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
split(line * 200, tokenizer, Chunking(512, 10))
before = peak()
text = line * 2_000
chunks = split(text, tokenizer, Chunking(512, 10))
print(json.dumps([len(text), peak() - before, chunks[-1].end]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True
    )
    size, grown, end = json.loads(done.stdout)
    assert size == end == 2_080_000
    assert grown < 20 * size
