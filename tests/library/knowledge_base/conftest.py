"""A knowledge base over a real tiny model whose tokenizer has one token per byte."""

import hashlib

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxrag.library.embed import as_embedder
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.models.model import random_model
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.reuse.encode import chunk_encoding, encode_for_store

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "larch"]


@pytest.fixture(scope="session")
def text_of():
    """``text_of(seed, length=60)``: so many random words."""

    def make(seed, length=60):
        return " ".join(np.random.default_rng(seed).choice(WORDS, length))

    return make


def make_tokenizer():
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return Tokenizer(made.to_str().encode(), {}, {})


@pytest.fixture(scope="session")
def config(tiny_config):
    return tiny_config(vocab_size=256, num_layers=2, bos_id=None, eos_ids=())


@pytest.fixture(scope="session")
def model(config):
    return random_model(config, tokenizer=make_tokenizer())


@pytest.fixture
def make_kb(tmp_path, model):
    """``make_kb(name="kb", **options)``: opens a knowledge base, closed at the end of the test."""
    opened = []

    def make(name="kb", **options):
        options = {"template": "plain", "chunk_tokens": 100, **options}
        opened.append(KnowledgeBase.open(tmp_path / name, model, **options))
        return opened[-1]

    yield make
    for kb in opened:
        kb.close()


@pytest.fixture
def kb(make_kb):
    return make_kb()


@pytest.fixture
def encoded(monkeypatch):
    """The numbers of chunks that each call of the encoder was asked for."""
    calls = []

    def counting(model, encoder, prefix, chunks, *rest):
        calls.append(len(chunks))
        return encode_for_store(model, encoder, prefix, chunks, *rest)

    monkeypatch.setattr(chunk_encoding, "encode_for_store", counting)
    return calls


def bag_of_words(texts):
    """Hashed words, of length 1: near are texts that share many."""
    vectors = np.zeros((len(texts), 64), np.float32)
    for row, text in zip(vectors, texts, strict=True):
        for word in text.lower().split():
            row[hashlib.blake2b(word.strip("?.").encode(), digest_size=1).digest()[0] % 64] += 1
        row /= max(np.linalg.norm(row), 1e-6)
    return vectors


@pytest.fixture(scope="session")
def embedder():
    return as_embedder(bag_of_words, name="bag of words")
