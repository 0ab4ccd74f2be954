"""Texts of an encoder: special tokens around, the end cut, spelled special tokens are text."""

from pathlib import Path

import pytest
import tokenizers
from refusal import refused

from jaxrag.base.errors import TokenizerError
from jaxrag.library.embed.text import EncoderTokenizer

MINILM = Path(__file__).parents[2] / "goldens" / "embed" / "minilm"


def tokens(tokenizer, text):
    (ids,), _ = tokenizer.encode([text])
    return [tokenizer._tokenizer.id_to_token(i) for i in ids]


@pytest.fixture
def tokenizer():
    return EncoderTokenizer.load(MINILM, max_tokens=6, vocab_size=1000)


def test_case_accents_and_chinese_characters(tokenizer):
    assert tokens(tokenizer, "Thé 鹭在") == ["[CLS]", "the", "鹭", "在", "[SEP]"]


def test_a_long_text_loses_its_end_and_keeps_the_special_tokens(tokenizer):
    text = "the heron wait at weir by mill"
    assert tokens(tokenizer, text) == ["[CLS]", "the", "heron", "wait", "at", "[SEP]"]
    ids, cut = tokenizer.encode([text, "the heron wait at", ""])
    assert [len(row) for row in ids] == [6, 6, 2]
    assert cut == 1


def test_a_spelled_special_token_is_text(tokenizer):
    assert "[SEP]" not in tokens(tokenizer, "[SEP]")[1:-1]


def test_a_tokenizer_that_does_not_fit(tmp_path):
    with refused(TokenizerError):
        EncoderTokenizer.load(tmp_path, 6, 1000)
    with refused(TokenizerError, "10"):
        EncoderTokenizer.load(MINILM, 6, 10)
    (tmp_path / "tokenizer.json").write_text("{}")
    with refused(TokenizerError):
        EncoderTokenizer.load(tmp_path, 6, 1000)
    plain = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    plain.save(str(tmp_path / "tokenizer.json"))
    with refused(TokenizerError):
        EncoderTokenizer.load(tmp_path, 6, 1000)
