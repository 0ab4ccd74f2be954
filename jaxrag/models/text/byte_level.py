"""Byte-level tokenizers: what their tokens spell, and small ones that are made on the spot."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def spelled(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Its vocabulary as text, added tokens left out; bytes that are no UTF-8 become U+FFFD.

    Of any tokenizer: where it is not byte-level, U+2581 stands for a space.
    """
    spell = speller(tokenizer)
    return [spell(it).decode("utf-8", "replace") for it in tokenizer.get_vocab(False)]


def speller(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """What gives the bytes of a token that was not added; U+2581 as in ``spelled``."""
    if not _is_byte_level(json.loads(tokenizer.to_str())):
        return lambda token: token.replace("\u2581", " ").encode()
    table = _bytes_of_characters()
    return lambda token: bytes(table[it] for it in token if it in table)


def _is_byte_level(state: Any) -> bool:
    parts = (state["pre_tokenizer"], state["normalizer"], state["decoder"])
    return any('"ByteLevel"' in json.dumps(part) for part in parts)


def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for.

    Printable Latin-1 characters stand for themselves, the other bytes in their order from U+0100.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + at): byte for at, byte in enumerate(others)
    }
