"""Text to token ids and back, from the ``tokenizer.json`` of a model directory.

Text never gains tokens on its way: BOS, EOS and templates are the business of the prompt. An added
token that is spelled inside a document, such as ``<|im_end|>`` or ``<think>``, stays ordinary text
unless the caller asks otherwise, whether or not the tokenizer calls it special.
"""

import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import TokenizerError
from jaxrag.base.gguf import is_gguf
from jaxrag.base.types import HostArray
from jaxrag.models.text.byte_level import spelled, speller
from jaxrag.models.text.chat import render_template
from jaxrag.models.text.gguf import read_gguf_tokenizer
from jaxrag.models.text.pieces import (
    PIECE_CHARACTERS,
    breaks_between_words,
    encode_in_pieces,
    pieces_of,
)

PROMPT_FILE = "prompt.toml"  # the prompt format of the model, see jaxrag.models.text.prompts
READING_FILE = "reading.toml"  # how it was trained to read chunks, see jaxrag.models.reading
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    PROMPT_FILE,
    READING_FILE,
)
TEMPLATE_DIRECTORY = "additional_chat_templates"

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_REPLACEMENT = "\ufffd"
_MOST_GROWTH = 64
_AT_ONCE = 1 << 14  # tokens that are read with Python's lock held
_LONG = 4096  # characters of a text for which other threads are let run


