"""What a knowledge base is made with: written once, remembered, and checked at every opening."""

import dataclasses
import os
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jaxrag.base.config import config_to_dict
from jaxrag.base.errors import KnowledgeBaseError, RequestError
from jaxrag.base.tables import require_kind
from jaxrag.kv.store.keys import derive
from jaxrag.kv.store.layout import KEPT
from jaxrag.kv.store.seal import Sealer
from jaxrag.library.documents.chunking import Chunking
from jaxrag.library.knowledge_base.vectors import choose_embedder
from jaxrag.library.options import (
    DEFAULT_FORM,
    DEFAULT_TOP_N,
    FORMATS,
    KnowledgeBaseOptions,
    SimilarBy,
)
from jaxrag.library.retrieve.lance import kind_named
from jaxrag.library.retrieve.terms import TERMS, TERMS_VERSION
from jaxrag.models.backend import check_encoders
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import BARE, PromptTemplate, template_named
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.reuse.attention_index import INDEXES
from jaxrag.reuse.attention_index.document import indexing_from
from jaxrag.reuse.encode import (
    Primer,
    default_primer,
    encoder_named,
    prefix_provenance,
    primer_from_dict,
    primer_named,
)
from jaxrag.reuse.methods import default_choice

# The settings of every knowledge base, without which it cannot be opened.
NEEDED = (
    "chunking", "encoders", "fingerprint", "id", "layout", "max_bytes", "model", "neighbours",
    "prefix_content", "salt", "store", "template", "tokenizer", "vectors", "vectors_complete",
)  # fmt: skip
PRIMER = "primer"  # the setting, of those whose encoders see one
CHANGES = "changes"  # how many were acknowledged; one that has none yet lacks the setting
# What takes the place of one that is lost: no answer depends on it.
REPLACED: Mapping[str, Any] = {
    "max_bytes": None,
    "last_gc": None,
    "vectors_complete": False,
    TERMS: None,
}
DEFAULT_CHUNK_TOKENS = 512
DEFAULT_INDEX = "lance"
_NO_PACKETS = (
    "a knowledge base keeps no packets: ask over documents without one, or train a primer "
    "(`jaxrag train primer --form primer`) for the encoder 'primed'"
)
_SHOWN = 16  # digits of a digest in a message
_OVERLAP_SHARE = 50  # the default overlap is a fiftieth of a chunk: 10 tokens of 512


