"""Tokenizers for random models."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxrag.models.text import byte_level
from jaxrag.models.text.tokenizer import Tokenizer


def trained_tokenizer(
    texts: Iterable[str], vocab_size: int, specials: Sequence[str] = (), **settings: Any
) -> Tokenizer:
    """A byte-level tokenizer trained on texts; without one it has a token a byte.

    ``settings`` are those of tokenizer_config.json.
    """
    made = byte_level.train(texts, vocab_size, specials)
    return Tokenizer(made.to_str().encode(), settings, {})
