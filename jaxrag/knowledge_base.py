"""A knowledge base: documents, their chunks, and the KV of every chunk, in one folder."""

import os
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import numpy as np

from jaxrag.catalog import Catalog, DocumentEntry, Hit
from jaxrag.chunking import Chunking
from jaxrag.encode import encoder_named
from jaxrag.errors import KnowledgeBaseError, RequestError
from jaxrag.ingest import AddReport, Ingest, Source
from jaxrag.models.model import Model
from jaxrag.prompts import PromptTemplate, template_from_dict, template_named
from jaxrag.store import ChunkStore, KVLayout
from jaxrag.store.chunk_store import Mode

CATALOG = "catalog.sqlite"
DEFAULT_CHUNK_TOKENS = 512
DEFAULT_TEMPLATE = "turborag"
DEFAULT_ENCODERS = ("isolated",)
_OVERLAP_SHARE = 50  # the default overlap is a fiftieth of a chunk: 10 tokens of 512


class KnowledgeBase:
    """Documents and the cached KV of their chunks, for one model and one prompt template.

    The folder holds ``catalog.sqlite`` (documents, chunks, full-text index) and a chunk store.
    Everything that shapes a stored chunk is fixed when the folder is made and remembered by it.

    Attributes:
      path: the folder. model: the model it was opened with, or None.
      model_path: directory of the model it was made with; None for a model made in memory.
      template, chunking, encoders: how its chunks are cut, wrapped and encoded.
      store: the chunk KV; writable when a model was given and the mode is not "r".
    """

    def __init__(
        self,
        path: Path,
        catalog: Catalog,
        settings: Mapping[str, Any],
        model: Model | None,
        mode: Mode,
    ) -> None:
        """Use ``KnowledgeBase.open``, which checks what is there first."""
        self.path = path
        self.model = model
        self.model_path: str | None = settings["model"]["path"]
        self.template: PromptTemplate = template_from_dict(settings["template"], str(path))
        self.chunking = Chunking(**settings["chunking"])
        self.encoders: tuple[str, ...] = tuple(settings["encoders"])
        self._catalog = catalog
        self._model_digest: str = settings["model"]["digest"]
        self.store = ChunkStore.open(
            path,
            settings["model"]["fingerprint"],
            KVLayout(**settings["layout"]),
            mode=mode,
        )

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        model: Model | None = None,
        *,
        template: PromptTemplate | str | None = None,
        chunk_tokens: int | None = None,
        overlap: int | None = None,
        encoders: Sequence[str] | None = None,
        mode: Mode = "rw",
    ) -> Self:
        """Open the knowledge base in a folder, or make one when there is none.

        Args:
          path: the folder, or its file:// URL.
          model: what encodes the chunks. None opens an existing knowledge base for search only.
          template: prompt format, or the name of one ("turborag" for a new knowledge base).
          chunk_tokens: largest chunk (512). overlap: tokens that consecutive chunks share (a
            fiftieth of chunk_tokens).
          encoders: names of the KV variants to keep of every chunk ("isolated"). A variant that an
            existing knowledge base lacks is kept from now on; adding a document again makes it.
          mode: "r" opens an existing knowledge base whose documents and stored KV stay as they are:
            chunks that a method has to encode are used and not kept.

        Raises:
          KnowledgeBaseError: no knowledge base and no model to make one with; a model, tokenizer,
            template or chunk size other than the remembered one; a path that cannot hold one.
          ConfigError, RequestError: an unknown template or encoder, sizes that make no chunks.
          TokenizerError: a new knowledge base for a model without a tokenizer.
          StoreError: files that cannot be read or written.
        """
        if mode not in get_args(Mode):
            raise KnowledgeBaseError(f"mode={mode!r}: expected one of {', '.join(get_args(Mode))}")
        folder = _folder(path)
        wanted = template_named(template) if isinstance(template, str) else template
        for name in encoders or ():
            encoder_named(name)
        if encoders is not None and not encoders:
            raise KnowledgeBaseError("encoders is empty; name at least one, such as 'isolated'")
        if (folder / CATALOG).is_file():
            catalog = Catalog.open(folder / CATALOG)
        elif model is None or mode == "r":
            raise KnowledgeBaseError(
                f"{folder} holds no knowledge base; ingest documents, or open it for writing with "
                "a model to make one"
            )
        else:
            size = DEFAULT_CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
            shared = size // _OVERLAP_SHARE if overlap is None else overlap
            settings = _new_settings(
                model,
                wanted or template_named(DEFAULT_TEMPLATE),
                Chunking(size, shared),
                tuple(encoders or DEFAULT_ENCODERS),
            )
            catalog = _create(folder, settings)
        try:
            settings = catalog.settings()
            _check_settings(folder, settings, model, wanted, chunk_tokens, overlap)
            added = [name for name in encoders or () if name not in settings["encoders"]]
            if added:
                if model is None or mode == "r":
                    raise KnowledgeBaseError(
                        f"{folder} has no {added[0]!r} chunks; open it for writing with its model "
                        "to add them"
                    )
                settings["encoders"] = catalog.extend("encoders", added)
            return cls(folder, catalog, settings, model, "r" if model is None else mode)
        except BaseException:
            catalog.close()
            raise

    def close(self) -> None:
        """Close the catalog; nothing else can be done with this object then."""
        self._catalog.close()

    def __enter__(self) -> Self:
        """The knowledge base itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def add(self, documents: Iterable[Source], *, progress: bool = False) -> AddReport:
        """Cut documents into chunks, make their KV durable, then make them findable.

        Each item is a Document (or a BadDocument, which is passed on), a text, a pathlib.Path of a
        file or folder, or a mapping with a "text". A document whose id is known is replaced as a
        whole when it changed and left alone when it did not. Bad documents are skipped and named in
        the report; a run that was cut short is continued by adding the same documents again.

        Args:
          documents: what to add. progress: draw a bar on stderr, where that is a terminal.

        Raises:
          KnowledgeBaseError: opened without a model, or for reading. DocumentError: not a list of
            documents.
          StoreError: KV or catalog cannot be written; documents committed before stay.
        """
        if self.model is None:
            raise KnowledgeBaseError(
                f"{self.path} was opened without a model and can only be searched; "
                "open it with the model to add documents"
            )
        if not self.store.writable:
            raise KnowledgeBaseError(
                f"{self.path} was opened for reading; open it with mode 'rw' to add documents"
            )
        ingest = Ingest(
            self.model, self.template, self.chunking, self.encoders, self.store, self._catalog
        )
        return ingest.run(documents, progress)

    def search(self, question: str, k: int = 5) -> list[Hit]:
        """The up to ``k`` chunks that share words with the question, best first (BM25).

        Raises RequestError for an empty question or k < 1.
        """
        if not isinstance(question, str) or not question.strip():
            raise RequestError(f"question={question!r}: expected a text that is not empty")
        if k < 1:
            raise RequestError(f"k={k}: expected at least 1 chunk")
        return self._catalog.search(question, k)

    def documents(self) -> list[DocumentEntry]:
        """Every document, by id."""
        return self._catalog.documents()

    def stats(self) -> dict[str, Any]:
        """Counts and settings, JSON-able.

        ``stored`` is what the chunk store holds of this model, the KV of the template's prefix
        among it. Reads every commit record of the store.
        """
        stored = self.store.stats().get(self.store.fingerprint)
        counts = self._catalog.counts()
        return {
            "path": str(self.path),
            "model": self.model_path,
            "model_digest": self._model_digest,
            "template": self.template.name,
            "chunk_tokens": self.chunking.chunk_tokens,
            "overlap": self.chunking.overlap,
            "documents": counts["documents"],
            "chunks": counts["chunks"],
            "tokens": counts["tokens"],
            "encoders": {name: counts["encoded"].get(name, 0) for name in self.encoders},
            "stored": {
                "chunks": stored.chunks if stored else 0,
                "tokens": stored.tokens if stored else 0,
                "bytes": stored.nbytes if stored else 0,
                "corrupt": stored.corrupt if stored else 0,
            },
        }


def _folder(path: str | os.PathLike[str]) -> Path:
    """The local folder that a path or file:// URL names."""
    text = os.fspath(path)
    scheme, separator, _ = text.partition("://")
    if separator:
        if scheme != "file":
            raise KnowledgeBaseError(
                f"{text}: a knowledge base needs a local folder, its catalog is an SQLite file; "
                "give a path or a file:// URL"
            )
        text = urllib.parse.unquote(urllib.parse.urlsplit(text).path)
    folder = Path(text).absolute()
    if folder.exists() and not folder.is_dir():
        raise KnowledgeBaseError(f"{folder} is a file; expected the folder of a knowledge base")
    return folder


