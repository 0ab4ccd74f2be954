"""What an embedding model's directory says beside its weights, in sentence-transformers' files.

modules.json                       which steps follow the encoder, in which folders
1_Pooling/config.json              how token vectors become one vector
sentence_bert_config.json          the longest text
config_sentence_transformers.json  what is put before a question and before a passage
"""

import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrag.base.errors import ModelError
from jaxrag.library.embed.bert import Pooling
from jaxrag.models.tensor_files import read_json

_LOG = logging.getLogger("jaxrag")

_POOLING_NAMES: dict[str, Pooling] = {
    "mean_tokens": "mean",
    "cls_token": "cls",
    "max_tokens": "max",
    "lasttoken": "last",
    # as newer files spell it in "pooling_mode"
    "mean": "mean",
    "cls": "cls",
    "max": "max",
}
_LENGTH_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_xlm-roberta_config.json",
)
_PASSAGE_PROMPTS = ("document", "passage", "corpus")
_NO_LIMIT = 1_000_000_000  # tokenizer_config.json says about 1e30 when it knows no limit


@dataclasses.dataclass(frozen=True)
class Prefixes:
    """Text put before every question and before every passage."""

    query: str = ""
    passage: str = ""


# Model cards tell these, the files of the models do not. By a pattern of the model's name.
KNOWN_PREFIXES: tuple[tuple[str, Prefixes], ...] = (
    (r"e5-(small|base|large)(-v2)?", Prefixes("query: ", "passage: ")),
    (
        r"bge-(small|base|large)-en(-v1\.5)?",
        Prefixes("Represent this sentence for searching relevant passages: "),
    ),
    (
        r"bge-(small|base|large)-zh(-v1\.5)?",
        Prefixes("为这个句子生成表示以用于检索相关文章："),  # noqa: RUF001
    ),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How texts become vectors, apart from the weights."""

    encoder: Path  # the folder with config.json, weights and tokenizer
    pooling: Pooling
    normalize: bool
    prefixes: Prefixes
    max_tokens: int | None  # of a text, special tokens included; None = as the encoder can
    lower_case: bool  # before tokenisation


def read_settings(directory: Path) -> Settings:
    """Read the settings of a model directory.

    A directory without modules.json is a plain encoder: mean pooling, vectors as they come.
    Raises ModelError for a step or a pooling that is not supported, or a malformed file.
    """
    encoder, normalize = directory, False
    pooling: Pooling = "mean"
    modules = directory / "modules.json"
    if modules.is_file():
        encoder, pooling, normalize = _read_modules(modules)
    else:
        _LOG.info("%s: no modules.json; mean pooling, vectors not normalised", directory)
    lengths = _optional(next(filter(Path.is_file, (encoder / n for n in _LENGTH_FILES)), None))
    limit = lengths.get("max_seq_length")
    if limit is None:
        limit = _optional(encoder / "tokenizer_config.json").get("model_max_length")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float)):
        raise ModelError(f"{encoder}: the longest text is {limit!r}: expected a number of tokens")
    return Settings(
        encoder=encoder,
        pooling=pooling,
        normalize=normalize,
        prefixes=_read_prefixes(directory, encoder),
        max_tokens=None if limit is None or limit > _NO_LIMIT else int(limit),
        lower_case=bool(lengths.get("do_lower_case", False)),
    )


def known_prefixes(*names: str) -> Prefixes | None:
    """The prefixes of KNOWN_PREFIXES for the first of these names that is listed there."""
    for name in names:
        for pattern, prefixes in KNOWN_PREFIXES:
            if re.fullmatch(rf"(multilingual-)?{pattern}", name, re.IGNORECASE):
                return prefixes
    return None


def _read_modules(path: Path) -> tuple[Path, Pooling, bool]:
    """The encoder's folder, the pooling, and whether vectors are normalised."""
    try:
        steps = [
            (str(step["type"]).rsplit(".", 1)[-1], path.parent / str(step["path"]))
            for step in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(f"{path}: expected a list of objects with type and path") from None
    kinds = [kind for kind, _ in steps]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(
            f"{path}: steps {', '.join(kinds)}: supported are Transformer, Pooling and then "
            "Normalize or nothing; pass any function from texts to vectors instead"
        )
    return steps[0][1], _read_pooling(steps[1][1] / "config.json"), len(steps) == 3


def _read_pooling(path: Path) -> Pooling:
    config = read_json(path)
    named = config.get("pooling_mode")
    prefix = "pooling_mode_"
    chosen = [named] if isinstance(named, str) else []
    chosen += [key.removeprefix(prefix) for key in config if key.startswith(prefix) and config[key]]
    if len(chosen) != 1 or chosen[0] not in _POOLING_NAMES:
        raise ModelError(
            f"{path}: pooling {' and '.join(chosen) or 'none'}: expected exactly one of "
            f"{', '.join(_POOLING_NAMES)}"
        )
    if not config.get("include_prompt", True):
        raise ModelError(f"{path}: include_prompt=false is not supported: prefixes are pooled too")
    return _POOLING_NAMES[chosen[0]]


def _read_prefixes(directory: Path, encoder: Path) -> Prefixes:
    """What the files say, else what is known of a model of this name, else nothing."""
    config = _optional(directory / "config_sentence_transformers.json")
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(isinstance(p, str) for p in prompts.values()):
        raise ModelError(
            f"{directory}/config_sentence_transformers.json: prompts={prompts!r}: expected an "
            "object of texts"
        )
    default = prompts.get(config.get("default_prompt_name") or "", "")
    passages = [prompts[name] for name in _PASSAGE_PROMPTS if name in prompts]
    stated = Prefixes(prompts.get("query", default), passages[0] if passages else default)
    if stated != Prefixes():
        return stated
    known = known_prefixes(*_names(directory, encoder))
    if known is None:
        return stated
    _LOG.info(
        "%s: query prefix %r and passage prefix %r, known from the model's name",
        directory, known.query, known.passage,
    )  # fmt: skip
    return known


def _names(directory: Path, encoder: Path) -> list[str]:
    """What the model may be called: its folder, its place in the hub's cache, its config."""
    path = directory.absolute()
    names = [path.name]
    if path.parent.name == "snapshots":  # models--ORGANISATION--NAME/snapshots/REVISION
        names.append(path.parent.parent.name.rsplit("--", 1)[-1])
    stated = _optional(encoder / "config.json").get("_name_or_path")
    if isinstance(stated, str):
        names.append(stated.rstrip("/").rsplit("/", 1)[-1].rsplit("_", 1)[-1])
    return names


def _optional(path: Path | None) -> dict[str, Any]:
    return read_json(path) if path is not None and path.is_file() else {}