@dataclasses.dataclass(frozen=True)
class OpenOptions(KnowledgeBaseOptions):
    """The options of an opening, read and checked.

    ``template`` is a PromptTemplate now, ``encoders`` a tuple, ``store`` a URL or an absolute path,
    ``embedder`` an Embedder, ``attention_index`` an Indexing, ``primer`` a Primer; or None.

    Attributes:
      embedder_path: absolute, where the embedder was given as a directory.
    """

    embedder_path: str | None = dataclasses.field(default=None, init=False)

    @property
    def sealed(self) -> str | None:
        """The name of the secret; None without one. Raises StoreError for one that is none."""
        return None if self.secret is None else Sealer(self.secret).name

    @property
    def indexing_table(self) -> dict[str, Any] | None:
        """The setting "attention_index"."""
        return None if self.attention_index is None else self.attention_index.to_table()

    def __post_init__(self) -> None:
        """Read what may be given in several ways, and refuse what no knowledge base can have."""
        require_kind(
            "template", self.template, (str, PromptTemplate), "a template's name, a .toml file or "
            "a PromptTemplate",
        )  # fmt: skip
        require_kind(
            "primer", self.primer, (str, Primer), "a primer's name, a .toml file or a Primer"
        )
        require_kind("chunk_tokens", self.chunk_tokens, (int,), "how many tokens")
        require_kind("overlap", self.overlap, (int,), "how many tokens")
        if isinstance(self.encoders, str):
            raise RequestError(f"encoders={self.encoders!r} is one text: expected a list of names")
        embedder, embedder_path = choose_embedder(self.embedder)
        template, indexing = self.template, self.attention_index
        read = {
            "embedder": embedder,
            "embedder_path": embedder_path,
            "template": template_named(template) if isinstance(template, str) else template,
            "encoders": None if self.encoders is None else tuple(self.encoders),
            "store": None if self.store is None else store_location(self.store),
            "attention_index": None if indexing is None else indexing_from(indexing),
            "primer": None if self.primer is None else primer_named(self.primer),
        }
        for name, value in read.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        encoders = [encoder_named(name) for name in self.encoders or ()]
        if self.encoders is not None and not encoders:
            raise KnowledgeBaseError("encoders is empty; name at least one, such as 'isolated'")
        if any(encoder.wraps for encoder in encoders):
            raise KnowledgeBaseError(_NO_PACKETS)
        top_n, by = self.neighbours, self.similar_by
        if top_n is not None and (type(top_n) is not int or top_n < 1):
            raise KnowledgeBaseError(f"neighbours={top_n!r}: expected at least 1 chunk")
        changes = self.neighbour_changes
        if changes is not None and (type(changes) is not int or changes < 0):
            raise KnowledgeBaseError(
                f"neighbour_changes={changes!r}: expected a number of neighbours, or 0 for none"
            )
        if by is not None and by not in get_args(SimilarBy):
            raise KnowledgeBaseError(
                f"similar_by={by!r}: expected one of {', '.join(get_args(SimilarBy))}"
            )
        if self.stored is not None and self.stored not in FORMATS:
            raise KnowledgeBaseError(
                f"stored={self.stored!r}: expected one of {', '.join(FORMATS)}"
            )
        if self.stored in KEPT and self.attention_index is not None:
            raise KnowledgeBaseError(
                f"attention_index with stored={self.stored!r}: indexes are over all keys of a "
                "chunk, and it leaves some out; choose native, int8 or int4"
            )
        if self.salt is not None and not isinstance(self.salt, str):
            raise KnowledgeBaseError(f"salt={self.salt!r}: expected a text")
        limit = self.max_bytes
        if limit is not None and (type(limit) is not int or limit < 0):
            raise KnowledgeBaseError(f"max_bytes={limit!r}: expected bytes, or 0 for no limit")
        alone = not encoders or not all(encoder.sees_neighbours for encoder in encoders)
        if self.attention_index is not None and not alone:
            raise KnowledgeBaseError(
                f"attention_index with encoders={', '.join(self.encoders or ())}: chunks that see "
                "their neighbours get no index; name 'isolated' or 'after_prefix' as well"
            )
        if self.index is not None:
            kind_named(self.index)
            if self.embedder is None:
                raise KnowledgeBaseError(
                    f"index={self.index!r} without an embedder; pass embedder="
                )


def new_settings(model: Model, options: OpenOptions) -> dict[str, Any]:
    """The settings of a knowledge base that is made now.

    Raises KnowledgeBaseError for chunks that the model's context does not hold, ConfigError for
    sizes that make no chunks, TokenizerError for a model without a tokenizer.
    """
    tokenizer, config = model.text_tokenizer(), model.config
    by = options.chunk_by or "sentence"
    if Chunking(1, 0, by).pasted:
        template = _bare_template(options)
    else:
        template = options.template or model.prompt_format()
    if options.template is not None:
        template.check_markers(tokenizer)
    size = DEFAULT_CHUNK_TOKENS if options.chunk_tokens is None else options.chunk_tokens
    overlap = size // _OVERLAP_SHARE if options.overlap is None else options.overlap
    chunking = Chunking(size, overlap, by)
    prefix = template.prefix_ids(tokenizer)
    needed = _positions_of(template, tokenizer, chunking.chunk_tokens)
    if needed > model.max_encoded:
        raise KnowledgeBaseError(
            f"chunk_tokens={chunking.chunk_tokens} with the {template.name!r} template needs "
            f"{needed} positions, the model has {model.max_encoded}; use smaller chunks"
        )
    encoders = list(dict.fromkeys(options.encoders or default_encoders(model)))
    primer = primer_setting(options, encoders)
    check_primer(primer, template, model, chunking.chunk_tokens)
    if model.backend is not None:
        check_encoders(model.backend, encoders)
        if options.stored not in (None, "native") or options.attention_index is not None:
            raise KnowledgeBaseError(
                f"{model.backend.called} keeps KV as it made it; leave --stored and "
                "indexes out, and choose the type of KV by --engine"
            )
    # What is pasted is shared with a pool that holds KV as it is computed, or is another engine's.
    whole = chunking.pasted or model.backend is not None
    stored = options.stored or ("native" if whole else DEFAULT_FORM)
    salt = options.salt or ""
    return {
        "id": uuid.uuid4().hex,
        TERMS: TERMS_VERSION,
        "model": {
            "path": None if model.path is None else str(Path(model.path).absolute()),
            "digest": model.digest,
            "fingerprint": model.fingerprint,
            "config": config_to_dict(config),
            **({} if model.backend is None else {"engine": model.backend.engine}),
        },
        "tokenizer": tokenizer.digest,
        "fingerprint": derive(model.fingerprint, stored=stored, salt=salt),
        "salt": salt,
        "sealed": options.sealed,
        "layout": {**model.whole_kv_layout.to_dict(), "stored": stored},
        "store": options.store,
        "max_bytes": options.max_bytes or None,
        "template": template.to_dict(),
        "prefix_content": (
            prefix_provenance(tokenizer.digest, prefix).content_id if len(prefix) else None
        ),
        "chunking": dataclasses.asdict(chunking),
        "encoders": encoders,
        **({} if primer is None else {PRIMER: primer.to_dict()}),
        "neighbours": neighbour_settings(options, options.embedder is not None),
        "attention_index": options.indexing_table,
        "vectors": None,  # added once its index is there
        "vectors_complete": False,
        "last_gc": None,
    }