def _new_settings(
    model: Model, template: PromptTemplate, chunking: Chunking, encoders: tuple[str, ...]
) -> dict[str, Any]:
    tokenizer = model.text_tokenizer()
    markers = len(template.chunk_ids(tokenizer, np.zeros(0, np.int32)))
    needed = len(template.prefix_ids(tokenizer)) + markers + chunking.chunk_tokens
    if needed > model.config.max_positions:
        raise KnowledgeBaseError(
            f"chunk_tokens={chunking.chunk_tokens} with the {template.name!r} template needs "
            f"{needed} positions, the model has {model.config.max_positions}; use smaller chunks"
        )
    config = model.config
    return {
        "model": {
            "path": None if model.path is None else str(Path(model.path).absolute()),
            "digest": model.digest,
            "fingerprint": model.fingerprint,
        },
        "tokenizer": tokenizer.digest,
        "layout": {
            "num_layers": config.num_layers,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "dtype": config.dtype,
        },
        "template": template.to_dict(),
        "chunking": {"chunk_tokens": chunking.chunk_tokens, "overlap": chunking.overlap},
        "encoders": list(dict.fromkeys(encoders)),
    }


def _create(folder: Path, settings: Mapping[str, Any]) -> Catalog:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KnowledgeBaseError(
            f"{folder} cannot be made ({error.strerror}); name a folder you may write to"
        ) from None
    return Catalog.create(folder / CATALOG, settings)


