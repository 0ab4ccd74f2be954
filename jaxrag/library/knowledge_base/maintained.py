"""A knowledge base that is kept in order: vectors, neighbours, garbage, damage, counts."""

import collections
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.errors import (
    ChunkCorrupt,
    ChunkNotSealed,
    KnowledgeBaseError,
    RequestError,
    TokenizerError,
)
from jaxrag.base.tables import require_kind
from jaxrag.base.types import HostArray
from jaxrag.kv.store import ChunkStore, ReadThrough, Record
from jaxrag.kv.store.ledger import StoredChunk
from jaxrag.library.catalog import Catalog, Hit
from jaxrag.library.catalog.audit import RowsReport
from jaxrag.library.knowledge_base import upkeep
from jaxrag.library.knowledge_base.forgotten import ForgottenReport, look_for
from jaxrag.library.knowledge_base.neighbours import GivenChunk, Neighbours, Placed, refresh
from jaxrag.library.knowledge_base.parts import Parts
from jaxrag.library.knowledge_base.reports import RefreshReport
from jaxrag.library.knowledge_base.rows import Names, examine
from jaxrag.library.knowledge_base.settings import PRIMER, check_primer, find_folder
from jaxrag.library.knowledge_base.upkeep import Claim
from jaxrag.library.knowledge_base.vectors import ChunkVectors
from jaxrag.library.options import DEFAULT_TOP_N, SimilarBy
from jaxrag.library.retrieve.terms import TERMS, TERMS_VERSION
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.reuse.attention_index.document import indexes_nbytes
from jaxrag.reuse.encode import ENCODERS, Primer, encoder_named

DEFAULT_GRACE_SECONDS = 3600.0

GATE = "gate:"  # settings of this prefix, one a method, so that two gates do not meet


