"""Byte-level BPE tokenizers for models that are made on the spot: benchmarks, the demo, tests."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers


def train(
    texts: Iterable[str], vocab_size: int, specials: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """Train one on texts; it spells any text.

    Args:
      texts: none gives one token a byte.
      vocab_size: tokens at most; the 256 bytes and the special tokens are always there.
      specials: special tokens, which get the first ids in this order.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(
    tokenizer: tokenizers.Tokenizer, directory: Path, settings: Mapping[str, Any] | None = None
) -> None:
    """Write tokenizer.json, and ``settings`` as tokenizer_config.json, into a model directory."""
    tokenizer.save(str(directory / "tokenizer.json"))
    text = json.dumps(dict(settings or {}))
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
