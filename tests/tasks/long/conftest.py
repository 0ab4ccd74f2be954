"""Tokenizers of three kinds, and a frame around haystacks."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxrag.models.text.prompts import TEMPLATES
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.tasks.long.case import Frame

ROOT = Path(__file__).parents[3]
TEXT = (
    "The secret number of the amber oak lantern is 4839201. Behind the mill, the baker found it. "
    "Box KALORA holds what box TISEVO holds. The door opens with the number 71432."
)


@pytest.fixture(scope="session")
def byte_tokenizer(tokenizer_dir):
    return Tokenizer.load(tokenizer_dir)


@pytest.fixture(scope="session")
def piece_tokenizer():
    """Words begin with a mark instead of a space, and a text gains one in front."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=False, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    letters = [chr(n) for n in range(33, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return Tokenizer(tokenizer.to_str().encode(), {}, {})


@pytest.fixture(params=["byte", "piece"])
def tokenizer(request, byte_tokenizer, piece_tokenizer):
    """A tokenizer that can spell any English text."""
    return {"byte": byte_tokenizer, "piece": piece_tokenizer}[request.param]


@pytest.fixture
def frame(tokenizer):
    return Frame(tokenizer, TEMPLATES["plain"])