class Maintained(Parts):
    """What is done with the documents that are there."""

    def refresh(self, *, progress: bool = False, every: bool = False) -> RefreshReport:
        """Encode every chunk whose neighbours are not those that its KV was encoded behind.

        Of the encoder variants that see neighbours; ``add``, ``update`` and ``remove`` do it by
        themselves. Needed after documents were removed without a model or added in shards: until
        then a question encodes what it misses.

        Where nothing changed since the last refresh, nothing is searched; where neighbours are
        found by vectors, only chunks that the change can reach are. By words any change may reorder
        every list: each chunk is then a question to all, and the time grows with the square of
        their number. So it does with ``every``, which searches all: for what an approximate index
        missed as it was then.

        Raises KnowledgeBaseError when opened without a model or for reading, or when neighbours
        are found by vectors and chunks lack theirs.
        """
        model = self._require_model("encode chunks behind their neighbours")
        self._require_writable("encode its chunks")
        neighbours = self._neighbours(model)
        self._check_vectors(neighbours.by)
        with self._acknowledged():
            return refresh(neighbours, self._encoding(model), self._behind_others, progress, every)

    def neighbours_of(
        self, chunk_ids: Sequence[int], encoder: str, template: PromptTemplate | None = None
    ) -> list[tuple[HostArray, ...]]:
        """What precedes chunks under an encoder that sees neighbours.

        As recorded with their KV; where there is none, as a search finds them now.

        Args:
          chunk_ids: of hits.
          encoder: a key of ENCODERS.
          template: what wraps them; None is the knowledge base's own.

        Returns for every chunk the token ids of its neighbours, int32 [T] each, in order. Raises
        KnowledgeBaseError without a model, for a chunk that has left meanwhile, and as ``refresh``.
        """
        return [placed.neighbours for placed in self.placed(chunk_ids, encoder, template)]

    def placed(
        self, chunk_ids: Sequence[int], encoder: str, template: PromptTemplate | None = None
    ) -> list[Placed]:
        """As ``neighbours_of``: every chunk with its neighbours and their content ids."""
        neighbours = self._neighbours(self._require_model("find neighbours as token ids"))
        if template is not None:
            neighbours = dataclasses.replace(neighbours, template=template)
        placed = neighbours.recorded(chunk_ids, encoder)
        others = [i for i in chunk_ids if i not in placed]
        if others:
            self._check_vectors(neighbours.by)
            placed |= neighbours.find(others)
        gone = [i for i in chunk_ids if i not in placed]
        if gone:
            raise KnowledgeBaseError(f"{self.path} holds chunk {gone[0]} no more; search again")
        return [placed[i] for i in chunk_ids]

    def placed_given(
        self,
        chunks: Sequence[GivenChunk],
        template: PromptTemplate,
        room: int,
        groups: Sequence[str] | None = None,
    ) -> list[Placed]:
        """Chunks that are not of this knowledge base, with their neighbours in it.

        Args:
          chunks: with their token ids, [T] int32.
          template: what wraps the neighbours.
          room: tokens that neighbours and chunk have together.
          groups: of the reader, who may read every neighbour; None is not limited.

        Raises KnowledgeBaseError without a model, and as ``refresh``.
        """
        neighbours = self._neighbours(self._require_model("find neighbours as token ids"))
        self._check_vectors(neighbours.by)
        neighbours = dataclasses.replace(neighbours, template=template)
        return neighbours.find_given(chunks, room, groups)

    def chunks_of(self, document_id: str, numbers: Sequence[int] | None = None) -> list[Hit]:
        """Chunks of a document in order, with score 0: all, or those with these places in it.

        None of a document that is not there, or has fewer chunks.
        """
        ids = self._catalog.ids_of_document(document_id)
        wanted = range(len(ids)) if numbers is None else (i for i in numbers if i < len(ids))
        return self._catalog.hits([(ids[number], 0.0) for number in wanted])

    def holds(self, chunk_ids: Sequence[int], content_ids: Sequence[str]) -> bool:
        """Whether all these chunks, and chunks with these contents, are still there."""
        return self._catalog.holds(chunk_ids, content_ids)

    def embed(self, *, progress: bool = False) -> int:
        """Make the vectors that chunks lack, after an embedder was added; returns how many.

        A run that was cut short is continued by the next. Raises KnowledgeBaseError without an
        embedder or when opened for reading.
        """
        self._require_writable("embed its chunks")
        if self._vectors is None:
            raise KnowledgeBaseError(f"{self.path} has no embedder; open it with embedder=")
        with self._acknowledged():
            made = upkeep.embed_missing(self._catalog, self._vectors, progress)
            self._catalog.set("vectors_complete", True)
        self._settings["vectors_complete"] = True
        return made

    def gc(
        self,
        *,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
        dry_run: bool = False,
        others: Sequence[str | os.PathLike[str]] = (),
        gone: Sequence[str] = (),
    ) -> upkeep.GcReport:
        """Free what removed and replaced documents, and writers that died, have left behind.

        Nothing younger than the grace is touched, nor what ``add`` and the like have put and not
        committed yet, in any process: it may run beside writers at any grace. Readers of what is
        removed need one.

        Args:
          grace_seconds: longer than any request takes.
          dry_run: only count.
          others: folders of other knowledge bases in the same repository that are not where they
            were opened for writing last.
          gone: ids of those that exist no more.

        Raises KnowledgeBaseError when another knowledge base of the repository cannot be asked, or
        this one was opened for reading; StoreError when files cannot be removed.
        """
        self._require_writable("collect its garbage")
        if not grace_seconds >= 0:
            raise RequestError(f"grace_seconds={grace_seconds}: expected 0 or more")
        self._finish_removals()
        owners = self._owners()
        claim = upkeep.Claim.of(self._catalog, self._catalog.settings())
        folders = [find_folder(path) for path in others]
        with upkeep.all_claims(claim, self.id, owners, folders, gone) as claims:
            report = upkeep.sweep(self.store, claims, self._vectors, grace_seconds, dry_run)
        if not dry_run:
            for owner_id in gone:
                owners.forget(owner_id)
            with self._acknowledged():
                self._catalog.set("last_gc", upkeep.gc_note(report))
        return report

    def verify(
        self,
        *,
        repair: bool = False,
        max_bytes_per_second: float | None = None,
        progress: bool = False,
    ) -> upkeep.VerifyReport:
        """Hold every row of the catalog, and every chunk's KV and indexes, against their digests.

        Rows are held against each other as well: the tokens against the text, the names of KV
        against the tokens, the words against the texts, their numbers against what there should be.

        Args:
          repair: make rows anew from those that prove what they were, and drop documents of which
            nothing does; encode damaged and missing chunks again, and those without the index that
            they should have, and embed those whose vectors are gone.
          max_bytes_per_second: of reading.
          progress: show how far it is, on stderr.

        Raises KnowledgeBaseError for a repair without a model or when opened for reading.
        """
        model = None
        if repair:
            model = self._require_model("repair chunks")
            self._require_writable("repair chunks")
        rows = self._verify_rows(repair)
        report = upkeep.verify(
            self.store,
            self._catalog,
            self.indexing,
            max_bytes_per_second,
            limited=self._settings.get("on_demand", False)
            or (self._settings["max_bytes"] is not None and self._settings["store"] is None),
            progress=progress,
        )
        if model is not None:
            report = upkeep.repair(report, self._catalog, self.template, self._encoding(model))
            if self._vectors is not None and not self._all_embedded():
                self.embed(progress=progress)
            if rows.faults and self._behind_others:
                self.refresh(progress=progress)
        lost = 0
        if self._vectors is not None and self._settings["vectors_complete"]:
            lost = len(self._vectors.compared(self._catalog).lost)
        return dataclasses.replace(report, rows=rows, vectors_lost=lost)

    def verify_forgotten(self, document: str) -> ForgottenReport:
        """List all that derives from a document that was removed or replaced, or is still there.

        Rows, words, vectors, KV of its chunks and KV that saw them, and what files may hold. Works
        after its rows are gone, as a removal leaves keyed digests. Text that other documents have
        as well is theirs, and not listed. Reads every record of the store.

        Raises RequestError for what is no id, KnowledgeBaseError for one that neither names a
        document nor named one that was removed.
        """
        require_kind("document", document, (str,), "a text, a document's id", optional=False)
        return look_for(document, self._catalog, self.store, self._vectors)

    def _verify_rows(self, repair: bool) -> RowsReport:
        """Check every row of the catalog, with the tokenizer where it is at hand."""
        try:
            tokenizer = self._tokenizer(None)
            names = Names(self.store.fingerprint, self.template, tokenizer, self.primer)
        except (KnowledgeBaseError, TokenizerError) as error:
            if repair:
                raise
            names, why = None, f"tokens and keys were not checked: {error}"
        else:
            why = ""
        look = functools.partial(examine, names)
        if self._settings.get(TERMS) != TERMS_VERSION:
            why = why or "words were not checked: their index is of another version"
        audit = self._catalog.audit()
        if not repair:
            return dataclasses.replace(audit.check(look), unchecked=why)
        with self._acknowledged():
            report = self._catalog.audit().repair(look)
        self._finish_removals()
        return report

    @property
    def gates(self) -> dict[str, dict[str, Any]]:
        """By method: the recompute ratio that `jaxrag kb gate` found, with what was measured."""
        return {
            name.removeprefix(GATE): value
            for name, value in self._settings.items()
            if name.startswith(GATE)
        }

    def set_gate(self, method: str, gate: Mapping[str, Any]) -> None:
        """Remember what a gate found for a method, instead of what an earlier one did.

        Raises KnowledgeBaseError when opened for reading.
        """
        self._require_writable("remember a gate")
        with self._acknowledged():
            self._catalog.set(GATE + method, dict(gate))
        self._settings[GATE + method] = dict(gate)

    def set_primer(self, primer: Primer) -> None:
        """Encode chunks behind this primer from now on, where a variant or a method sees one.

        KV behind an earlier one is no chunk's any more: to add the same documents again makes it
        anew, as a question does for what it needs, and ``gc`` frees the old. What gates found for
        methods that read such KV is forgotten.

        Raises KnowledgeBaseError for a primer that leaves no room for a chunk, or when opened
        without a model or for reading; ConfigError for vectors of another model.
        """
        model = self._require_model("measure a primer in tokens")
        self._require_writable("remember a primer")
        check_primer(primer, self.template, model, self.chunking.chunk_tokens)
        if self.primer is not None and primer.same(self.primer):
            return
        seeing = {name for name, encoder in ENCODERS.items() if encoder.sees_primer}
        judged = [
            GATE + name
            for name, gate in self.gates.items()
            if seeing & {gate["subject"]["method"][role] for role in ("encoder", "first_encoder")}
        ]
        with self._acknowledged():
            # Keys first: whoever is ended in between leaves a base that lacks KV, not a wrong one.
            self._catalog.forget_keys(seeing)
            self._catalog.forget(judged)
            self._catalog.set(PRIMER, primer.to_dict())
        self._settings, self.primer = self._catalog.settings(), primer

    def stats(self, *, walk: bool = False) -> dict[str, Any]:
        """Counts and settings, JSON-able.

        ``stored`` is what the chunk store holds under this knowledge base's fingerprint, the KV of
        the template's prefix among it, as its writers noted it (``ChunkStore.counted``).

        Args:
          walk: look at every stored chunk, and add to ``stored`` how many chunks have no KV yet
            ("missing"), how many records are "corrupt" or "unsealed", and chunks and bytes that the
            knowledge base does not need ("orphans", "orphan_bytes").
        """
        stats = collect_stats(
            self.path, self._catalog, self._catalog.settings(), self.store, self._vectors
        )
        if walk:
            stats["stored"] |= unneeded(self._catalog, self._catalog.settings(), self.store)
        return stats | {"gates": {name: gate["ratio"] for name, gate in self.gates.items()}}

    @property
    def _behind_others(self) -> tuple[str, ...]:
        """The variants that see neighbours."""
        return tuple(name for name in self.encoders if encoder_named(name).sees_neighbours)

    def _neighbours(self, model: Model) -> Neighbours:
        """How neighbours are found: as the settings say, or by default where no variant needs it.

        By default, ten by vectors where every chunk has one, else by words.
        """
        known = self._settings["neighbours"]
        if known is None:
            by = "vectors" if self._all_embedded() else "bm25"
            known = {"top_n": DEFAULT_TOP_N, "by": by}
        return Neighbours(self._catalog, self._vectors, model, self.template, **known)

    def _check_vectors(self, by: SimilarBy) -> None:
        if by == "vectors" and not self._all_embedded():
            raise KnowledgeBaseError(
                f"{self.path} has chunks without a vector to find their neighbours by; call "
                "embed(), or run `jaxrag kb verify --repair`"
            )