class Tokenizer:
    """A tokenizer; make one with ``Tokenizer.load``.

    Attributes:
      bos_id: id of the beginning-of-sequence token, or None.
      eos_ids: ids of the end-of-sequence token; empty when there is none.
      leading_ids: the special tokens the tokenizer's own post-processor or its ``add_bos_token``
        puts before a text (BOS for Llama, two tokens for GLM), int32 [n].
      digest: blake2b-256 of ``tokenizer.json``, in hex.
    """

    def __init__(
        self,
        data: bytes,
        config: Mapping[str, Any],
        templates: Mapping[str, str],
        where: str = "tokenizer.json",
    ) -> None:
        """Args: bytes of tokenizer.json, tokenizer_config.json, chat templates by name."""
        self._text = _parse(data, where)
        _switch_off(self._text)
        self._special = _parse(data, where)
        self._templates = dict(templates)
        self._special_tokens = _special_tokens(config)
        self.digest = hashlib.blake2b(data, digest_size=32).hexdigest()
        self.bos_id = self._token_id("bos_token", where)
        eos_id = self._token_id("eos_token", where)
        self.eos_ids: tuple[int, ...] = () if eos_id is None else (eos_id,)
        self.leading_ids = self._find_leading_ids(config)

    @classmethod
    def find(cls, directory: str | Path) -> "Tokenizer | None":
        """Load from a model directory or a GGUF file; None where it has none."""
        directory = Path(directory)
        if is_gguf(directory):
            stored = read_gguf_tokenizer(directory)
            if stored is None:
                return None
            return cls(stored.tokenizer, stored.config, stored.templates, str(directory))
        return cls.load(directory) if (directory / "tokenizer.json").is_file() else None

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Load from a model directory or a GGUF file.

        Raises TokenizerError when ``tokenizer.json`` is missing or a file cannot be read.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            found = cls.find(directory)
            if found is None:
                raise TokenizerError(
                    f"{directory}: no tokenizer.json; save the model's fast tokenizer there"
                )
            return found
        config = _read_json(directory / "special_tokens_map.json")
        config |= {
            key: value
            for key, value in _read_json(directory / "tokenizer_config.json").items()
            if value is not None or key not in config
        }
        return cls(path.read_bytes(), config, _read_templates(directory, config), str(path))

    def to_json(self) -> str:
        """``tokenizer.json``, for another process; ``Tokenizer`` reads it."""
        return str(self._special.to_str())

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self._text.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary writes it; added ones included."""
        return max(map(len, self._text.get_vocab(with_added_tokens=True)), default=0)

    @functools.cached_property
    def unk_id(self) -> int | None:
        """The id that stands for whatever the vocabulary lacks; None where nothing does.

        Byte-level and byte-fallback tokenizers spell everything, with or without such an id.
        """
        model = self._text.model
        if isinstance(model, models.Unigram):
            unigram_id: int | None = json.loads(self._text.to_str())["model"]["unk_id"]
            return unigram_id
        token = model.unk_token
        return None if token is None else self._text.token_to_id(token)

    @property
    def is_word_level(self) -> bool:
        """Whether the vocabulary is a list of words, so that any other word is lost as a whole."""
        return isinstance(self._text.model, models.WordLevel)

    @property
    def chat_templates(self) -> dict[str, str]:
        """The sources of the templates that render chats, by name."""
        return dict(self._templates)

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render_chat`` has a template to render."""
        return bool(self._templates)

    def encode(self, text: str, special: bool = False) -> HostArray:
        """Ids of a text, int32 [T], without BOS or EOS.

        ``special=True`` recognises added tokens spelled in the text, as a rendered chat needs. A
        long text is encoded in pieces, to the same ids, while other threads run. Raises
        TokenizerError for a text that the tokenizer's own rules fail on, and as
        ``encode_with_offsets``.
        """
        tokenizer = self._special if special else self._text

        def ids(piece: str) -> HostArray:
            return _ids(_encoding(tokenizer, piece))

        if len(text) <= PIECE_CHARACTERS:
            return ids(text)
        cuts = pieces_of(text, functools.partial(_encoded, tokenizer), self._breaks)
        return np.concatenate([ids(text[first:end]) for first, _, end in cuts])

    def encode_with_offsets(self, text: str) -> tuple[HostArray, HostArray]:
        """Ids int32 [T], and for each the (start, end) characters of the text it covers, [T, 2].

        A long text is encoded in pieces, to the same ids. Raises TokenizerError for one that is too
        long to be encoded at once and cannot be cut, and as ``encode``.
        """
        encode = functools.partial(_encoded, self._text)
        if len(text) <= PIECE_CHARACTERS:
            return encode(text)
        return encode_in_pieces(text, encode, self._breaks)

    @functools.cached_property
    def _breaks(self) -> str:
        """Before which characters a text may be cut: none where the model weighs whole texts."""
        if isinstance(self._text.model, models.Unigram):
            return ""
        return breaks_between_words(spelled(self._text))

    def unknown_words(self, text: str) -> list[str]:
        """What of a text becomes the unknown token, each piece once, in order of appearance.

        A piece is a word or mark for a word-level vocabulary; for one of sub-words the characters
        that it cannot spell, neighbours joined. Empty where ``unk_id`` is None.
        """
        return list(dict.fromkeys(text[start:end] for start, end in self._unknown_spans(text)))

    def knows_a_word(self, text: str) -> bool:
        """Whether a letter or digit of a text is left when the unknown pieces are taken out."""
        edges = [0, *(edge for span in self._unknown_spans(text) for edge in span), len(text)]
        known = (text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
        return any(character.isalnum() for piece in known for character in piece)

    def _unknown_spans(self, text: str) -> list[tuple[int, int]]:
        """Half-open ranges of characters, ascending, white space at their ends left out."""
        if self.unk_id is None:
            return []
        ids, offsets = self.encode_with_offsets(text)
        spans: list[tuple[int, int]] = []
        for i in np.flatnonzero(ids == self.unk_id):
            start, end = offsets[i]
            piece = text[start:end]
            start, end = end - len(piece.lstrip()), start + len(piece.rstrip())
            if start >= end:
                continue
            if not self.is_word_level and spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, end))
        return spans

    def encode_batch(self, texts: Sequence[str]) -> list[HostArray]:
        """``encode`` of many texts, in parallel."""
        with _panics():
            encodings = self._text.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | HostArray, skip_special: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self._special.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True) -> "TextStream":
        """A detokenizer for one answer that is still being generated."""
        return TextStream(self, skip_special)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template: str = "default",
        now: datetime.datetime | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        values: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Messages as the model's chat template writes them; encode it with ``special=True``.

        ``template`` names one of several templates; ``now`` is the date a template may print,
        ``values`` are variables of its own.
        Raises TokenizerError when there is no such template or it refuses the messages.
        """
        if template not in self._templates:
            names = ", ".join(sorted(self._templates)) or "none"
            raise TokenizerError(
                f"no chat template {template!r}; this tokenizer has: {names}; use a prompt "
                "template without chat"
            )
        return render_template(
            self._templates[template],
            messages,
            self._special_tokens,
            add_generation_prompt=add_generation_prompt,
            now=now,
            tools=tools,
            values=values,
        )

    def is_byte(self, token_id: int) -> bool:
        """Whether an id is one byte of byte fallback, ``<0xE4>``."""
        return _BYTE_TOKEN.fullmatch(self._text.id_to_token(token_id) or "") is not None

    def token_bytes(self, token_id: int) -> bytes | None:
        """What an id spells, an added one too; None for one that is not in the vocabulary."""
        token = self._text.id_to_token(token_id)
        if token is None:
            return None
        if self.is_byte(token_id):
            return bytes.fromhex(token[3:5])
        return token.encode() if token in self.added_tokens else self._spell(token)

    @functools.cached_property
    def _spell(self) -> Callable[[str], bytes]:
        return speller(self._text)

    def is_silent(self, token_id: int, skip_special: bool) -> bool:
        """Whether ``decode`` drops an id: not in the vocabulary, or special and skipped."""
        unknown = self._text.id_to_token(token_id) is None
        return unknown or (skip_special and token_id in self._special_ids)

    @functools.cached_property
    def added_tokens(self) -> dict[str, bool]:
        """Tokens that are no words of the vocabulary, in order of their ids: special or not."""
        added = sorted(self._special.get_added_tokens_decoder().items())
        return {token.content: token.special for _, token in added}

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._special.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def _token_id(self, name: str, where: str) -> int | None:
        token = self._special_tokens.get(name)
        if token is None:
            return None
        token_id: int | None = self._text.token_to_id(token)
        if token_id is None:
            raise TokenizerError(f"{where}: {name} {token!r} is not in the vocabulary")
        return token_id

    def _find_leading_ids(self, config: Mapping[str, Any]) -> HostArray:
        with _panics():
            plain = self._special.encode("a", add_special_tokens=False).ids
            processed = self._special.encode("a", add_special_tokens=True).ids
        starts = (i for i in range(len(processed)) if processed[i : i + len(plain)] == plain)
        leading = processed[: next(starts, 0)]
        stated = config.get("add_bos_token")
        if self.bos_id is not None and isinstance(stated, bool):
            if stated and self.bos_id not in leading:
                leading = [self.bos_id, *leading]
            elif not stated:
                leading = [i for i in leading if i != self.bos_id]
        return np.asarray(leading, np.int32)


class TextStream:
    """Pieces of text from ids that arrive one at a time.

    The pieces, ``flush`` included, concatenate to ``decode`` of all ids. A piece is held back while
    its last character may still change: in the middle of a UTF-8 sequence, and during a run of
    byte-fallback tokens, which decoders turn into U+FFFD as a whole when the run is not valid.
    """

    _LONGEST_WINDOW = 64  # ids that are decoded again at every push
    _KEPT = 8  # ids that stay in the window as context of the next ones

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text that were handed out

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that became certain, often one word, sometimes ''."""
        token_id = int(token_id)
        if self._tokenizer.is_silent(token_id, self._skip_special):
            return ""  # it does not even end a run of bytes
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        text = self._decode(self._window)
        sure = len(text) - text.endswith(_REPLACEMENT)  # of several, the last may still change
        if sure <= self._emitted:
            return ""
        piece = text[self._emitted : sure]
        self._emitted = sure
        if len(self._window) > self._LONGEST_WINDOW:
            # A decoder may strip a space from the first token, so the shorter window must already
            # begin with text: then the next decode strips the same space.
            kept = self._decode(self._window[-self._KEPT :])
            if kept:
                del self._window[: -self._KEPT]
                self._emitted = len(kept) - kept.endswith(_REPLACEMENT)
        return piece

    def flush(self) -> str:
        """The rest, however incomplete; the stream is then at its end."""
        text = self._decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)