def _positions_of(template: PromptTemplate, tokenizer: Tokenizer, chunk_tokens: int) -> int:
    """Of prefix and a chunk with the template's markers."""
    markers = len(template.chunk_ids(tokenizer, np.zeros(0, np.int32)))
    return len(template.prefix_ids(tokenizer)) + markers + chunk_tokens


def _bare_template(options: OpenOptions) -> PromptTemplate:
    """Nothing stands around chunks that are pasted into prompts of others.

    Raises KnowledgeBaseError for settings that such chunks have not.
    """
    bare = template_named(BARE)
    for name, value in (("chunk_tokens", options.chunk_tokens), ("overlap", options.overlap)):
        if value is not None:
            raise KnowledgeBaseError(
                f"{name}={value} with chunk_by={options.chunk_by!r}: its chunks have sizes of "
                "their own; leave it out"
            )
    if options.template not in (None, bare):
        raise KnowledgeBaseError(
            f"template {options.template.name!r} with chunk_by={options.chunk_by!r}: its chunks "
            f"are kept as they are pasted; leave the template out, or name {BARE}"
        )
    return bare


def default_encoders(model: Model) -> tuple[str, ...]:
    """The KV variants of a new knowledge base that names none: those that its model reads well."""
    return default_choice(model.config, model.reading).encoders


def neighbour_settings(options: OpenOptions, embedded: bool) -> dict[str, Any] | None:
    """The setting "neighbours" that the wanted encoders need; None when none of them sees any.

    Raises KnowledgeBaseError for a number of neighbours that no encoder sees, and for neighbours by
    vectors where chunks have none (``embedded`` is false).
    """
    if not any(encoder_named(name).sees_neighbours for name in options.encoders or ()):
        for name in ("neighbours", "neighbour_changes", "similar_by"):
            value = getattr(options, name)
            if value is not None:
                raise KnowledgeBaseError(
                    f"{name}={value} without an encoder that sees neighbours; name the encoder "
                    "'neighbours' as well, or leave it out"
                )
        return None
    by = options.similar_by or ("vectors" if embedded else "bm25")
    if by == "vectors" and not embedded:
        raise KnowledgeBaseError("similar_by='vectors' without an embedder; pass embedder=")
    changes = {"changes": options.neighbour_changes} if options.neighbour_changes else {}
    return {"top_n": options.neighbours or DEFAULT_TOP_N, "by": by, **changes}


def primer_setting(options: OpenOptions, encoders: Sequence[str]) -> Primer | None:
    """The primer of a knowledge base with these encoders; None when none of them sees any.

    Raises KnowledgeBaseError for a primer that no encoder sees.
    """
    if any(encoder_named(name).sees_primer for name in encoders):
        return options.primer or default_primer()
    if options.primer is not None:
        raise KnowledgeBaseError(
            f"primer={options.primer.name!r} without an encoder that sees a primer; name the "
            "encoder 'primed' as well, or leave it out"
        )
    return None