def collect_stats(
    folder: Path,
    catalog: Catalog,
    settings: Mapping[str, Any],
    store: ChunkStore | ReadThrough,
    vectors: ChunkVectors | None,
) -> dict[str, Any]:
    """Counts and settings, JSON-able."""
    counts, stored = catalog.counts(), store.counted()
    kept = stored.encoders
    indexes = {name: kind for name, kind in stored.aux.items() if indexes_nbytes({name: 1})}
    known = settings["vectors"]
    indexing, size = settings.get("attention_index"), settings["chunking"]["chunk_tokens"]
    return {
        "path": str(folder),
        "id": settings["id"],
        "model": settings["model"]["path"],
        "model_digest": settings["model"]["digest"],
        "template": settings["template"]["name"],
        "chunk_by": settings["chunking"]["by"],
        "chunk_tokens": settings["chunking"]["chunk_tokens"],
        "overlap": settings["chunking"]["overlap"],
        "documents": counts["documents"],
        "chunks": counts["chunks"],
        "tokens": counts["tokens"],
        "encoders": {name: counts["encoded"].get(name, 0) for name in settings["encoders"]},
        "neighbours": settings["neighbours"],
        **({"primer": settings[PRIMER]["name"]} if PRIMER in settings else {}),
        "stored": {
            "kv": settings["layout"]["stored"],
            "location": settings["store"] or str(folder),
            "salted": bool(settings["salt"]),
            "sealed": settings.get("sealed") is not None,
            "max_bytes": settings["max_bytes"],
            "chunks": sum(kind.chunks for kind in kept.values()),
            "tokens": sum(kind.tokens for kind in kept.values()),
            "bytes": sum(kind.nbytes for kind in kept.values()),
            "bytes_per_token": store.layout.stored_nbytes(size) / size,
            "variants": {name: kind.chunks for name, kind in sorted(kept.items())},
        },
        "attention_index": None
        if indexing is None
        else {
            "kind": indexing["kind"],
            "from_tokens": indexing["exact_below"],
            "chunks": max((kind.chunks for kind in indexes.values()), default=0),
            "bytes": sum(kind.nbytes for kind in indexes.values()),
        },
        "vectors": None
        if known is None or vectors is None
        else {
            "index": known["index"],
            "embedder": known["embedder"]["path"],
            "embedder_digest": known["embedder"]["digest"],
            "dim": known["embedder"]["dim"],
            "vectors": len(vectors.index),
            "complete": settings["vectors_complete"] and not len(vectors.compared(catalog).lost),
        },
        "last_gc": settings["last_gc"],
    }


def unneeded(
    catalog: Catalog, settings: Mapping[str, Any], store: ChunkStore | ReadThrough
) -> dict[str, int]:
    """What only a look at every stored chunk tells; reads what is new in the store."""
    claim = Claim.of(catalog, settings)
    named = upkeep.NamedKeys([catalog])
    refused: collections.Counter[type] = collections.Counter()
    orphans: collections.Counter[str] = collections.Counter()
    missing = catalog.num_keys()
    for key, seen in store.committed():
        if not isinstance(seen, StoredChunk):
            refused[type(seen)] += 1
        elif key in named:
            missing -= 1
        else:
            record = store.find([key])[key]
            if isinstance(record, Record) and not claim.holds(record):
                orphans.update(chunks=1, bytes=store.layout.nbytes(record.tokens))
    return {
        "missing": missing,
        "corrupt": refused[ChunkCorrupt],
        "unsealed": refused[ChunkNotSealed],
        "orphans": orphans["chunks"],
        "orphan_bytes": orphans["bytes"],
    }