def _encoded(tokenizer: tokenizers.Tokenizer, text: str) -> tuple[HostArray, HostArray]:
    encoding = _encoding(tokenizer, text)
    if len(encoding) <= _AT_ONCE:
        return _ids(encoding), np.array(encoding.offsets, np.int32).reshape(-1, 2)
    spans = map(encoding.token_to_chars, range(len(encoding)))
    parts = iter(lambda: list(itertools.islice(spans, _AT_ONCE)), [])
    return _ids(encoding), np.concatenate([np.array(part, np.int32) for part in parts])


def _ids(encoding: tokenizers.Encoding) -> HostArray:
    ids = encoding.ids
    starts = range(0, max(len(ids), 1), _AT_ONCE)
    return np.concatenate([np.asarray(ids[at : at + _AT_ONCE], np.int32) for at in starts])


def _encoding(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    with _panics():
        if len(text) < _LONG:
            return tokenizer.encode(text, add_special_tokens=False)
        # Of the two, only a batch gives way to other threads.
        return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def check_vocab(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Refuse a tokenizer whose ids do not fit the model's embedding: TokenizerError."""
    if tokenizer.vocab_size > config.vocab_size:
        raise TokenizerError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model's vocabulary has "
            f"{config.vocab_size} entries; use the tokenizer that belongs to this model"
        )


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer's files, and what else of a model is no weights: see TOKENIZER_FILES.

    Byte for byte; what the source lacks is left out. Of a GGUF file they are made.
    """
    stored = read_gguf_tokenizer(source) if is_gguf(source) else None
    if stored is not None:
        (target / "tokenizer.json").write_bytes(stored.tokenizer)
        config = json.dumps(dict(stored.config), indent=2) + "\n"
        (target / "tokenizer_config.json").write_text(config, encoding="utf-8")
        for name, template in stored.templates.items():
            path = target / "chat_template.jinja"
            if name != "default":
                (target / TEMPLATE_DIRECTORY).mkdir(exist_ok=True)
                path = target / TEMPLATE_DIRECTORY / f"{name}.jinja"
            path.write_text(template, encoding="utf-8", newline="")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if (source / TEMPLATE_DIRECTORY).is_dir():
        shutil.copytree(source / TEMPLATE_DIRECTORY, target / TEMPLATE_DIRECTORY)


def _parse(data: bytes, where: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises Exception itself
        raise TokenizerError(f"{where}: not a readable tokenizer ({error})") from None
    for part in (tokenizer.normalizer, tokenizer.decoder):
        if part is not None and (growth := _growth(json.loads(part.__getstate__()))) > _MOST_GROWTH:
            raise TokenizerError(
                f"{where}: its replacements make a text up to {growth} times as long, expected at "
                f"most {_MOST_GROWTH}; use the tokenizer that belongs to the model"
            )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _growth(state: Any) -> int:
    """How many times longer the replacements of a normalizer or decoder may make a text."""
    if isinstance(state, list):
        return math.prod(map(_growth, state))
    if not isinstance(state, dict):
        return 1
    own = len(state["content"]) if state.get("type") == "Replace" else 1
    return max(1, own) * math.prod(map(_growth, state.values()))


def _switch_off(tokenizer: tokenizers.Tokenizer) -> None:
    """Let no added token be found in a text, but for runs of white space, which mark nothing."""
    marks = [
        tokenizers.AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=True,
        )
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.content.strip()
    ]
    tokenizer.add_special_tokens(marks)
    tokenizer.encode_special_tokens = True


@contextlib.contextmanager
def _panics() -> Iterator[None]:
    """The panic of a library as a TokenizerError; it is none of Python's Exceptions."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(
            f"the tokenizer fails on this text ({' '.join(str(error).split())[:200]}); use the "
            "tokenizer that belongs to the model"
        ) from None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like; each is a string or an object with its content."""
    tokens = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def _read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; a file of its own wins over an entry of ``tokenizer_config.json``."""
    given = config.get("chat_template") or {}
    try:
        if isinstance(given, str):
            given = {"default": given}
        elif isinstance(given, list):
            given = {entry["name"]: entry["template"] for entry in given}
        templates = dict(given)
        if not all(isinstance(one, str) for pair in templates.items() for one in pair):
            raise TypeError("a name or template is no text")
    except (TypeError, ValueError, KeyError) as error:
        raise TokenizerError(
            f"{directory}: chat_template of tokenizer_config.json is malformed ({error}); expected "
            "a text, or a list of objects with name and template"
        ) from None
    for path in sorted((directory / TEMPLATE_DIRECTORY).glob("*.jinja")):
        templates[path.stem] = _read_file(path)
    default = directory / "chat_template.jinja"
    if default.is_file():
        templates["default"] = _read_file(default)
    return templates


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read ({error})") from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