def check_primer(
    primer: Primer | None, template: PromptTemplate, model: Model, chunk_tokens: int
) -> None:
    """Refuse packets, and a primer without room for chunks of that many tokens: KnowledgeBaseError.

    And vectors of another model: ConfigError.
    """
    if primer is None:
        return
    if primer.wraps:
        raise KnowledgeBaseError(f"primer {primer.name!r}: {_NO_PACKETS}")
    primer.check_model(model.digest, model.config)
    tokenizer, limit = model.text_tokenizer(), model.max_encoded
    length = len(primer.tokens(template, tokenizer))
    needed = _positions_of(template, tokenizer, chunk_tokens)
    if needed + length > limit:
        raise KnowledgeBaseError(
            f"primer {primer.name!r} has {length} tokens, prefix and chunk need {needed}, and the "
            f"model has {limit} positions; use smaller chunks or a shorter primer"
        )


def vector_settings(options: OpenOptions) -> dict[str, Any] | None:
    """The setting "vectors", which names embedder and index; None without an embedder."""
    if options.embedder is None:
        return None
    return {
        "embedder": {
            "path": options.embedder_path,
            "digest": options.embedder.digest,
            "dim": options.embedder.dim,
        },
        "index": kind_named(options.index or DEFAULT_INDEX),
    }


def check_settings(
    folder: Path, settings: Mapping[str, Any], model: Model | None, options: OpenOptions
) -> None:
    """Refuse whatever is not as it is remembered. Raises KnowledgeBaseError."""
    _check_forms(folder, settings)
    if model is not None:
        _check_model(folder, settings, model)
    if options.template is not None and options.template.to_dict() != settings["template"]:
        raise KnowledgeBaseError(
            f"{folder} holds chunks for the template {settings['template']['name']!r}, not for "
            f"this {options.template.name!r}; leave the template out or ingest into another folder"
        )
    vectors, neighbours = settings["vectors"], settings["neighbours"] or {}
    indexing = options.indexing_table
    index = None if options.index is None else kind_named(options.index)
    if not neighbours:
        neighbour_settings(options, options.embedder is not None or vectors is not None)
    _check_primer_kept(folder, settings, options)
    for name, value, known in (
        ("chunk_tokens", options.chunk_tokens, settings["chunking"]["chunk_tokens"]),
        ("overlap", options.overlap, settings["chunking"]["overlap"]),
        ("chunk_by", options.chunk_by, settings["chunking"]["by"]),
        ("neighbours", options.neighbours, neighbours.get("top_n", options.neighbours)),
        ("similar_by", options.similar_by, neighbours.get("by", options.similar_by)),
        ("stored", options.stored, settings["layout"]["stored"]),
        ("store", options.store, settings["store"]),
        ("index", index, kind_named(vectors["index"]) if vectors else index),
        ("attention_index", indexing, settings.get("attention_index") or indexing),
    ):
        if value is not None and value != known:
            raise KnowledgeBaseError(
                f"{folder} has {name}={known}, not {value}; leave it out or ingest into "
                "another folder"
            )
    if options.salt is not None and options.salt != settings["salt"]:
        raise KnowledgeBaseError(
            f"{folder} was made with another salt; leave it out or ingest into another folder"
        )
    _check_seal(folder, settings.get("sealed"), options)
    if options.embedder is not None and vectors is not None:
        known, given = _shown_apart(vectors["embedder"]["digest"], options.embedder.digest)
        if given != known:
            raise KnowledgeBaseError(
                f"{folder} holds vectors of the embedder {vectors['embedder']['path'] or known} "
                f"with digest {known}, not of this one with {given}; use its embedder or "
                "ingest into another folder"
            )


