"""The tokenizer of a GGUF file, as the ``tokenizer.json`` that describes the same.

Two kinds are read. "gpt2" is byte-level BPE; how a text is split before its merges is named by
``tokenizer.ggml.pre``, and the patterns are those that the names stand for in llama.cpp. "llama" is
SentencePiece's BPE: pieces with scores, of which the best neighbours are joined first, and bytes
for what no piece spells. A token of the control kind never comes of plain text.
"""

import collections
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.errors import TokenizerError
from jaxrag.base.gguf import Header, read_header

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST_OF_LINE = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_REST_OF_LINE}"
_GPT_4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SHORT}|{_BEFORE}{_UPPER}+{_LOWER}*{_SHORT}|\p{{N}}{{1,3}}"
    rf"{_REST_OF_LINE}"
)
_KEPT_WHOLE = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
# What each name of a pre-tokenizer stands for: patterns that split a text one after the other.
PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2", "mellum", "trillion", "exaone4"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe", "glm4"),
        (_WORDS + r"\p{N}{1,3}" + _REST,),
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2", "hunyuan"),
        (_WORDS + r"\p{N}" + _REST,),
    ),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT_4O,),
    "deepseek-coder": (
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u0800-\u9fa5\uac00-\ud7ff]+", r"\p{N}",
    ),
}  # fmt: skip

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_MARKED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_SPACE = "\u2581"
_MOST_TOKENS = 1 << 21
_MOST_GROWTH = 64  # characters of merges to one of the vocabulary
_LONGEST_PIECE = 1 << 10  # characters
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ENDS = ("eos", "eot", "eom")  # ids that end an answer
# Control tokens that end a turn in chats, for files that name only the end of a text.
_ENDS_OF_TURNS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
    }
)

# Control tokens that end an answer in gpt-oss's chats, whose messages end with <|end|>.
_HARMONY = {"<|return|>", "<|call|>"}


@dataclasses.dataclass(frozen=True)
class GGUFTokenizer:
    """What a model directory would have in its tokenizer's files.

    Attributes:
      tokenizer: of ``tokenizer.json``.
      config: of ``tokenizer_config.json``, without the templates.
      templates: chat templates by name.
    """

    tokenizer: bytes
    config: Mapping[str, Any]
    templates: Mapping[str, str]


def read_gguf_tokenizer(path: str | Path) -> GGUFTokenizer | None:
    """The tokenizer of a file, None where it has none.

    Raises TokenizerError for one of another kind, or whose parts do not fit each other, and
    ModelError as ``read_header`` does.
    """
    header = read_header(path)
    kind = header.text("tokenizer.ggml.model", "none")
    if kind == "none":
        return None
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(
            f"{path}: its tokenizer is a {kind!r:.80}; those of the kinds 'gpt2' (byte-level BPE) "
            "and 'llama' (SentencePiece) are read"
        )
    tokens, kinds = _vocabulary(header)
    names = _special_tokens(header, tokens)
    pre = header.text("tokenizer.ggml.pre", "default") or "default"
    made = _sentence_piece(header, tokens, kinds) if kind == "llama" else _bpe(header, tokens, pre)
    by_default = kind == "llama" or pre in _KEPT_WHOLE
    add_bos = bool(header.number("tokenizer.ggml.add_bos_token", by_default))
    if add_bos and "bos_token" in names:
        made["post_processor"] = _leading(names["bos_token"], tokens)
    added = [_added(i, tokens[i], kinds[i]) for i in range(len(tokens)) if kinds[i] in _MARKED]
    state = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **made}
    return GGUFTokenizer(
        tokenizer=json.dumps(state, ensure_ascii=False, separators=(",", ":")).encode(),
        config={
            **names,
            "add_bos_token": add_bos,
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        templates=_templates(header),
    )


def ending_ids(header: Header) -> list[int]:
    """Tokens that end an answer: what the metadata name, then control tokens that end a turn."""
    named = [header.number(f"tokenizer.ggml.{name}_token_id", -1) for name in _ENDS]
    tokens = header.texts("tokenizer.ggml.tokens")
    kinds = header.numbers("tokenizer.ggml.token_type").tolist()
    ends = _ENDS_OF_TURNS
    if {*tokens} >= _HARMONY:
        ends = ends - {"<|end|>"} | _HARMONY
    turns = (
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in ends
    )
    return list(dict.fromkeys([*(token_id for token_id in named if token_id != -1), *turns]))


def _vocabulary(header: Header) -> tuple[list[str], list[int]]:
    """Its tokens and the kind of each."""
    tokens = header.texts("tokenizer.ggml.tokens")
    kinds = header.numbers("tokenizer.ggml.token_type").tolist() or [_NORMAL] * len(tokens)
    if not 0 < len(tokens) <= _MOST_TOKENS or len(kinds) != len(tokens):
        raise TokenizerError(
            f"{header.path}: {len(tokens)} tokens and {len(kinds)} kinds of them, expected as many "
            f"of each, {_MOST_TOKENS} at most; convert the model again"
        )
    if len(set(tokens)) < len(tokens):
        twice = collections.Counter(tokens).most_common(1)[0][0]
        raise TokenizerError(
            f"{header.path}: the token {twice[:40]!r} has two ids; convert the model again"
        )
    return tokens, kinds


def _special_tokens(header: Header, tokens: Sequence[str]) -> dict[str, str]:
    """``bos_token`` and the like."""
    names = {}
    for ours, theirs in _NAMED.items():
        token_id = header.number(f"tokenizer.ggml.{theirs}_token_id", -1)
        if token_id == -1:
            continue
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            raise TokenizerError(
                f"{header.path}: tokenizer.ggml.{theirs}_token_id={token_id!r}: expected an id "
                f"below {len(tokens)}"
            )
        names[f"{ours}_token"] = tokens[token_id]
    return names


def _added(token_id: int, content: str, kind: int) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": kind != _USER_DEFINED,
    }


