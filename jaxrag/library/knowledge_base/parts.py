"""The parts of an open knowledge base: what its operations work on."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxrag.base.config import ModelConfig, config_from_dict
from jaxrag.base.errors import KnowledgeBaseError
from jaxrag.base.sharding import processes_of
from jaxrag.base.types import HostArray
from jaxrag.kv.store.chunk_store import Mode
from jaxrag.kv.store.owners import Owners, this_owner
from jaxrag.library.catalog import Catalog
from jaxrag.library.documents.chunking import Chunking
from jaxrag.library.embed import Embedder
from jaxrag.library.knowledge_base.location import open_repository, owners_of
from jaxrag.library.knowledge_base.settings import CHANGES, PRIMER, OpenOptions
from jaxrag.library.knowledge_base.vectors import ChunkVectors
from jaxrag.library.retrieve.adapters import retriever_plugin
from jaxrag.library.retrieve.base import Chunks, Reranker, Retriever
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import PromptTemplate, template_from_dict
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.reuse.attention_index.document import Indexing, indexing_from
from jaxrag.reuse.encode import ChunkEncoding, Primer, primer_from_dict

_LOG = logging.getLogger("jaxrag")
REPLACED = (
    "{folder}: its catalog is new, and the store has chunks of an earlier one; restore that from a "
    "backup, or add the documents again and free the rest with `jaxrag kb gc {folder} --gone {id}`"
)


class Parts:
    """The parts of an open knowledge base, and how they are let go.

    Attributes:
      id: names it in a repository that several share.
      model: the model it was opened with, or None.
      model_path: directory of the model it was made with; None for a model made in memory.
      model_digest: of the weights of that model.
      engine: what read its chunks, as ``load_model`` names it.
      template: wraps its chunks in a prompt.
      encoders: the KV variants that are kept of every chunk.
      primer: what "primed" encodes every chunk behind; None where none was chosen.
      indexing: what indexes long chunks are stored with; None where they get none.
      store: the chunk KV, of a fingerprint of its own; writable when the mode is "rw".
      mode: "rw" may change it, "r" changes no document and no stored KV.
      retriever: what ``search`` asks where no mode is named, one of ours or of LangChain or
        LlamaIndex; may be set at any time.
      reranker: what sorts the candidates of ``search``; may be set at any time.
    """

    def __init__(
        self,
        path: Path,
        catalog: Catalog,
        model: Model | None,
        mode: Mode,
        options: OpenOptions,
        retriever: Retriever | Any | None,
        reranker: Reranker | None,
    ) -> None:
        """Use ``KnowledgeBase.open``, which checks what is there first."""
        settings = catalog.settings()
        self.path = path
        self.id: str = settings["id"]
        self.model = model
        self.model_path: str | None = settings["model"]["path"]
        self.model_digest: str = settings["model"]["digest"]
        self.engine: str = settings["model"].get("engine", "jax")
        self.config: ModelConfig = config_from_dict(settings["model"]["config"], str(path))
        self.template: PromptTemplate = template_from_dict(settings["template"], str(path))
        self.chunking = Chunking(**settings["chunking"])
        self.encoders: tuple[str, ...] = tuple(settings["encoders"])
        known = settings.get(PRIMER)
        self.primer: Primer | None = None if known is None else primer_from_dict(known, str(path))
        table = settings.get("attention_index")
        self.indexing: Indexing | None = None if table is None else indexing_from(table)
        self.mode: Mode = mode
        self._catalog = catalog
        self._settings = settings
        self.retriever: Retriever | Any | None
        if isinstance(retriever, str):
            self.retriever = retriever_plugin(retriever)(self.chunks)
        else:
            self.retriever = retriever
        self.reranker = reranker
        self._vectors = None
        if settings["vectors"] is not None:
            self._vectors = ChunkVectors(path, settings["vectors"], options.embedder, mode)
        self.store = open_repository(path, settings, mode, options.secret, options.tier)
        if mode == "rw":
            self._own(settings, options)
            self._finish_removals()

    @property
    def chunks(self) -> Chunks:
        """What a retriever may ask about chunks (retrieve.adapters)."""
        catalog = self._catalog
        return Chunks(catalog.texts, catalog.ids_of_document, catalog.search)

    @property
    def embedder(self) -> Embedder | None:
        """What makes the vectors of its chunks' texts and of questions; None: nothing does.

        Raises KnowledgeBaseError when it is not at hand, or is another one than it was made with.
        """
        return None if self._vectors is None else self._vectors.embedder

    @property
    def index(self) -> str | None:
        """The kind of its vector index; None: it has none."""
        return None if self._vectors is None else str(self._vectors.settings["index"])

    def close(self) -> None:
        """Close the catalog and the store; nothing else can be done with this object then."""
        if self._vectors is not None:
            self._vectors.close()
        self.store.close()
        self._catalog.close()

    def __enter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        """Where it is and what it keeps, on one line."""
        return (
            f"<KnowledgeBase {str(self.path)!r}: template {self.template.name!r}, encoders "
            f"{', '.join(self.encoders)}, mode {self.mode!r}>"
        )

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _tokenizer(self, given: Tokenizer | None) -> Tokenizer:
        """The given one, the model's, or that of the model's directory, if it is the right one."""
        if given is None and self.model is not None:
            given = self.model.text_tokenizer()
        if given is None and self.model_path is not None:
            given = Tokenizer.load(self.model_path)
        if given is None:
            raise KnowledgeBaseError(
                f"{self.path} does not remember a model directory; pass the model's tokenizer"
            )
        if given.digest != self._settings["tokenizer"]:
            raise KnowledgeBaseError(
                f"{self.path} was cut with tokenizer {self._settings['tokenizer'][:16]}, not with "
                f"{given.digest[:16]}; name the directory of its model"
            )
        return given

    def _owners(self) -> Owners:
        return owners_of(self.path, self._settings)

    def _own(self, settings: Mapping[str, Any], options: OpenOptions) -> None:
        """Write down whose the repository's chunks are; say where another catalog had them."""
        owners, own = self._owners(), this_owner(self.id, self.path)
        owners.register(own)
        if not self._catalog.has_documents():
            local = settings["store"] is None
            for owner in owners.all():
                if (
                    owner.id != own.id
                    and owner.folder == own.folder
                    and (local or owner.host == own.host)
                ):
                    _LOG.warning(REPLACED.format(folder=self.path, id=owner.id))
        if options.accept_older and self._vectors is not None:
            # Their ids are free again in an older catalog, and must not name other chunks.
            ids = self._vectors.index.ids()
            self._vectors.remove(np.setdiff1d(ids, self._catalog.chunk_ids()))

    def _finish_removals(self) -> None:
        """Drop the vectors of chunks that have left, also those of a run that was cut short."""
        left = self._catalog.leaving() if self._vectors is not None else []
        if left:
            assert self._vectors is not None
            self._vectors.remove(left)
            self._catalog.settle(left)

    def _all_embedded(self, lately: bool = False) -> bool:
        """Whether every chunk has a vector; compared, as a damaged index may have lost some.

        ``lately`` as of ``ChunkVectors.compared``.
        """
        if self._vectors is None or not self._settings["vectors_complete"]:
            return False
        return not len(self._vectors.compared(self._catalog, lately).lost)

    @property
    def changes(self) -> int:
        """How many changes were acknowledged, by this process and others."""
        return int(self._catalog.settings().get(CHANGES, 0))

    @contextlib.contextmanager
    def _acknowledged(self) -> Iterator[None]:
        """A change that is safe when this is left: from damage to the catalog's log, and counted.

        The repository is told the count last. Who is killed before leaves it behind the catalog,
        never in front.
        """
        before = self._catalog.version()
        yield
        changed = self._catalog.version() != before
        count = _next(self._catalog.swap(CHANGES, _next)) if changed else 0
        self._catalog.checkpoint()
        if changed:
            self._owners().acknowledge(self.id, count)

    def _encoding(self, model: Model) -> ChunkEncoding:
        """How its chunks are encoded.

        Raises TokenizerError when the model takes no text, and KnowledgeBaseError when several
        processes hold it: each would change the catalog.
        """
        if len(processes_of(model.mesh)) > 1:
            raise KnowledgeBaseError(
                f"{self.path} is changed by processes that hold a model each, and several hold "
                "this one; load it onto the devices of one process"
            )
        tokenizer = model.text_tokenizer()
        prefix = self.template.prefix_ids(tokenizer)
        primer = None if self.primer is None else self.primer.tokens(self.template, tokenizer)
        apart = self.chunking.pasted
        return ChunkEncoding(model, self.store, prefix, self.indexing, apart, primer)

    def blocks_held(
        self,
        model: Model,
        encoder: str,
        prefix: HostArray,
        chunks: Sequence[HostArray],
        primer: HostArray | None = None,
    ) -> Iterator[tuple[int, HostArray]]:
        """KV of blocks of a chat that were ingested here as they are pasted.

        Nothing where chunks are cut in another way, stored in another form, or where documents name
        who may read them.

        Args:
          model: that reads the chat.
          encoder: whose KV it reads.
          prefix: token ids that begin its prompt, [P] int32.
          chunks: token ids of the blocks, [T] int32 each.
          primer: that it reads them behind, [R] int32; None: behind none.

        Yields (index into chunks, kv [L, 2, T, K, H]) of each that a document holds now.
        """
        same = self.store.layout == model.kv_layout and self._settings["model"]["fingerprint"]
        if not self.chunking.pasted or same != model.fingerprint or self._catalog.has_groups():
            return
        encoding = dataclasses.replace(self._encoding(model), prefix=prefix, primer=primer)
        indexes: dict[str, list[int]] = {}
        for index, ids in enumerate(chunks):
            indexes.setdefault(encoding.key(encoder, ids), []).append(index)
        listed = [key for key in indexes if self._catalog.has_key(key)]
        read = self.store.get_many(listed, on_missing="skip")
        for key, (start, length) in read.offsets.items():
            for index in indexes[key]:
                yield index, read.kv[:, :, start : start + length]

    def _require_model(self, purpose: str) -> Model:
        if self.model is None:
            raise KnowledgeBaseError(
                f"{self.path} was opened without a model; open it with the model to {purpose}"
            )
        return self.model

    def _require_writable(self, purpose: str) -> None:
        if self.mode != "rw":
            raise KnowledgeBaseError(
                f"{self.path} was opened for reading; open it with mode 'rw' to {purpose}"
            )


def _next(changes: int | None) -> int:
    """The count after one more change; None where none was counted yet."""
    return (changes or 0) + 1