def _check_forms(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse forms of KV and of indexes that there are no more."""
    indexes = settings.get("attention_index")
    for name, value, known in (
        ("stored", settings["layout"]["stored"], FORMATS),
        ("attention_index", indexes and indexes["kind"], (None, *INDEXES)),
    ):
        if value not in known:
            raise KnowledgeBaseError(
                f"{folder} has {name}={value}, which this version does not know; ingest the "
                "documents again into a new folder"
            )


def _check_primer_kept(folder: Path, settings: Mapping[str, Any], options: OpenOptions) -> None:
    """Refuse another primer than the one that it has, and one that no encoder sees."""
    if PRIMER not in settings:
        primer_setting(options, [*settings["encoders"], *(options.encoders or ())])
        return
    known = primer_from_dict(settings[PRIMER], str(folder))
    if options.primer is None or options.primer.same(known):
        return
    other = f"not {options.primer.name!r}"
    if options.primer.name == known.name:
        other = "which is called the same and holds something else"
    raise KnowledgeBaseError(
        f"{folder} encodes chunks behind the primer {known.name!r}, {other}; leave the primer out "
        "or ingest into another folder"
    )


def _check_seal(folder: Path, known: str | None, options: OpenOptions) -> None:
    """Refuse another secret than the one that seals its chunks, or none, unless that is wanted."""
    given = options.sealed
    if known in (None, given) or options.reseal:
        return
    if given is None:
        raise KnowledgeBaseError(
            f"{folder} is sealed with secret {known}; pass its file as --secret-file or "
            "JAXRAG_SECRET_FILE, or its bytes as secret="
        )
    raise KnowledgeBaseError(
        f"{folder} is sealed with secret {known}, not with {given}; pass its own, or take "
        "this one from now on with `jaxrag kb verify --repair --reseal`"
    )


def _check_model(folder: Path, settings: Mapping[str, Any], model: Model) -> None:
    known = settings["model"]
    ours = "jax" if model.backend is None else model.backend.engine
    if ours != known.get("engine", "jax"):
        raise KnowledgeBaseError(
            f"{folder} was made with engine={known.get('engine', 'jax')!r}, not with {ours!r}; "
            "name its own, or ingest into another folder"
        )
    if model.digest != known["digest"]:
        theirs, ours = _shown_apart(known["digest"], model.digest)
        raise KnowledgeBaseError(
            f"{folder} belongs to model {known['path']} with digest {theirs}, "
            f"not to {model.path} with digest {ours}; use its model or ingest "
            "into another folder"
        )
    if model.fingerprint != known["fingerprint"]:
        theirs, ours = _shown_apart(known["fingerprint"], model.fingerprint)
        raise KnowledgeBaseError(
            f"{folder} was made in {settings['layout']['dtype']} under fingerprint "
            f"{theirs}, this model is {model.config.dtype} with fingerprint "
            f"{ours}; load it with the same dtype and config or ingest again"
        )
    digest = None if model.tokenizer is None else model.tokenizer.digest
    if digest != settings["tokenizer"]:
        theirs, ours = _shown_apart(settings["tokenizer"] or "none", digest or "none")
        raise KnowledgeBaseError(
            f"{folder} was cut with tokenizer {theirs}, the model has "
            f"{ours}; restore the tokenizer or ingest into another folder"
        )


def _shown_apart(one: str, other: str) -> tuple[str, str]:
    """Two digests as they are shown: their first digits, or all where these are the same."""
    length = max(len(one), len(other)) if one[:_SHOWN] == other[:_SHOWN] else _SHOWN
    return one[:length], other[:length]


def find_folder(path: str | os.PathLike[str]) -> Path:
    """The local folder that a path or file:// URL names. Raises KnowledgeBaseError for others."""
    text = os.fspath(path)
    scheme, separator, _ = text.partition("://")
    if separator:
        if scheme != "file":
            raise KnowledgeBaseError(
                f"{text}: a knowledge base needs a local folder, its catalog is an SQLite file; "
                "give a path or a file:// URL (its chunks may lie elsewhere: store=)"
            )
        text = urllib.parse.unquote(urllib.parse.urlsplit(text).path)
    folder = Path(text).absolute()
    if folder.exists() and not folder.is_dir():
        raise KnowledgeBaseError(f"{folder} is a file; expected the folder of a knowledge base")
    return folder


def store_location(store: str | os.PathLike[str]) -> str:
    """A repository as it is remembered: a URL as it is, a folder with its absolute path."""
    text = os.fspath(store)
    if "://" in text and not text.startswith("file://"):
        return text
    return str(find_folder(text))
