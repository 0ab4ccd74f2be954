"""The knowledge base itself: open, add, remove, search, keep in order."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args, overload

from jaxrag.base.errors import KnowledgeBaseError, RequestError
from jaxrag.base.groups import limited
from jaxrag.base.tables import require_kind
from jaxrag.kv.store.chunk_store import Mode
from jaxrag.kv.store.prefetch import Tier
from jaxrag.library.catalog import DocumentEntry
from jaxrag.library.documents import (
    DocumentFiles,
    DocumentSource,
    Intake,
    Shard,
    read_paths,
)
from jaxrag.library.export import (
    ChunkSelector,
    ExportedChunk,
    ExportReport,
    ExportRequest,
    export_selected,
)
from jaxrag.library.knowledge_base import upkeep
from jaxrag.library.knowledge_base.ingest import EncodeWhen, Ingest, PieceRunner
from jaxrag.library.knowledge_base.location import open_catalog, room_of
from jaxrag.library.knowledge_base.maintained import Maintained
from jaxrag.library.knowledge_base.plan import AddPlanner
from jaxrag.library.knowledge_base.prepare import Cut, Preparer
from jaxrag.library.knowledge_base.reports import AddPlan, AddReport
from jaxrag.library.knowledge_base.search import Hits, Search
from jaxrag.library.knowledge_base.settings import OpenOptions, find_folder
from jaxrag.library.knowledge_base.upkeep import Gone, compare
from jaxrag.library.knowledge_base.vectors import GivenEmbedder
from jaxrag.library.options import ChunkBy, SearchMode, SimilarBy
from jaxrag.library.retrieve.adapters import adopted
from jaxrag.library.retrieve.base import Reranker, Retriever
from jaxrag.library.retrieve.filters import Filter
from jaxrag.library.retrieve.terms import TERMS
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.reuse.attention_index.document import Indexing
from jaxrag.reuse.encode import Primer, prefix_key

_Removes = Literal["nothing", "certain", "all"]  # of what has left its files
_MOST = 1 << 31  # chunks that a search gives; no index counts further


class KnowledgeBase(Maintained):
    """Documents and the cached KV of their chunks, for one model and one prompt template.

    The folder holds ``catalog.sqlite`` (documents, chunks, full-text index), the vector index if
    there is an embedder, and the chunk store unless that lies elsewhere. Everything that shapes a
    stored chunk is fixed when the folder is made and remembered by it. Attributes: see ``Parts``.
    """

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        model: Model | None = None,
        *,
        template: PromptTemplate | str | None = None,
        chunk_tokens: int | None = None,
        overlap: int | None = None,
        chunk_by: ChunkBy | None = None,
        encoders: Sequence[str] | None = None,
        primer: Primer | str | None = None,
        neighbours: int | None = None,
        neighbour_changes: int | None = None,
        similar_by: SimilarBy | None = None,
        stored: str | None = None,
        salt: str | None = None,
        secret: bytes | None = None,
        reseal: bool = False,
        accept_older: bool = False,
        tier: str | os.PathLike[str] | None = None,
        store: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
        embedder: GivenEmbedder | None = None,
        index: str | None = None,
        attention_index: str | Mapping[str, Any] | Indexing | None = None,
        retriever: Retriever | Any | None = None,
        reranker: Reranker | None = None,
        mode: Mode | None = None,
    ) -> Self:
        """Open the knowledge base in a folder, or make one when there is none.

        Args:
          path: the folder, or its file:// URL.
          model: what encodes the chunks. None opens an existing knowledge base for search, or with
            mode "rw" for everything but adding.
          template: prompt format, or the name of one (for a new knowledge base the one that the
            model brings, else "turborag").
          chunk_tokens: largest chunk (512).
          overlap: tokens that consecutive chunks share (a fiftieth of chunk_tokens).
          chunk_by: "sentence", "markdown" or "tokens" ("sentence").
          encoders: names of the KV variants to keep of every chunk ("isolated" for a model that was
            trained to read chunks apart, else "after_prefix"). A variant that an existing
            knowledge base lacks is kept from now on; adding a document again makes it.
          primer: text that the encoder "primed" encodes every chunk behind: a name of
            configs/primers, a TOML file or a Primer. It is remembered as a whole.
          neighbours: how many similar chunks a chunk is encoded behind, by encoders that see them
            (10).
          neighbour_changes: how many of these may be others, and all in another order, before a
            chunk is encoded again (0: any change is enough). May be changed at every opening.
          similar_by: "vectors", or "bm25" with the chunk's text as the question ("vectors" where
            there is an embedder).
          stored: "native" keeps KV in the model's dtype, "int8" in half the bytes or less ("int8";
            "native" where chunks are cut as they are pasted).
          salt: of a tenant; knowledge bases of different salts share no key in one repository.
          secret: seals stored chunks: 16 random bytes or more. What it did not seal is a miss,
            whoever put it, and is encoded again. An existing knowledge base may get one at any
            time, and asks for it from then on.
          reseal: take this secret, or none, in place of the one that it was sealed with.
          accept_older: take a catalog that its store knows for an older copy as it is from now on.
            Documents that were added since are missing, and removed ones are back.
          tier: folder of this machine for copies of chunks that were read, of any number of
            knowledge bases; None keeps those of a URL in the folder, and no others.
          store: URL (s3://, gs://) or folder of the chunk repository; the folder itself when None.
            Chunks of a URL are kept in the folder too once they were read.
          max_bytes: limit of the chunk KV kept on local disk, 0 for none; the coldest is dropped,
            and encoded or fetched again when it is needed. May be changed at every opening.
          embedder: directory of an embedding model, or a function from texts to vectors; chunks
            then have vectors. An existing knowledge base without one gets it from now on; ``embed``
            makes the vectors of the chunks that are there.
          index: kind of vector index, "lance" or "exact", which compares all vectors ("lance").
          attention_index: kind and settings of the indexes that long chunks are stored with, for
            the decode rule "retrieval": such as "lists" or "lists:exact_below=16384,reach=8192"
            (none). An existing knowledge base without them keeps them from now on; adding a
            document again, or ``verify(repair=True)``, makes its chunks'.
          retriever: an object whose ``search`` is asked instead (retrieve.base.Retriever), a
            retriever of LangChain or LlamaIndex, or the name of one that an installed package
            announces (retrieve.adapters).
          reranker: scores (question, texts) of more candidates than are wanted, to sort them by.
          mode: "r" changes no document and no stored KV: chunks that a method has to encode are
            used and not kept. None means "rw" where a model is given and the folder can be written.

        Raises:
          KnowledgeBaseError: no knowledge base and no model to make one with; a model, tokenizer,
            embedder, secret or setting other than the remembered one; a catalog that is an older
            copy, restored from a backup; a path that cannot hold one.
          ConfigError: an unknown template, sizes that make no chunks, an embedder that is none.
          RequestError: an argument of another kind, or an unknown encoder.
          RetrievalError: an unknown index.
          TokenizerError: a new knowledge base for a model without a tokenizer.
          StoreError: files that cannot be read or written, a secret that is too short.
        """
        if mode is not None and mode not in get_args(Mode):
            raise KnowledgeBaseError(f"mode={mode!r}: expected one of {', '.join(get_args(Mode))}")
        require_kind("path", path, (str, os.PathLike), "a folder", optional=False)
        require_kind("model", model, (Model,), "a Model, as load_model(DIR) gives it")
        folder = find_folder(path)
        options = OpenOptions(
            template=template, chunk_tokens=chunk_tokens, overlap=overlap, chunk_by=chunk_by,
            encoders=encoders, primer=primer, neighbours=neighbours,
            neighbour_changes=neighbour_changes, similar_by=similar_by, stored=stored, salt=salt,
            secret=secret, reseal=reseal, accept_older=accept_older, tier=tier, store=store,
            max_bytes=max_bytes, embedder=embedder, index=index, attention_index=attention_index,
        )  # fmt: skip
        catalog, mode = open_catalog(folder, model, options, mode)
        try:
            return cls(folder, catalog, model, mode, options, retriever, reranker)
        except BaseException:
            catalog.close()
            raise

    def add(
        self,
        documents: Iterable[DocumentSource],
        *,
        progress: bool = False,
        shard: tuple[int, int] | None = None,
        cut: Cut | None = None,
        turn: PieceRunner | None = None,
        encode: EncodeWhen = "now",
    ) -> AddReport:
        """Cut documents into chunks, make their KV durable, then make them findable.

        Each item is a Document (or a BadDocument, which is passed on), a text, a pathlib.Path of a
        file or folder, or a mapping with a "text". A document whose id is known is replaced as a
        whole when it changed and left alone when it did not; KV is encoded of the chunks that
        changed. Bad documents are skipped and named in the report; a run that was cut short is
        continued by adding the same documents again. Variants that are encoded behind similar
        chunks come last, of every chunk whose neighbours are others now (``refresh``).

        Args:
          documents: what to add.
          progress: show how far it is, on stderr.
          shard: (i, n) takes the i-th of n parts of them, for n processes with the same list;
            with n > 1, call ``refresh`` when all have ended.
          cut: gives the chunks of a document where they were made elsewhere, with ``chunking`` and
            the model's tokenizer; None cuts it here.
          turn: runs a piece of encoding when others let it, and returns what it returns; None runs
            it at once. What it raises ends the run as any other error.
          encode: "now", or "on demand": documents are findable without KV, and a chunk is encoded
            by the process whose question needs it first, while others that need it wait for that.
            From then on ``verify`` does not count missing KV as damage.

        Raises:
          KnowledgeBaseError: opened without a model, or for reading; KV on demand where a variant
            is encoded behind similar chunks.
          RequestError: an ``encode`` that is neither.
          DocumentError: not a list of documents.
          ConfigError: a shard that does not exist.
          StoreError: KV, vectors or catalog cannot be written; documents committed before stay.
        """
        return self._add(
            documents, "nothing", progress=progress, shard=shard, cut=cut, turn=turn, encode=encode
        )

    def _add(
        self,
        documents: Iterable[DocumentSource],
        removes: _Removes,
        *,
        progress: bool,
        shard: tuple[int, int] | None = None,
        cut: Cut | None = None,
        turn: PieceRunner | None = None,
        encode: EncodeWhen = "now",
    ) -> AddReport:
        if encode not in get_args(EncodeWhen):
            raise RequestError(
                f"encode={encode!r}: expected one of {', '.join(get_args(EncodeWhen))}"
            )
        if shard is not None:
            pair = isinstance(shard, tuple | list) and len(shard) == 2
            if not pair or not all(type(number) is int for number in shard):
                raise RequestError(f"shard={shard!r}: expected two integers, (i, n)")
        part = Shard() if shard is None else Shard(*shard)
        model = self._require_model("add documents")
        self._require_writable("add documents")
        if encode == "on demand" and self._behind_others:
            raise KnowledgeBaseError(
                f"{self.path} keeps {' and '.join(self._behind_others)} KV, encoded behind similar "
                "chunks: add with encode='now', or make one that keeps after_prefix only"
            )
        if self._vectors is not None:
            _ = self._vectors.embedder  # refused before any work
            if not self._all_embedded(lately=True):
                self.embed(progress=progress)
        alone = tuple(name for name in self.encoders if name not in self._behind_others)
        preparer = Preparer(
            self._encoding(model), self.template, self.chunking, alone, self._catalog, cut
        )
        intake = Intake(documents, part)
        with self._acknowledged():
            if encode == "on demand" and not self._settings.get("on_demand"):
                self._catalog.set("on_demand", True)
                self._settings["on_demand"] = True
            report = Ingest(preparer, self._vectors, turn, encode).add_documents(intake, progress)
            report = self._without_gone(report, intake, removes)
        if self._behind_others and part.count == 1:
            return dataclasses.replace(report, neighbours=self.refresh(progress=progress))
        return report

    def sync(
        self,
        paths: Iterable[str | Path] | DocumentFiles,
        *,
        empty: bool = False,
        progress: bool = False,
        encode: EncodeWhen = "now",
    ) -> AddReport:
        """Add what files and folders hold, then remove what they hold no more.

        Removed are documents whose ``file`` lies below the paths and is there no more, or was read
        to its end without them: a row that was taken out. All of them leave in one transaction,
        after the new documents came. Documents of files that could not be read, of other folders
        and without a file stay. A path that is missing, or a folder in which nothing is left,
        removes nothing: it may be a disk that is not mounted.

        Args:
          paths: as of ``read_paths``, or what that gives.
          empty: remove also what came from paths that are missing and folders that are empty.
          progress: as of ``add``.
          encode: as of ``add``.

        Raises as ``add``, and DocumentError for a missing path without ``empty``.
        """
        files = _files_of(paths, empty)
        removes: _Removes = "all" if empty else "certain"
        return self._add(files, removes, progress=progress, encode=encode)

    def gone(self, paths: Iterable[str | Path] | DocumentFiles, *, empty: bool = False) -> Gone:
        """What ``sync`` would remove; reads the files and changes nothing."""
        intake = Intake(_files_of(paths, empty), Shard())
        for _ in intake:
            pass
        gone = compare(self._catalog.documents(), intake.paths, intake.seen, intake.whole)
        if not empty:
            return gone
        return Gone((*gone.ids, *gone.doubtful), (), gone.kept)

    def plan(
        self,
        documents: Iterable[DocumentSource],
        *,
        removed: Sequence[str] = (),
        search: bool = True,
        progress: bool = False,
    ) -> AddPlan:
        """What ``add`` would do; reads the documents and changes nothing.

        Args:
          documents: as of ``add``.
          removed: ids of documents that would be removed with it, as ``gone`` names them.
          search: find out whose neighbours would be others; without, ``behind`` is None.
          progress: show how far it is, on stderr.

        Raises KnowledgeBaseError when opened without a model, and as ``refresh`` where a variant
        sees neighbours; DocumentError for what is no list of documents.
        """
        model = self._require_model("say what it would encode")
        behind, near = self._behind_others, None
        if behind and search:
            near = self._neighbours(model)
            self._check_vectors(near.by)
        alone = tuple(name for name in self.encoders if name not in behind)
        preparer = Preparer(
            self._encoding(model), self.template, self.chunking, alone, self._catalog
        )
        planner = AddPlanner(preparer, near, behind)
        plan = planner.look(Intake(documents, Shard()), progress)
        leaving = (*plan.leaving, *removed)
        return dataclasses.replace(
            plan,
            leaving=leaving,
            behind=planner.count_behind(leaving),
            room=room_of(self._settings["store"] or str(self.path)),
        )

    def _without_gone(self, report: AddReport, intake: Intake, removes: _Removes) -> AddReport:
        """Remove what has left the files that were read, or report it."""
        if not intake.paths or intake.part.count > 1:
            return report
        gone = compare(self._catalog.documents(), intake.paths, intake.seen, intake.whole)
        nothing: tuple[str, ...] = ()
        everything = (*gone.ids, *gone.doubtful)
        removed, left = {
            "nothing": (nothing, everything),
            "certain": (gone.ids, gone.doubtful),
            "all": (everything, nothing),
        }[removes]
        if removed:
            self._catalog.remove(removed)
            self._finish_removals()
        return dataclasses.replace(report, removed=removed, gone=left, kept=gone.kept)

    def update(self, documents: Iterable[DocumentSource], *, progress: bool = False) -> AddReport:
        """Replace documents by others of the same ids; ``add`` by another name."""
        return self.add(documents, progress=progress)

    def remove(self, ids: Iterable[str]) -> upkeep.RemoveReport:
        """Remove documents by id. They are unreachable when this returns; ``gc`` frees their bytes.

        So is the KV of chunks that have seen them; with a model it is encoded again (``refresh``).

        Raises RequestError for a single text and for ids that are none, KnowledgeBaseError when
        opened for reading.
        """
        require_kind("ids", ids, (Iterable,), "a list of document ids", optional=False)
        if isinstance(ids, str):
            raise RequestError(f"ids={ids!r} is one text; expected a list of document ids")
        self._require_writable("remove documents")
        ids = list(ids)
        for index, name in enumerate(ids):
            require_kind(f"ids[{index}]", name, (str,), "a text, a document's id", optional=False)
        distinct = list(dict.fromkeys(ids))
        unknown = tuple(i for i in distinct if self._catalog.document(i) is None)
        with self._acknowledged():
            left = self._catalog.remove(distinct)
            self._finish_removals()
        again = self.refresh() if left and self.model and self._behind_others else None
        return upkeep.RemoveReport(len(distinct) - len(unknown), len(left), unknown, again)

    @overload
    def search(
        self, question: str, k: int = 5, *,
        where: Mapping[str, Any] | None = None, mode: SearchMode | None = None,
        min_score: float | None = None, groups: Sequence[str] | None = None,
    ) -> Hits: ...  # fmt: skip

    @overload
    def search(
        self, question: list[str] | tuple[str, ...], k: int = 5, *,
        where: Mapping[str, Any] | None = None, mode: SearchMode | None = None,
        min_score: float | None = None, groups: Sequence[str] | None = None,
    ) -> list[Hits]: ...  # fmt: skip

    def search(
        self,
        question: str | list[str] | tuple[str, ...],
        k: int = 5,
        *,
        where: Mapping[str, Any] | None = None,
        mode: SearchMode | None = None,
        min_score: float | None = None,
        groups: Sequence[str] | None = None,
    ) -> Hits | list[Hits]:
        """The up to ``k`` best chunks for a question, best first; a list of them for a list.

        Of equal chunks of several documents one is given. Where the vector index has lost vectors,
        or the index of words is of another version, what there is is searched, and the ``notes`` of
        the result say so.

        Args:
          question: a text or several.
          k: how many chunks at most.
          where: only documents with this metadata, such as {"year": {"$gte": 2020}}; see
            jaxrag.library.retrieve.filters.
          mode: "bm25" ranks by shared words, "vector" by embeddings, "hybrid" by both ranks. None
            asks the retriever if one was given; else "hybrid" where every chunk has a vector, and
            "bm25" where not.
          min_score: leaves out chunks that score less: by "bm25" the weights of shared words, a sum
            that grows with their number and rarity and has no upper end; by "vector" the inner
            product of the embedder's vectors, where these have length 1 the cosine, up to 1; of a
            reranker or a retriever of yours, its own. "hybrid" without a reranker has only ranks.
          groups: that the caller belongs to: of documents whose metadata names ``groups`` only
            those with one of them. None finds all, [] only documents without groups.

        Raises RequestError for an empty question, k < 1, a bad filter or group, a mode without
        vectors, or a least score in "hybrid" without a reranker.
        """
        questions = [question] if isinstance(question, str) else question
        if not isinstance(questions, list | tuple):
            raise RequestError(f"question={question!r}: expected a text that is not empty")
        for text in questions:
            if not isinstance(text, str) or not text.strip():
                raise RequestError(f"question={text!r}: expected a text that is not empty")
        if type(k) is not int or k < 1:
            raise RequestError(f"k={k!r}: expected at least 1 chunk")
        k = min(k, _MOST)
        complete = self._vectors is not None and bool(self._settings["vectors_complete"])
        given = self.retriever
        retriever = None if given is None else adopted(given, self.chunks)
        version = self._settings.get(TERMS)
        search = Search(self._catalog, self._vectors, complete, retriever, self.reranker, version)
        hits = search.run(questions, k, limited(where, groups), mode, min_score)
        return hits[0] if isinstance(question, str) else hits

    def chunk_of(self, key: str) -> str:
        """The chunk of a store key as people name it: document, place and encoder."""
        chunk = self._catalog.chunk_of(key)
        if chunk is None:
            return "what chunks are encoded behind"
        return f"{chunk.document_id} #{chunk.number}, {chunk.encoder}"

    def why_nothing(self, where: Mapping[str, Any]) -> list[str]:
        """Why no document at all can match a filter: a field or a type of value that none has."""
        return Filter.parse(where).cannot_match(self._catalog.metadata_kinds())

    def documents(
        self, where: Mapping[str, Any] | None = None, *, groups: Sequence[str] | None = None
    ) -> list[DocumentEntry]:
        """Every document, or those whose metadata matches, by id; ``groups`` as of ``search``."""
        where = limited(where, groups)
        return self._catalog.documents(None if where is None else Filter.parse(where))

    def counts(self) -> dict[str, Any]:
        """How many "documents", "chunks" and "tokens" it holds, and "encoded" chunks by variant."""
        return self._catalog.counts()

    def ids_beginning(self, prefix: str) -> list[str]:
        """Ids of the documents that begin with a text, which is not empty, in order."""
        return self._catalog.ids_beginning(prefix)

    def prefetch(
        self,
        what: str | Sequence[str],
        *,
        k: int = 5,
        tier: Tier = "page",
        groups: Sequence[str] | None = None,
    ) -> "concurrent.futures.Future[int]":
        """Bring chunk KV closer before it is asked for.

        Args:
          what: a question, whose ``k`` best chunks are meant in every variant that is kept, or a
            list of store keys.
          k: how many chunks of a question.
          tier: "page" asks the system to read the files, "host" keeps them in memory.
          groups: of a question, as of ``search``.

        Returns a Future of the bytes that are there now. Raises RequestError for another tier, a
        question that cannot be searched, or keys with groups.
        """
        if tier not in get_args(Tier):
            raise RequestError(f"tier={tier!r}: expected one of {', '.join(get_args(Tier))}")
        require_kind("what", what, (Sequence,), "a question or a list of keys", optional=False)
        if isinstance(what, str):
            ids = [hit.chunk_id for hit in self.search(what, k, groups=groups)]
            keys_by_id = [self._catalog.keys_of(ids, encoder) for encoder in self.encoders]
            keys = [key for by_id in keys_by_id for key in by_id.values()]
        elif groups is not None:
            raise RequestError("groups= limits a question; keys say nothing of readers: ask one")
        else:
            keys = list(what)
        return self.store.prefetch(keys, tier=tier)

    def export(
        self,
        out: str | os.PathLike[str],
        *,
        format: str = "safetensors",
        documents: Iterable[str] | None = None,
        keys: Iterable[str] = (),
        question: str | None = None,
        k: int = 5,
        where: Mapping[str, Any] | None = None,
        joined: bool = False,
        encoder: str | None = None,
        first_position: int | None = None,
        tokenizer: Tokenizer | None = None,
        progress: bool = False,
    ) -> ExportReport:
        """Write chunk KV to a folder for other programs; ``docs/format.md`` describes the files.

        Args:
          out: a new or empty folder, or that of an earlier export, which is continued.
          format: "safetensors" (transformers' cache), "lmcache" or "zarr".
          documents: ids of the documents whose chunks are meant; None is all that match ``where``.
          keys: chunks by their keys in the store, instead.
          question: the prompt of a question, instead: one file with the prefix and the ``k`` best
            chunks of documents that match ``where``.
          joined: the prefix and all chunks that are meant as one file.
          encoder: the KV variant, by default the first of ``encoders``.
          first_position: rotate keys to this position and the following; see ``ExportRequest``.
          tokenizer: of the model; by default read from the model's directory.
          progress: show how far it is, on stderr.

        Raises RequestError for arguments that contradict each other, KnowledgeBaseError for an
        unknown document, encoder or another tokenizer, StoreError for a folder that cannot take it.
        """
        require_kind("out", out, (str, os.PathLike), "a folder", optional=False)
        for name, texts in (("documents", documents), ("keys", keys)):
            if isinstance(texts, str):
                raise RequestError(f"{name}={texts!r} is one text: expected a list")
        request = ExportRequest(
            format=format,
            documents=None if documents is None else tuple(documents),
            where=where,
            keys=tuple(keys),
            question=question,
            hits=() if question is None else tuple(self.search(question, k, where=where)),
            joined=joined,
            first_position=first_position,
        )
        chosen = encoder or self.encoders[0]
        checked = self._tokenizer(tokenizer)
        ids = self.template.prefix_ids(checked)
        prefix = None
        if len(ids):
            prefix = ExportedChunk(prefix_key(self.store.fingerprint, checked.digest, ids), ids)
        selector = ChunkSelector(self._catalog, self.template, checked, chosen, prefix)
        return export_selected(request, selector, self.store, self.config, out, progress)


def _files_of(paths: Iterable[str | Path] | DocumentFiles, empty: bool) -> DocumentFiles:
    return paths if isinstance(paths, DocumentFiles) else read_paths(paths, missing_ok=empty)