def _check_settings(
    folder: Path,
    settings: Mapping[str, Any],
    model: Model | None,
    template: PromptTemplate | None,
    chunk_tokens: int | None,
    overlap: int | None,
) -> None:
    """Refuse a model, tokenizer, template or chunk size that is not the remembered one."""
    known = settings["model"]
    if model is not None:
        if model.digest != known["digest"]:
            raise KnowledgeBaseError(
                f"{folder} belongs to model {known['path']} with digest {known['digest'][:16]}, "
                f"not to {model.path} with digest {model.digest[:16]}; use its model or ingest "
                "into another folder"
            )
        if model.fingerprint != known["fingerprint"]:
            raise KnowledgeBaseError(
                f"{folder} was made in {settings['layout']['dtype']} under fingerprint "
                f"{known['fingerprint'][:16]}, this model is {model.config.dtype} with fingerprint "
                f"{model.fingerprint[:16]}; load it with the same dtype and config or ingest again"
            )
        digest = None if model.tokenizer is None else model.tokenizer.digest
        if digest != settings["tokenizer"]:
            raise KnowledgeBaseError(
                f"{folder} was cut with tokenizer {settings['tokenizer'][:16]}, the model has "
                f"{digest and digest[:16]}; restore the tokenizer or ingest into another folder"
            )
    if template is not None and template.to_dict() != settings["template"]:
        raise KnowledgeBaseError(
            f"{folder} holds chunks for the template {settings['template']['name']!r}, not for "
            f"this {template.name!r}; leave the template out or ingest into another folder"
        )
    sizes = settings["chunking"]
    for name, value in (("chunk_tokens", chunk_tokens), ("overlap", overlap)):
        if value is not None and value != sizes[name]:
            raise KnowledgeBaseError(
                f"{folder} has {name}={sizes[name]}, not {value}; leave it out or ingest into "
                "another folder"
            )