def _leading(bos: str, tokens: Sequence[str]) -> dict[str, Any]:
    """The post-processor that puts BOS first."""
    first, text = {"SpecialToken": {"id": bos, "type_id": 0}}, "Sequence"
    return {
        "type": "TemplateProcessing",
        "single": [first, {text: {"id": "A", "type_id": 0}}],
        "pair": [first, {text: {"id": "A", "type_id": 0}}, {text: {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }


def _bpe(header: Header, tokens: Sequence[str], pre: str) -> dict[str, Any]:
    """Byte-level BPE."""
    if pre not in PATTERNS:
        raise TokenizerError(
            f"{header.path}: tokenizer.ggml.pre={pre!r:.80} is not known; known "
            f"pre-tokenizers are {', '.join(PATTERNS)}; take the model as a Hugging Face directory"
        )
    flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    byte_level = {"type": "ByteLevel", **flags}
    splits = [_split(pattern) for pattern in PATTERNS[pre]]
    merges = header.texts("tokenizer.ggml.merges")
    parted = [(merge, merge.find(" ", 1)) for merge in merges]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": _model(
            tokens,
            [[merge[:at], merge[at + 1 :]] for merge, at in parted if at > 0],
            ignore_merges=pre in _KEPT_WHOLE,
        ),
    }


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sentence_piece(header: Header, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """BPE of pieces with scores, with bytes for what they do not spell."""
    scores = header.numbers("tokenizer.ggml.scores").tolist()
    if len(scores) != len(tokens):
        raise TokenizerError(
            f"{header.path}: {len(scores)} scores for {len(tokens)} tokens; convert the model again"
        )
    prefix = bool(header.number("tokenizer.ggml.add_space_prefix", True))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    behind = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    unknown = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": _SPACE}] if prefix else []), spaces],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [*behind, *([strip] if prefix else [])]},
        "model": _model(
            tokens,
            _merges(header.path, tokens, kinds, scores),
            byte_fallback=_BYTE in kinds,
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
        ),
    }


def _merges(
    path: Path, tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[list[str]]:
    """Every way to join two pieces to a third, the best third first."""
    pieces = {
        token: score
        for token, kind, score in zip(tokens, kinds, scores, strict=True)
        if kind == _NORMAL
    }
    room = _MOST_GROWTH * (sum(map(len, pieces)) + _LONGEST_PIECE)
    merges = []
    for piece in sorted(pieces, key=lambda it: -pieces[it]):
        for at in range(1, min(len(piece), _LONGEST_PIECE)):
            left, right = piece[:at], piece[at:]
            if left in pieces and right in pieces:
                merges.append([left, right])
                room -= len(piece)
        if room < 0:
            raise TokenizerError(
                f"{path}: its pieces are made of each other in more ways than those of a language; "
                "convert the model again"
            )
    return merges


def _model(tokens: Sequence[str], merges: list[list[str]], **others: Any) -> dict[str, Any]:
    state = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    return {**state, **others, "vocab": vocab, "merges": merges}


def _templates(header: Header) -> dict[str, str]:
    """Chat templates by name."""
    found = {}
    for key in header.metadata:
        name = re.fullmatch(r"tokenizer\.chat_template(?:\.(\w+))?", key)
        if name is not None:
            found[name[1] or "default"] = header.text(key) or ""
    return found
