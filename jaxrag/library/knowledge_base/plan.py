"""What adding documents would do, found out without changing anything."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.library.documents import BadDocument, Intake
from jaxrag.library.knowledge_base.neighbours import Neighbours, entered
from jaxrag.library.knowledge_base.prepare import Prepared, Preparer
from jaxrag.library.knowledge_base.reports import AddPlan
from jaxrag.library.retrieve.base import searched_text
from jaxrag.models.text.progress import progress_bar
from jaxrag.reuse.encode import NEIGHBOUR_ENCODER, ChunkInContext

_BATCH = 256  # documents that are looked up at once


@dataclasses.dataclass
class AddPlanner:
    """Looks at documents as an ingest does.

    Attributes:
      preparer: as of the ingest.
      neighbours: how they are found; None where no variant sees any.
      encoders: the variants that see neighbours.
    """

    preparer: Preparer
    neighbours: Neighbours | None
    encoders: Sequence[str]

    def look(self, intake: Intake, progress: bool = False) -> AddPlan:
        """Read the documents; ``leaving`` of the plan are those that others would replace.

        ``progress`` shows how far it is, on stderr.
        """
        plan = AddPlan()
        layout = self.preparer.encoding.store.layout
        behind = len(self.encoders)
        if behind and NEIGHBOUR_ENCODER not in self.preparer.encoders:
            behind += 1  # what they are read from is kept, too
        bar = progress_bar(None, "look", "document", shown=progress)
        self._contents: set[str] = set()  # of documents that are new, or would be replaced
        self._vectors: list[HostArray] = []  # of contents that no chunk has
        self._num_fresh = 0
        for some in itertools.batched(self.preparer.prepare_ahead(intake), _BATCH):
            bad = tuple(read for read in some if isinstance(read, BadDocument))
            good = [read for read in some if isinstance(read, Prepared)]
            changed = [doc for doc in good if not doc.unchanged]
            self._take(changed)
            bar.update(len(some))
            lacking = self._lacking(good)
            # A variant that sees neighbours gets KV of every new chunk, whichever they are.
            lengths = [*lacking, *(len(ids) for doc in changed for ids in doc.token_ids * behind)]
            plan = dataclasses.replace(
                plan,
                documents=plan.documents + len(good),
                replaced=plan.replaced + sum(doc.replaces for doc in good),
                unchanged=plan.unchanged + len(good) - len(changed),
                chunks=plan.chunks + sum(len(doc.token_ids) for doc in good),
                encoded=plan.encoded + len(lacking),
                leaving=(*plan.leaving, *(doc.entry.document.id for doc in good if doc.replaces)),
                skipped=(*plan.skipped, *bad),
                kv_tokens=plan.kv_tokens + sum(lengths),
                kv_bytes=plan.kv_bytes + sum(map(layout.stored_nbytes, lengths)),
            )
        bar.close()
        return plan

    def _lacking(self, batch: Sequence[Prepared]) -> list[int]:
        """Tokens of each chunk of a batch without KV, by variants that see no neighbours."""
        encoding, lengths = self.preparer.encoding, list[int]()
        for encoder in self.preparer.encoders:
            by_key: dict[str, ChunkInContext] = {}
            for doc in batch:
                by_key |= zip(
                    doc.entry.keys[encoder], map(ChunkInContext, doc.token_ids), strict=True
                )
            lengths += (len(chunk.ids) for chunk in encoding.missing(encoder, by_key).values())
        return lengths

    def _take(self, batch: Sequence[Prepared]) -> None:
        """Remember what no chunk of the knowledge base has."""
        if self.neighbours is None:
            return
        texts = {
            content: searched_text(doc.entry.document.title, chunk.text)
            for doc in batch
            for content, chunk in zip(doc.entry.content_ids, doc.entry.chunks, strict=True)
        }
        known = self.neighbours.catalog.with_content(texts)
        fresh = [name for name in texts if name not in known and name not in self._contents]
        self._contents |= texts.keys()
        self._num_fresh += len(fresh)
        if fresh and self.neighbours.by == "vectors":
            vectors = self.neighbours.vectors
            assert vectors is not None
            self._vectors.append(vectors.embedder([texts[name] for name in fresh], "passage"))

    def count_behind(self, leaving: Sequence[str]) -> int | None:
        """At most so many chunks would be encoded behind other neighbours, after ``look``.

        None where no variant sees neighbours.

        Args:
          leaving: documents that would be replaced or removed.
        """
        near = self.neighbours
        if near is None:
            return None
        catalog = near.catalog
        gone = [name for name in catalog.contents_only_of(leaving) if name not in self._contents]
        ids = np.setdiff1d(catalog.chunk_ids(), catalog.ids_with_content(gone))
        if near.by == "bm25" and (gone or self._num_fresh):
            return (len(ids) + self._num_fresh) * len(self.encoders)
        count = 0
        for encoder in self.encoders:
            own, last = catalog.last_neighbours(encoder, near.top_n)
            lost = catalog.ids_behind(gone, encoder)
            others = ~np.isin(ids, own) | np.isin(ids, lost)
            if self._vectors:
                assert near.index is not None
                others |= np.isin(ids, own[entered(near.index, own, last, self._vectors)])
            elif not gone:
                others &= ~np.isin(ids, catalog.encoded_ids(encoder))
            count += int(others.sum()) + self._num_fresh
        return count
